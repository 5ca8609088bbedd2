// Copies columns of an HDF5 file, or of a Zarr store, into another layout.
#include "base/text.hpp"
#include "convert/convert.hpp"
#include "convert/hdf5_rows.hpp"
#include "data/sources/chunk_reader.hpp"
#include "hdf5/foreign_chunks.hpp"
#include "zarr/open_file.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <utility>

namespace muster {
namespace {

using detail::convert::Hdf5Group, detail::convert::Hdf5Rows, detail::convert::InputColumn;
namespace hdf5 = detail::hdf5;

constexpr std::int64_t plain_bytes = 1 << 20;  ///< most bytes that plain_pass() reads at once, unless a row is larger

void read_plainly(Hdf5Rows& rows, std::int64_t samples) {
  const auto bytes = static_cast<std::int64_t>(rows.row_bytes());
  const auto step = std::max<std::int64_t>(1, plain_bytes / bytes);
  std::vector<std::byte> values(static_cast<std::size_t>(step * bytes));
  for (std::int64_t at = 0; at < samples; at += step) rows.read(at, std::min(step, samples - at), values);
}

/// Returns a pass that reads the chunks of Zarr arrays, each once, on as many threads as a dataset decodes on.
PlainPass chunk_pass(const Hdf5Group& group, const std::vector<std::string>& columns, std::int64_t samples) {
  struct Array {
    std::shared_ptr<const hdf5::ForeignChunks> chunks;
    std::int64_t count;
    std::size_t bytes;
  };
  const hdf5::Lock lock;
  std::vector<Array> arrays;
  for (const auto& name : columns) {
    const auto shown = group.place.shown(name);
    const auto dataset = hdf5::open_dataset(group.group.get(), name, shown);
    const hdf5::ChunkIndex index(dataset.get(), shown);
    const auto type = hdf5::dataset_property(dataset.get(), H5Dget_type, "reading " + shown);
    Array array{index.foreign(), 1, H5Tget_size(type.get())};
    for (const auto size : index.chunk_shape()) array.bytes *= static_cast<std::size_t>(size);
    auto grid = index.grid();
    grid.front() = std::min(grid.front(), (samples - 1) / index.chunk_shape().front() + 1);
    for (const auto chunks : grid) array.count *= chunks;
    arrays.push_back(array);
  }
  return [arrays] {
    for (const auto& array : arrays) {
      std::atomic<std::int64_t> next = 0;
      const auto read = [&] {
        hdf5::Buffer memory;
        const auto chunk = memory.take(array.bytes);
        for (auto number = next++; number < array.count; number = next++) array.chunks->read(number, chunk);
      };
      std::vector<std::future<void>> others;
      for (int i = 0; i < detail::data::decoding_threads(); ++i) others.push_back(std::async(std::launch::async, read));
      read();
      for (auto& other : others) other.get();
    }
  };
}

std::vector<std::filesystem::path> copy_one(const std::vector<std::filesystem::path>& inputs,
                                            const std::filesystem::path& output, const ConvertOptions& options,
                                            bool is_store) {
  if (inputs.size() != 1)
    throw Error(
        ExitCode::usage, "converting to " + output.string(),
        detail::str(inputs.size(), " inputs are given, and one ", is_store ? "Zarr store" : "HDF5 file", " is copied"),
        is_store ? "Name one, as STORE.zarr or STORE.zarr:/group" : "Name one, as FILE.h5 or FILE.h5:/group");
  const auto path = hdf5::GroupPath(inputs.front().string()).path;
  if (std::filesystem::exists(path) && detail::zarr::is_store(path) != is_store)
    throw Error(ExitCode::data, "reading " + path, is_store ? "it is no Zarr store" : "it is a Zarr store",
                is_store ? "`muster convert h5` copies HDF5 files" : "`muster convert zarr` copies those");
  return detail::convert::copy_columns(inputs.front(), output, options);
}

}  // namespace

std::vector<std::filesystem::path> detail::convert::copy_columns(const std::filesystem::path& input,
                                                                 const std::filesystem::path& output,
                                                                 const ConvertOptions& options,
                                                                 std::optional<std::int64_t> samples) {
  const auto group = std::make_shared<const Hdf5Group>(input.string());
  const auto names = options.columns.empty() ? hdf5::columns_of(group->group.get(), group->place) : options.columns;
  check_conversion({group->place.path}, names.size(), names, output, options);
  std::vector<InputColumn> columns;
  for (const auto& name : names) columns.emplace_back(std::make_unique<Hdf5Rows>(group, name));
  return convert_columns(std::move(columns), names, output, options, samples);
}

std::vector<std::filesystem::path> convert_h5(const std::vector<std::filesystem::path>& inputs,
                                              const std::filesystem::path& output, const ConvertOptions& options) {
  return copy_one(inputs, output, options, false);
}

std::vector<std::filesystem::path> convert_zarr(const std::vector<std::filesystem::path>& inputs,
                                                const std::filesystem::path& output, const ConvertOptions& options) {
  return copy_one(inputs, output, options, true);
}

PlainPass plain_pass(const std::string& path, const std::vector<std::string>& columns, std::int64_t samples) {
  const auto group = std::make_shared<const Hdf5Group>(path);
  if (detail::zarr::is_store(group->place.path)) return chunk_pass(*group, columns, samples);
  std::vector<std::shared_ptr<Hdf5Rows>> opened;
  for (const auto& name : columns) opened.push_back(std::make_shared<Hdf5Rows>(group, name));
  return [=] {
    for (const auto& rows : opened) read_plainly(*rows, std::min(samples, rows->shape().front()));
  };
}

}  // namespace muster
