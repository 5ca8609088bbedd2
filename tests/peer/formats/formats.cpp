// formats_peer FILE[:/GROUP] COLUMN OUTPUT: writes all values of a column to OUTPUT, and prints their type and the
// shape of a sample.
#include "muster/dataset.hpp"

#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <numeric>
#include <vector>

int main(int, char** arguments) try {
  const auto data = muster::Dataset::from_hdf5({arguments[1]}, {.columns = {arguments[2]}});
  std::vector<std::int64_t> samples(static_cast<std::size_t>(data.count()));
  std::iota(samples.begin(), samples.end(), 0);
  const auto values = data.read(samples)[arguments[2]].contiguous();
  std::ofstream(arguments[3], std::ios::binary)
      .write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  std::cout << c10::toString(values.scalar_type()) << " " << values.sizes() << "\n";
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
