// Memory that the processes of a node map together.
//
// One process creates it, the others open it by its name, and then the name is removed: from there on the memory lives
// as long as somebody maps it, and nothing is left behind by a process that is killed. All of them hold a lock on it,
// by which a name whose process was killed before that is told from one that is still in use.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace muster::detail::node {

/// Bytes of a page of memory on this machine.
std::size_t page_size() noexcept;
inline std::size_t whole_pages(std::size_t bytes) noexcept {
  return (bytes + page_size() - 1) / page_size() * page_size();
}
/// Bytes of a line of the cache: what two ranks write to lies in different ones.
constexpr std::size_t cache_line = 64;
constexpr std::size_t whole_lines(std::size_t bytes) noexcept {
  return (bytes + cache_line - 1) / cache_line * cache_line;
}

/// A child of fork() keeps the addresses, but what it writes there goes to memory of its own, and it can give no memory
/// of the segment back.
///
/// Move-only. Unmapped by the destructor, which concerns this process alone; who created it removes the name there,
/// unless it has before.
class SharedSegment {
 public:
  SharedSegment() noexcept = default;
  /// Address space for `bytes`, all zeroes, under a new name that nobody can guess; readable by this user alone.
  static SharedSegment create(std::size_t bytes);
  static SharedSegment open(const std::string& name, std::size_t bytes);
  /// Removes the names that dead processes of this user have left: older than a minute, and no process holds the lock.
  static void remove_leftovers() noexcept;
  SharedSegment(SharedSegment&& other) noexcept;
  SharedSegment& operator=(SharedSegment&& other) noexcept;
  ~SharedSegment();

  /// Takes memory for that part, so that no access to it can fail later. An Error (ExitCode::retry) if there is not
  /// enough.
  void reserve(std::size_t first, std::size_t bytes);
  /// Gives the memory of a part (whole pages) back; it would be zeroes again.
  void discard(std::size_t first, std::size_t bytes) noexcept;
  /// A part of it (whole pages) mapped once more: it shows what is written to the segment, but what is written to it
  /// goes to pages of this process alone, which hide the segment's until they are dropped.
  std::shared_ptr<std::byte> private_view(std::size_t first, std::size_t bytes) const;
  /// Drops this process's own pages of a view, whole ones: it shows the segment again.
  static void drop_private_pages(std::byte* first, std::size_t bytes);
  /// Removes the name, on the process that created it.
  void unlink() noexcept;

  std::byte* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  const std::string& name() const noexcept { return name_; }

 private:
  void map(std::size_t bytes);
  void lock();

  std::string name_;
  bool has_name_ = false;  ///< of this process's making
  int file_ = -1;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace muster::detail::node
