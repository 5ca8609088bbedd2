// formats_peer FILE[:/GROUP] COLUMN OUTPUT
//   writes all values of a column to OUTPUT, and prints their type and the shape of a sample.
// formats_peer --windows SIZE,… STRIDE,… OUTPUT FILE:/NAME...
//   does so for the columns of windows, one after the other, a line for each.
// formats_peer --copy INPUT OUTPUT COLUMN...
//   copies columns into another layout.
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "support/numbers.hpp"

#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

namespace {

void write(const muster::Dataset& data, const char* output) {
  std::vector<std::int64_t> samples(static_cast<std::size_t>(data.count()));
  std::iota(samples.begin(), samples.end(), 0);
  std::ofstream file(output, std::ios::binary);
  for (const auto& [name, column] : data.read(samples)) {
    const auto values = column.contiguous();
    file.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    std::cout << c10::toString(values.scalar_type()) << " " << values.sizes() << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) try {
  if (std::string(arguments[1]) == "--windows")
    write(muster::Dataset::windows({arguments + 5, arguments + count}, {.size = muster::test::numbers(arguments[2]),
                                                                        .stride = muster::test::numbers(arguments[3])}),
          arguments[4]);
  else if (std::string(arguments[1]) == "--copy")
    muster::convert_h5({arguments[2]}, arguments[3], {.columns = {arguments + 4, arguments + count}, .compress = 1});
  else
    write(muster::Dataset::from_hdf5({arguments[1]}, {.columns = {arguments[2]}}), arguments[3]);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
