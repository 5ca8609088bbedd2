// The files of a Zarr store: those of a folder, or the records of a zip archive.
#pragma once

#include "base/file.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::zarr {

/// The remedy of errors about damage.
inline constexpr const char* damaged = "The store is damaged; make or copy it again";

/// An entry of a group.
struct Entry {
  std::string name;
  bool is_link = false;
};

/// An opened file of a store.
class StoredFile {
 public:
  virtual ~StoredFile() = default;
  virtual std::uint64_t size() const = 0;
  /// Reads a part that lies inside of the file. Throws an Error.
  virtual void read(std::span<std::byte> into, std::uint64_t offset) const = 0;
  virtual void will_read(std::uint64_t offset, std::uint64_t bytes) const noexcept = 0;
  /// Two files that differ in their content differ in this, unless one was changed in place within a tick of the clock.
  virtual std::uint64_t version() const = 0;
};

/// Thread-safe. Names are relative to the store, with slashes. Links inside of a store are refused, so nothing outside
/// of it is ever read.
class StoreFiles {
 public:
  virtual ~StoreFiles() = default;
  /// The names inside the folder `folder`, which is empty or ends with a slash, sorted: folders and links.
  virtual std::vector<Entry> list(const std::string& folder) const = 0;
  /// The file; null if it does not exist.
  virtual std::unique_ptr<StoredFile> open(const std::string& name) const = 0;
  /// The size of a file as open() gives it; none if it does not exist.
  virtual std::optional<std::uint64_t> size_of(const std::string& name) const = 0;

  /// The text of a file of at most 64 MiB; none if it does not exist.
  std::optional<std::string> text_of(const std::string& name) const;
};

/// The folder or the zip archive at `path`. Throws an Error (ExitCode::data) if it is neither, or damaged.
std::shared_ptr<const StoreFiles> open_store_files(const std::filesystem::path& path);

}  // namespace muster::detail::zarr
