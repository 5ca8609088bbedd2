// Reads chunks past the page cache before they are decoded. If the files are larger than memory, the cache cannot keep
// the chunks, and using it only costs time: for allocating its pages, copying from them and freeing them.
#pragma once

#include "base/file.hpp"
#include "base/pages.hpp"
#include "base/thread_pool.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::data {

/// Thread-safe. The files stay open.
class DirectReads {
 public:
  /// A part of a file. When it is destroyed, a later part gets its memory.
  class Part {
   public:
    Part(Part&&) = default;
    Part& operator=(Part&&) = delete;
    ~Part();
    std::span<const std::byte> bytes() const noexcept { return {memory_.data() + skipped_, bytes_}; }

   private:
    friend class DirectReads;
    Part(DirectReads& of, Pages memory, std::size_t skipped, std::size_t bytes);

    DirectReads* of_;
    Pages memory_;
    std::size_t skipped_, bytes_;
  };

  /// Parts should not be shorter: the disk is read in whole blocks, most of which a shorter part would not need.
  static constexpr std::size_t least_bytes = 64 << 10;

  /// `most`: the memory for parts that are requested and not taken, in bytes.
  explicit DirectReads(std::size_t most) : most_(most) {}

  /// Begins to read a part of the file, and does not wait. Parts requested first are dropped if there are too many.
  /// False if the file system has no direct I/O for the file, the part is too large, or the system has no more threads.
  bool request(const File& file, std::uint64_t offset, std::size_t bytes);
  /// True if the part that begins there is requested and not taken.
  bool has(const File& file, std::uint64_t offset);
  /// The part that begins there, when it is read. None if it was not requested, if it was dropped, or if the disk has
  /// not given it: then read it otherwise.
  std::optional<Part> take(const File& file, std::uint64_t offset);
  /// Drops the requests that no thread has begun to read, and ends the threads until the next request.
  void rest();

 private:
  using Lock = std::unique_lock<std::mutex>;
  /// The descriptor of a file, and an offset.
  using Key = std::pair<int, std::uint64_t>;
  enum class State { waits, is_read, is_there, failed };
  struct Request {
    std::size_t bytes;
    std::size_t memory_bytes;
    State state = State::waits;
    Pages memory = {};  ///< begins with the last aligned byte before the part
  };

  /// The same file, opened for direct I/O.
  struct Direct {
    std::optional<File> file = {};
    bool works = false;
  };

  Direct& direct_of(const File& file);
  void make_room(std::size_t bytes);
  Pages memory_of(std::size_t bytes);
  void read(const Key& key);

  const std::size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, Request> requests_;
  std::deque<Key> order_;         ///< of the requests, and of some that are taken
  std::size_t held_ = 0;          ///< Request::memory_bytes of all requests
  std::map<int, Direct> direct_;  ///< by the descriptor of the file
  std::vector<Pages> unused_;
  ThreadPool threads_{"muster-disk", 4};  ///< a disk is at its full speed with several requests at a time
};

}  // namespace muster::detail::data
