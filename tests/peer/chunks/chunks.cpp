// chunks_peer FILE.h5 FOLDER: decodes every dataset of the file's root and writes its bytes to FOLDER/NAME.
#include "hdf5/file.hpp"
#include "support/chunk_reader.hpp"

#include <cstdio>
#include <exception>
#include <fstream>

int main(int, char** arguments) try {
  using namespace muster::detail;
  const auto file = hdf5::open_file(arguments[1]);
  const File bytes(arguments[1], File::Mode::read);
  for (const auto& name : hdf5::list(file.get())) {
    const auto values = muster::test::read_chunks(file.get(), bytes, name);
    std::ofstream(std::string(arguments[2]) + "/" + name, std::ios::binary)
        .write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size()));
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
