// How ranks communicate while they make a world, a channel or shared memory together, so that in the end all of them
// have it or none. Before a handshake all ranks must have come: the caller makes sure of this, for example by
// wait_for_all_ranks() (rendezvous.hpp). A rank that has begun a handshake goes on to its end and ignores alarms; every
// other wait polls for alarms.
#pragma once

#include "node/shared_segment.hpp"

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace muster::detail::comm {

class MpiCommunicator;

/// Small collectives for ranks that make a world, a channel or shared memory together. Every call is collective over
/// the ranks that it names, or else over all ranks of the communicator. It throws an Error (ExitCode::retry) if they do
/// not all come within half an hour.
class Handshake {
 public:
  /// `doing` begins the error's text.
  Handshake(MpiCommunicator& over, const char* doing);
  /// Marks the communicator as unusable if an exception has ended a call early.
  ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  /// True if `mine` is true on all ranks.
  bool all_true(bool mine);
  /// Returns the text of each rank, cut to 1 KB.
  std::vector<std::string> all_gather(const std::string& mine);
  /// Sets each value to its maximum over the p ranks in `ranks`, in ⌈log₂ p⌉ rounds. Calls meanwhile() again and again
  /// while it waits.
  void all_max(
      const std::vector<int>& ranks, std::span<std::uint64_t> values, const std::function<void()>& meanwhile = [] {});
  /// Returns the text that the first rank of `ranks` gives, cut to 1 KB, on all ranks of `ranks`.
  std::string from_first(const std::vector<int>& ranks, const std::string& mine);

 private:
  struct Memory;
  MPI_Request* start();
  void finish(const std::function<void()>& meanwhile = [] {});

  MpiCommunicator& over_;
  const char* const doing_;
  std::unique_ptr<Memory> memory_;
};

/// Maps one segment of `bytes` bytes on all ranks of a node; each rank reserves memory for `reserved` bytes from offset
/// `first`. `node`: the ranks of `over` on this node. Returns null on all ranks of `over` if that fails on any of them,
/// for example because /dev/shm is full. Then rank 0 warns, but only once; `until_then` is the part of the warning that
/// says what the ranks do instead. The segment's name is already removed. Collective over `over`, whose ranks must all
/// have come.
std::shared_ptr<node::SharedSegment> map_node_segment(
    MpiCommunicator& over, const std::vector<int>& node, std::size_t bytes, std::size_t first, std::size_t reserved,
    const char* until_then = "the ranks of a node exchange data by MPI and not by shared memory, which is slower");

}  // namespace muster::detail::comm
