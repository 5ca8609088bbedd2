// zarr_peer columns FOLDER: for each line "STORE NAME" of the standard input, writes the values of that column to
// FOLDER/NUMBER and prints its type and shape, or the error. NUMBER is that of the line.
// zarr_peer all: for each line "STORE", reads all columns, each alone, and prints "read" or the first error.
// zarr_peer windows FOLDER JSON VARIABLE...: writes each column of all windows to FOLDER/NAME, and prints their shapes.
// The options of the windows are JSON: {"size", "stride", "margin", "range"}.
#include <torch/torch.h>
#include <muster/convert.hpp>
#include <muster/dataset.hpp>
#include <muster/error.hpp>

#include <algorithm>
#include <exception>
#include <fstream>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

namespace {

using muster::Dataset, muster::Json;

void write(const std::string& path, const at::Tensor& values) {
  const auto all = values.contiguous();
  std::ofstream(path, std::ios::binary)
      .write(static_cast<const char*>(all.const_data_ptr()), static_cast<std::streamsize>(all.nbytes()));
}

std::string shape_text(const at::Tensor& values) {
  return std::string(c10::toString(values.scalar_type())) + " " + Json(values.sizes().vec()).dump();
}

void read_columns(const std::string& folder) {
  std::string line;
  for (int number = 0; std::getline(std::cin, line); ++number) {
    const auto space = line.find(' ');
    const auto name = line.substr(space + 1);
    try {
      const auto values = Dataset::from_hdf5({line.substr(0, space)}, {.columns = {name}}).column(name);
      write(folder + "/" + std::to_string(number), values);
      std::cout << shape_text(values) << "\n";
    } catch (const muster::Error& error) {
      std::cout << "error " << error.what() << "\n";
    }
  }
}

void read_all() {
  for (std::string store; std::getline(std::cin, store);) {
    try {
      const auto description = muster::describe_dataset(store);
      for (const auto& line : description.at("advice"))
        if (line.get<std::string>().find(store) != std::string::npos &&
            line.get<std::string>().find("muster convert") == std::string::npos &&
            line.get<std::string>().find("Dataset::windows") == std::string::npos)
          throw muster::Error(muster::ExitCode::data, line.get<std::string>());
      for (const auto& column : description.at("columns")) {
        const auto dataset = Dataset::from_hdf5({store}, {.columns = {column.at("name")}});
        // A number in the metadata may have made it huge, with missing chunks.
        const std::int64_t few = 10'000;
        std::vector<std::int64_t> samples(static_cast<std::size_t>(std::min(few, dataset.count())));
        std::iota(samples.begin(), samples.end(), 0);
        double values = static_cast<double>(samples.size());
        const auto schema = dataset.schema();
        for (const auto size : schema.front().shape) values *= static_cast<double>(size);
        if (values < 1e6) dataset.read(samples);
      }
      std::cout << "read\n";
    } catch (const muster::Error& error) {
      std::cout << static_cast<int>(error.code()) << " " << error.what() << "\n";
    }
    std::cout << std::flush;
  }
}

void read_windows(const std::string& folder, const Json& options, const std::vector<std::string>& variables) {
  muster::WindowOptions windows{.size = options.at("size")};
  windows.stride = options.value("stride", std::vector<std::int64_t>());
  windows.margin = options.value("margin", std::vector<std::int64_t>());
  for (const auto& range : options.value("range", Json::array()))
    windows.range.push_back({range.at(0), {range.at(1), range.at(2)}});
  const auto dataset = Dataset::windows(variables, windows);
  std::vector<std::int64_t> samples(static_cast<std::size_t>(dataset.count()));
  std::iota(samples.begin(), samples.end(), 0);
  for (const auto& [name, values] : dataset.read(samples)) {
    write(folder + "/" + name, values);
    std::cout << name << " " << shape_text(values) << "\n";
  }
}

}  // namespace

int main(int count, char** arguments) try {
  const std::string command = arguments[1];
  if (command == "columns") read_columns(arguments[2]);
  if (command == "all") read_all();
  if (command == "windows")
    read_windows(arguments[2], Json::parse(std::string(arguments[3])), {arguments + 4, arguments + count});
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << "\n";
  return 1;
}
