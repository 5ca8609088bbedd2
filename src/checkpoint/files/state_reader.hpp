// Reading state.h5, by the manifest's offsets. Tensors that shared memory share it again.
#pragma once

#include "checkpoint/files/state_file.hpp"

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

namespace muster::detail::checkpoint {

/// Those tensors, in memory of their own; all unless `wanted` says less. The checksums of what is read are verified on
/// the way, on as many threads as torch has.
Tensors read_tensors(const std::filesystem::path& directory, const Manifest& manifest,
                     const std::function<bool(const std::string&)>& wanted = {});

/// state.h5 as the system's cache has it, which the ranks of a node share: what one of them has looked at is read.
class MappedState : public std::enable_shared_from_this<MappedState> {
 public:
  /// Null where the system, or the file system, has no such thing. An Error (ExitCode::data) where the file is not as
  /// long as its entry says.
  static std::shared_ptr<const MappedState> open(const std::filesystem::path& directory, const FileEntry& entry);
  MappedState(const MappedState&) = delete;
  ~MappedState();

  /// An Error (ExitCode::data) if one of these pieces has another checksum; on as many threads as torch has.
  void verify(std::span<const std::uint64_t> pieces) const;
  /// All tensors; those that are not small as views of the mapping, which lives as long as one of them, and takes the
  /// file's space even when that is removed. What is written to them goes to this process alone. Nothing is verified.
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
