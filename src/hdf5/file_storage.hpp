// The storage of a new HDF5 file, as a driver of HDF5's file layer that keeps working after a failed write.
//
// If a write fails while HDF5 1.10 closes a file, HDF5 crashes at the end of the process. So a FileStorage reports one
// failure to the writer and keeps all later writes in memory. The file can then be closed, but is not complete.
#pragma once

#include "base/file.hpp"

#include <hdf5.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace muster::detail::hdf5 {

class ForeignChunks;

class FileStorage {
 public:
  /// Keeps everything in memory. Pages that are never written take no space.
  FileStorage() = default;
  /// Makes a new file. Throws an Error (ExitCode::retry) if it cannot be made.
  explicit FileStorage(const std::filesystem::path& path) : file_(std::in_place, path, File::Mode::create) {}

  std::uint64_t size() const noexcept { return size_; }
  /// Reads zeroes where nothing was written. Returns false if the file cannot be read; the reason is in errno.
  bool read_at(std::span<std::byte> into, std::uint64_t offset) const;
  /// Returns false for the first failure, with the reason in errno. Later writes go to memory and succeed.
  bool write_at(std::span<const std::byte> from, std::uint64_t offset);
  bool truncate(std::uint64_t size);

  /// Returns the chunks of the dataset at `path`, if they lie outside of this file (hdf5/foreign_chunks.hpp). Throws an
  /// Error if the dataset cannot be read. Empty if all chunks lie in this file.
  std::function<std::shared_ptr<const ForeignChunks>(const std::string& path)> foreign = {};

 private:
  static constexpr std::size_t page_bytes = 4096;
  using Page = std::array<std::byte, page_bytes>;

  bool in_file() const noexcept { return file_ && !failed_; }
  void remember(std::span<const std::byte> from, std::uint64_t offset);

  std::optional<File> file_;
  std::map<std::uint64_t, std::unique_ptr<Page>> pages_;  // by page number; they replace the file's bytes
  std::uint64_t size_ = 0;
  bool failed_ = false;
};

/// Makes HDF5 store the file that is created with the access properties `access` in `storage`. The shared_ptr itself
/// must live until the file has been created.
void set_storage(hid_t access, const std::shared_ptr<FileStorage>& storage);
/// The storage of the file that `object` belongs to; null if another driver of HDF5 has the file.
std::shared_ptr<FileStorage> storage_of(hid_t object);

}  // namespace muster::detail::hdf5
