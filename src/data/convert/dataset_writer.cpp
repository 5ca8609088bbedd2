#include "data/convert/dataset_writer.hpp"

#include "base/file.hpp"
#include "hdf5/file.hpp"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <utility>

namespace muster::detail::data {
namespace {

std::filesystem::path temporary_name(const std::filesystem::path& output) {
  static std::atomic<int> count{0};
  auto name = output;
  name += ".tmp." + std::to_string(::getpid()) + "." + std::to_string(count++);
  return name;
}

std::vector<hsize_t> sizes(const std::vector<std::int64_t>& shape) { return {shape.begin(), shape.end()}; }

hdf5::Handle creation_properties(const std::string& doing, hid_t stored, const std::vector<std::int64_t>& shape,
                                 const Chunking& chunking) {
  const auto checked = [&](std::int64_t status) { hdf5::check(status, doing, ExitCode::retry); };
  hdf5::Handle creation(hdf5::check(H5Pcreate(H5P_DATASET_CREATE), doing, ExitCode::retry), H5Pclose);
  const hid_t id = creation.get();
  checked(H5Pset_fill_time(id, H5D_FILL_TIME_NEVER));
  checked(H5Pset_obj_track_times(id, false));  // the same input makes the same file
  // Chunks too get their place at once if their size is known: without, HDF5 1.10 forgets where a lone chunk went that
  // did not fit into its cache.
  if (!chunking.compress) checked(H5Pset_alloc_time(id, H5D_ALLOC_TIME_EARLY));
  if (!chunking.chunk) return creation;
  auto chunk = sizes(shape);
  chunk.front() = static_cast<hsize_t>(*chunking.chunk);
  checked(H5Pset_chunk(id, static_cast<int>(chunk.size()), chunk.data()));
  if (chunking.compress) {
    if (H5Tget_size(stored) > 1) checked(H5Pset_shuffle(id));
    checked(H5Pset_deflate(id, static_cast<unsigned>(*chunking.compress)));
  }
  return creation;
}

}  // namespace

DatasetWriter::DatasetWriter(std::filesystem::path output, bool aligned)
    : output_(std::move(output)), temporary_(temporary_name(output_)) {
  try {
    file_ = hdf5::create_file(temporary_, aligned ? 4096 : 1);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

DatasetWriter::DatasetWriter(DatasetWriter&& other) noexcept
    : output_(std::move(other.output_)),
      temporary_(std::exchange(other.temporary_, {})),
      file_(std::move(other.file_)),
      column_(std::move(other.column_)),
      next_(other.next_) {}

DatasetWriter::~DatasetWriter() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void DatasetWriter::begin_column(const std::string& name, hid_t stored, const std::vector<std::int64_t>& shape,
                                 const Chunking& chunking) {
  const hdf5::Lock lock;
  const auto dimensions = sizes(shape);
  const hdf5::Handle space(
      hdf5::check(H5Screate_simple(static_cast<int>(dimensions.size()), dimensions.data(), nullptr), doing(),
                  ExitCode::retry),
      H5Sclose);
  const auto creation = creation_properties(doing(), stored, shape, chunking);
  // Without a chunk cache every chunk goes to the disk in the write that brings it, and that write's status tells.
  const hdf5::Handle access(hdf5::check(H5Pcreate(H5P_DATASET_ACCESS), doing(), ExitCode::retry), H5Pclose);
  hdf5::check(H5Pset_chunk_cache(access.get(), 0, 0, 1), doing(), ExitCode::retry);
  column_ = {
      hdf5::check(H5Dcreate2(file_.get(), name.c_str(), stored, space.get(), H5P_DEFAULT, creation.get(), access.get()),
                  doing(), ExitCode::retry),
      H5Dclose};
  next_ = 0;
}

void DatasetWriter::write(std::span<const std::byte> values, std::int64_t count, hid_t spelled) {
  const hdf5::Lock lock;
  const auto shape = hdf5::shape(column_.get());
  const auto rank = static_cast<int>(shape.size());
  std::vector<hsize_t> start(shape.size(), 0);
  auto block = sizes(shape);
  start.front() = static_cast<hsize_t>(next_);
  block.front() = static_cast<hsize_t>(count);
  const hdf5::Handle memory(hdf5::check(H5Screate_simple(rank, block.data(), nullptr), doing(), ExitCode::retry),
                            H5Sclose);
  const hdf5::Handle stored(hdf5::check(H5Dget_space(column_.get()), doing(), ExitCode::retry), H5Sclose);
  hdf5::check(H5Sselect_hyperslab(stored.get(), H5S_SELECT_SET, start.data(), nullptr, block.data(), nullptr), doing(),
              ExitCode::retry);
  hdf5::check(H5Dwrite(column_.get(), spelled, memory.get(), stored.get(), H5P_DEFAULT, values.data()), doing(),
              ExitCode::retry);
  next_ += count;
}

void DatasetWriter::end_column() {
  const hdf5::Lock lock;
  hdf5::check(H5Fflush(file_.get(), H5F_SCOPE_LOCAL), doing(), ExitCode::retry);
  column_.close(doing());
}

void DatasetWriter::finish() {
  file_.close(doing());
  File written(temporary_, File::Mode::write);
  written.sync();
  written.close();
}

void DatasetWriter::publish() {
  if (::rename(temporary_.c_str(), output_.c_str()) != 0)
    throw Error(ExitCode::retry, doing(), std::strerror(errno), "Check the permissions there");
  temporary_.clear();
  sync_directory(output_.has_parent_path() ? output_.parent_path() : std::filesystem::path("."));
}

}  // namespace muster::detail::data
