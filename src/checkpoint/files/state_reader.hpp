// Reads state.h5 by the offsets in the manifest. Tensors that shared memory when they were saved share memory again.
#pragma once

#include "checkpoint/files/state_file.hpp"

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace muster::detail::checkpoint {

/// Reads the tensors for which `wanted` returns true, or all if it is empty, into new memory. Verifies the checksums of
/// the pieces that it reads, on at most as many threads as torch has.
Tensors read_tensors(const std::filesystem::path& directory, const Manifest& manifest,
                     const std::function<bool(const std::string&)>& wanted = {});

/// A memory mapping of state.h5. The ranks of a node share the page cache, so the node reads the data from the disk
/// only once.
class MappedState : public std::enable_shared_from_this<MappedState> {
 public:
  /// Returns null if the file cannot be mapped, or if the kernel cannot read mapped pages ahead (MADV_POPULATE_READ,
  /// since Linux 5.14). Throws an Error (ExitCode::data) if the file's size differs from the entry.
  static std::shared_ptr<const MappedState> open(const std::filesystem::path& directory, const FileEntry& entry);
  MappedState(const MappedState&) = delete;
  ~MappedState();

  /// Verifies these pieces on at most as many threads as torch has. Throws an Error (ExitCode::data) if a checksum is
  /// wrong.
  void verify(std::span<const std::uint64_t> pieces) const;
  /// Returns all tensors without verifying them. Tensors of 64 KiB or more are views of the mapping if they are
  /// aligned; the others are copies. The mapping lives as long as one of its views. As long as it lives, the file takes
  /// disk space, even if somebody removes it. Writing to the tensors changes only this process's copy.
  Tensors tensors(const Manifest& manifest) const;

 private:
  MappedState(std::filesystem::path path, FileEntry entry, std::byte* data)
      : path_(std::move(path)), entry_(std::move(entry)), data_(data) {}
  bool load(Range range) const;

  std::filesystem::path path_;
  FileEntry entry_;
  std::byte* data_;
};

}  // namespace muster::detail::checkpoint
