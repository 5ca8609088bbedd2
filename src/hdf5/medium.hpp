// Where HDF5 puts the bytes of a new file: a driver of its file layer that outlives failures.
//
// After a write that fails in closing a file, HDF5 1.10 crashes at the end of the process. So a medium fails once, for
// the writer to hear of, and keeps in memory what is given to it from then on: the file closes, and is not whole.
#pragma once

#include "base/file.hpp"

#include <hdf5.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>

namespace muster::detail::hdf5 {

class Medium {
 public:
  /// In memory alone, where the stretches that nobody writes take no space.
  Medium() = default;
  /// A new file. An Error (ExitCode::retry) if it cannot be made.
  explicit Medium(const std::filesystem::path& path) : file_(std::in_place, path, File::Mode::create) {}

  std::uint64_t size() const noexcept { return size_; }
  /// Zeroes where nothing was written. False if the file cannot be read; errno says why.
  bool read_at(std::span<std::byte> into, std::uint64_t offset) const;
  /// False, with the reason in errno, for the first failure; whatever comes after it is taken.
  bool write_at(std::span<const std::byte> from, std::uint64_t offset);
  bool truncate(std::uint64_t size);

 private:
  static constexpr std::size_t page_bytes = 4096;
  using Page = std::array<std::byte, page_bytes>;

  bool in_file() const noexcept { return file_ && !failed_; }
  void remember(std::span<const std::byte> from, std::uint64_t offset);

  std::optional<File> file_;
  std::map<std::uint64_t, std::unique_ptr<Page>> pages_;  // by number; over what the file has
  std::uint64_t size_ = 0;
  bool failed_ = false;
};

/// Has files of these access properties lie on `medium`, which outlives the call.
void set_medium(hid_t access, const std::shared_ptr<Medium>& medium);

}  // namespace muster::detail::hdf5
