// Memory that the processes of a node map together.
//
// One process creates the segment and the others open it by its name. Then the name is removed; from then on the memory
// lives as long as a process maps it, and a killed process leaves nothing behind. All of the processes hold a lock on
// the segment. A name without a lock was left by processes that were killed before they could remove it.
#pragma once

#include "base/page_size.hpp"

#include <cstddef>
#include <memory>
#include <string>

namespace muster::detail::node {

inline std::size_t whole_pages(std::size_t bytes) noexcept {
  return (bytes + page_size() - 1) / page_size() * page_size();
}
/// Bytes of a cache line. Data that different ranks write to are in different lines.
constexpr std::size_t cache_line = 64;
constexpr std::size_t whole_lines(std::size_t bytes) noexcept {
  return (bytes + cache_line - 1) / cache_line * cache_line;
}

/// How many bytes of /dev/shm may be used for data that could lie in private memory, too. A quarter of /dev/shm is kept
/// free for gradients: without room there, gradients go through MPI, which is slower. 0 if the free space is not known.
std::size_t spare_shared_memory() noexcept;

/// This process's mapping of a segment. A child of fork() keeps the addresses, but what it writes there goes to private
/// memory, and it cannot free memory of the segment.
///
/// Move-only. The destructor unmaps the segment from this process and, in the process that created it, removes the name
/// if that has not been done.
class SharedSegment {
 public:
  SharedSegment() noexcept = default;
  /// Creates a segment of `bytes` zeroes under a new, unguessable name; only this user can access it. Memory is not
  /// reserved yet.
  static SharedSegment create(std::size_t bytes);
  static SharedSegment open(const std::string& name, std::size_t bytes);
  /// Removes the names that killed processes of this user have left: names that are older than a minute and that no
  /// process has locked.
  static void remove_leftovers() noexcept;
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  /// Reserves memory for that part, so that no access to it can fail later. Throws an Error (ExitCode::retry) if there
  /// is not enough.
  void reserve(std::size_t first, std::size_t bytes);
  /// Frees the memory of a part (whole pages). The part reads as zeroes afterwards.
  void discard(std::size_t first, std::size_t bytes) noexcept;
  /// Maps a part (whole pages) a second time, as a private mapping (mmap's MAP_PRIVATE), which is called a view. The
  /// view shows what is written to the segment. Writes to the view go to private pages of this process, which hide the
  /// segment's pages until they are dropped.
  std::shared_ptr<std::byte> private_view(std::size_t first, std::size_t bytes) const;
  /// Drops private pages of a private_view() (whole pages), so that it shows the segment again.
  static void drop_private_pages(std::byte* first, std::size_t bytes);
  /// Removes the name if this process created the segment.
  void unlink() noexcept;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }

 private:
  void map(std::size_t bytes);
  void lock();

  std::string name_;
  bool has_name_ = false;  ///< true if this process must remove the name
  int file_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Allocates memory of this rank alone: zeroes, aligned to a page; the system takes pages as they are first written.
std::shared_ptr<std::byte> local_memory(std::size_t bytes);

}  // namespace muster::detail::node
