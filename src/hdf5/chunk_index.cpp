#include "hdf5/chunk_index.hpp"

#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/dimensions.hpp"
#include "hdf5/file.hpp"
#include "hdf5/file_storage.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <limits>

namespace muster::detail::hdf5 {
namespace {

constexpr std::byte untouched{0xa5};

/// H5Dread_chunk, whose second version also takes the size of the buffer.
herr_t read_chunk(hid_t dataset, const hsize_t* offset, std::uint32_t* mask, void* into) {
#if H5_VERSION_GE(2, 0, 0)
  return H5Dread_chunk1(dataset, H5P_DEFAULT, offset, mask, into);
#else
  return H5Dread_chunk(dataset, H5P_DEFAULT, offset, mask, into);
#endif
}

/// While it lives, the file's driver (read_driver.hpp) only notes reads of values in `reads` and reads nothing.
class NotedReads {
 public:
  explicit NotedReads(OpenForReading& file) : file_(file) { file_.noted = &reads; }
  NotedReads(const NotedReads&) = delete;
  ~NotedReads() { file_.noted = nullptr; }

  RawReads reads;

 private:
  OpenForReading& file_;
};

}  // namespace

ChunkIndex::ChunkIndex(hid_t dataset, const std::string& shown) : dataset_(dataset), shown_(shown) {
  const Lock lock;
  const std::string doing = "reading the chunks of " + shown;
  shape_ = shape(dataset, shown);
  const auto creation = dataset_property(dataset, H5Dget_create_plist, doing);
  chunk_ = hdf5::chunk_shape(creation.get(), shape_.size(), doing);
  std::int64_t count = 1;
  for (std::size_t i = 0; i < chunk_.size(); ++i) {
    grid_.push_back(shape_[i] / chunk_[i] + (shape_[i] % chunk_[i] != 0 ? 1 : 0));
    count = checked_product(count, grid_.back(), doing, "its shape");
  }
  if (foreign_ = foreign_chunks(dataset); foreign_) return;
  unsigned options = 0;
  check(H5Pget_chunk_opts(creation.get(), &options), doing);
  plain_edges_ = (options & H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS) != 0;
  file_ = open_for_reading(dataset);
  if (file_ != nullptr && count > 0) check_that_reads_are_noted();
}

std::shared_ptr<const ForeignChunks> foreign_chunks(hid_t dataset) {
  const auto storage = storage_of(dataset);
  return storage && storage->foreign ? storage->foreign(path_of(dataset)) : nullptr;
}

std::vector<std::int64_t> chunk_coordinates(std::int64_t number, const std::vector<std::int64_t>& grid) {
  std::vector<std::int64_t> at(grid.size());
  for (auto i = grid.size(); i-- > 0; number /= grid[i]) at[i] = number % grid[i];
  return at;
}

std::string ChunkIndex::text(std::int64_t number) const {
  return "chunk (" +
         listed(chunk_coordinates(number, grid_), grid_.size(), [](auto each) { return std::to_string(each); }) + ")";
}

bool ChunkIndex::is_at_edge(std::int64_t number) const {
  const auto at = chunk_coordinates(number, grid_);
  for (std::size_t i = 0; i < at.size(); ++i)
    if (at[i] == grid_[i] - 1 && shape_[i] % chunk_[i] != 0) return true;
  return false;
}

/// Does what locate() does, for the first chunk, but with memory for the whole chunk. If HDF5 itself writes to that
/// memory, locate() must not be called, since it passes only one byte: then `file_` becomes null.
void ChunkIndex::check_that_reads_are_noted() {
  const std::vector<hsize_t> first(shape_.size(), 0);
  hsize_t bytes = 0;
  if (H5Dget_chunk_storage_size(dataset_, first.data(), &bytes) < 0) last_error();
  if (bytes == 0 || bytes > file_->bytes) return;
  std::vector<std::byte> memory(bytes, untouched);
  std::uint32_t mask = 0;
  const NotedReads noted(*file_);
  const bool found = read_chunk(dataset_, first.data(), &mask, memory.data()) >= 0;
  if (!found) last_error();
  if (found && (noted.reads.count != 1 || noted.reads.bytes != bytes ||
                std::ranges::any_of(memory, [](auto byte) { return byte != untouched; })))
    file_ = nullptr;
}

StoredChunk ChunkIndex::locate(std::int64_t number, void* unused) const {
  const auto at = chunk_coordinates(number, grid_);
  std::vector<hsize_t> offset(at.size());
  for (std::size_t i = 0; i < at.size(); ++i) offset[i] = static_cast<hsize_t>(at[i] * chunk_[i]);
  StoredChunk chunk{.is_stored = true};
  const NotedReads noted(*file_);
  if (read_chunk(dataset_, offset.data(), &chunk.filter_mask, unused) < 0) {
    // Perhaps the chunk was never written. HDF5 says so in one of two ways.
    const auto reason = last_reason();
    if (reason.text == "chunk address isn't defined") return {};
    hsize_t bytes = 0;
    if (H5Dget_chunk_storage_size(dataset_, offset.data(), &bytes) >= 0 && bytes == 0) return {};
    last_error();
    refuse(number, reason);
  }
  if (noted.reads.count != 1) refuse(number, {.text = "HDF5 did not read it in one piece", .code = ExitCode::data});
  chunk.offset = noted.reads.offset;
  chunk.bytes = noted.reads.bytes;
  if (plain_edges_ && is_at_edge(number)) chunk.filter_mask = std::numeric_limits<std::uint32_t>::max();
  // HDF5 itself compares sums, which may overflow 64 bits.
  if (chunk.bytes > file_->bytes || chunk.offset > file_->bytes - chunk.bytes)
    refuse(number, {.text = "it ends beyond the end of the file", .code = ExitCode::data});
  return chunk;
}

void ChunkIndex::refuse(std::int64_t number, const Reason& reason) const {
  throw Error(reason.code, "reading " + shown_, text(number) + " was not found: " + reason.text,
              reason.code == ExitCode::retry ? retry_reading : "The file is damaged; make or copy it again");
}

std::vector<StoredChunk> ChunkIndex::locate(std::span<const std::int64_t> numbers) const {
  if (foreign_) return std::vector<StoredChunk>(numbers.size(), {.is_stored = true});
  const Lock lock;
  std::vector<StoredChunk> chunks;
  chunks.reserve(numbers.size());
  std::byte unused{};
  for (const auto number : numbers) chunks.push_back(locate(number, &unused));
  return chunks;
}

}  // namespace muster::detail::hdf5
