#include "data/sources/file_source.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <utility>

namespace muster::detail::data {

FileSource::FileSource(std::vector<std::string> paths, std::int64_t cache_bytes)
    : paths_(std::move(paths)), cache_bytes_(cache_bytes) {}

std::int64_t FileSource::count() {
  ensure_open();
  return count_;
}

const Schema& FileSource::schema() {
  ensure_open();
  return schema_;
}

Blocks FileSource::blocks() {
  ensure_open();
  return blocks_;
}

NodeChunks* FileSource::node_chunks() {
  ensure_open();
  return blocks_.rows == 0 ? decoding_->shareable() : nullptr;
}

void FileSource::end_threads() {
  if (decoding_) decoding_->end_threads();
}

DatasetFingerprint FileSource::fingerprint() {
  ensure_open();
  DatasetFingerprint print{.count = count_, .schema = schema_text(schema_)};
  if (blocks_.rows > 0) print.order = str("in ", blocks_.lanes, " lanes of ", block_text());
  for (const auto* file : open_files_)
    print.parts.push_back(fingerprint_of(*file, max_fingerprint_blocks / static_cast<int>(open_files_.size())));
  // Of a Zarr store, only the metadata and the sizes of chunks are compared.
  constexpr std::int64_t most_sizes = 1 << 14;
  for (const auto& chunks : decoding_->foreign) {
    const auto stored = chunks->stored(most_sizes / std::ssize(decoding_->foreign));
    print.parts.push_back({shown(), stored.bytes, stored.checksum});
  }
  return print;
}

std::string FileSource::shown() const {
  const auto more = paths_.size() > 1 ? str(" and ", paths_.size() - 1, " more") : "";
  return hdf5::GroupPath(paths_.front()).path + more;
}

std::vector<std::string> FileSource::files() const {
  std::vector<std::string> files;
  for (const auto& path : paths_) files.push_back(hdf5::GroupPath(path).path);
  return files;
}

std::string FileSource::block_text() const { return str("chunks of ", blocks_.rows, " samples"); }

void FileSource::prepare_to_open() const {
  if (paths_.empty()) throw Error(ExitCode::data, "making a dataset", "there are no files", "Name at least one");
  constexpr std::size_t few = 100;    // files; each is open twice, for HDF5 and for reads beside it
  constexpr rlim_t enough = 1 << 16;  // a higher limit makes programs slow that close all possible files before exec()
  rlimit limit{};
  if (paths_.size() <= few || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, enough));
  ::setrlimit(RLIMIT_NOFILE, &limit);  // if it is refused, opening tells
}

void FileSource::ensure_open() {
  std::call_once(opened_, [this] {
    decoding_ = std::make_unique<ChunkDecoding>(cache_bytes_);
    open_files_.clear();
    count_ = 0;
    schema_.clear();
    blocks_ = {};
    memory_left_ = static_cast<double>(std::max<std::int64_t>(0, cache_bytes_));
    open_all();
  });
}

void FileSource::add_file(DataFile& file, const Schema& schema, std::int64_t samples) {
  const auto doing = "opening " + file.path;
  const auto first_file = hdf5::GroupPath(paths_.front()).path;
  if (schema_.empty()) schema_ = schema;
  if (!std::ranges::equal(schema, schema_, {}, &Column::name, &Column::name))
    throw Error(ExitCode::data, doing,
                "its columns are " + joined(schema, &Column::name) + ", those of " + first_file + " are " +
                    joined(schema_, &Column::name),
                "Choose columns that all files have");
  for (std::size_t i = 0; i < schema.size(); ++i)
    if (schema[i] != schema_[i])
      throw Error(ExitCode::data, doing,
                  "column \"" + schema[i].name + "\" is " + column_text(schema[i]) + " there and " +
                      column_text(schema_[i]) + " in " + first_file,
                  "Files of one dataset must agree; convert one of them");
  file.first = count_;
  if (__builtin_add_overflow(count_, samples, &count_))
    throw Error(ExitCode::data, doing, "its files have more samples than can be counted", "Make them again");
  if (std::error_code none; !std::filesystem::is_directory(file.path, none)) open_files_.push_back(&*file.bytes);
}

bool FileSource::keep_whole(LibraryArray* library, double bytes) {
  if (bytes > memory_left_) return false;
  memory_left_ -= bytes;
  if (library != nullptr) {
    library->keep_in_memory();
    decoding_->cache.lower_limit(static_cast<std::size_t>(bytes));
  }
  return true;
}

void FileSource::choose_lanes(double block_bytes) {
  // Half of the memory: at the change from one block to the next, both are needed.
  blocks_.lanes = static_cast<int>(std::clamp(memory_left_ / block_bytes / 2, 1.0, 64.0));
  double file_bytes = 0;
  for (const auto* file : open_files_) file_bytes += static_cast<double>(file->size());
  decoding_->read_directly_beyond_memory(file_bytes, cache_bytes_);
}

void FileSource::keep_chunks(std::span<const ArrayInBlocks> arrays, double bytes) {
  double of_all = 0;
  for (const auto& array : arrays) of_all += array.block_bytes;
  // HDF5 keeps chunks as the first handle of a dataset says, and two arrays may be fields of one dataset.
  for (const auto& array : arrays)
    if (array.library != nullptr) array.library->close();
  for (const auto& array : arrays) {
    if (array.library == nullptr) continue;
    const auto part = static_cast<std::size_t>(bytes * (array.block_bytes / of_all));
    array.library->keep_chunks(array.file, array.slots, part);
    decoding_->cache.lower_limit(part);
  }
}

}  // namespace muster::detail::data
