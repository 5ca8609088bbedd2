// The files of a Zarr store: those of a folder, or the records of a zip archive.
#pragma once

#include "base/file.hpp"
#include "base/zip.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::zarr {

/// The remedy of errors about damage.
inline constexpr const char* damaged = "The store is damaged; make or copy it again";

/// An opened file of a store.
class StoredFile {
 public:
  /// `record`: where it lies in `file`.
  StoredFile(std::shared_ptr<const File> file, const ZipRecord& record, std::uint64_t version, std::string shown);

  std::uint64_t size() const noexcept { return record_.unpacked_bytes; }
  /// A file whose content was changed has another version, unless it was changed in place within a tick of the clock.
  std::uint64_t version() const noexcept { return version_; }
  /// Reads a part that lies inside of the file. A deflated file can only be read whole. Throws an Error if that fails.
  void read(std::span<std::byte> into, std::uint64_t offset) const;
  void will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept;

 private:
  std::shared_ptr<const File> file_;
  ZipRecord record_;
  std::uint64_t version_;
  std::string shown_;
};

/// Thread-safe. Names are relative to the store, with slashes. Links inside of a store are refused, so nothing outside
/// of it is ever read.
class StoreFiles {
 public:
  /// The folder or the zip archive at `path`. Throws an Error (ExitCode::data) if it is neither, or damaged.
  explicit StoreFiles(const std::filesystem::path& path);

  /// The names of the folders and links inside `folder`, which is empty or ends with a slash, sorted.
  std::vector<std::string> list(const std::string& folder) const;
  /// The file; none if it does not exist.
  std::optional<StoredFile> open(const std::string& name) const;

 private:
  File open_part_by_part(const std::string& name) const;

  std::shared_ptr<const File> root_;
  std::optional<std::map<std::string, ZipRecord>> records_;  ///< none for a folder
};

}  // namespace muster::detail::zarr
