// How ranks talk while they make something together, which all of them have in the end or none: a world, a channel, the
// memory of a node. All of them come, by their calls or by rendezvous(), and whoever has begun goes through to the end,
// whatever another rank raises; in every other wait an alarm is heard.
#pragma once

#include "muster/communicator.hpp"
#include "node/shared_segment.hpp"

#include <mpi.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::comm {

class MpiCommunicator;

/// How ranks make sure that they all come. A barrier is not enough: a rank may hear an alarm, or run out of time, in
/// the moment in which the others see it complete, and they would then wait for it in MPI for good. So the first rank
/// decides: it lets the others go once all have said that they are here, and a rank that wants to leave after that word
/// has it back only from the first.
///
/// Returns on all ranks of the communicator, or on none: then it throws what ends a wait (RemoteError, or an Error with
/// ExitCode::retry past the limit of the launch, which begins with `doing`). Collective.
void rendezvous(const Communicator& communicator, const char* doing);

/// Every call is collective over the ranks that it names; an Error (ExitCode::retry) where they do not come within half
/// an hour.
class Handshake {
 public:
  /// `doing` begins the error.
  Handshake(MpiCommunicator& over, const char* doing);
  /// If it was left before its end, the communicator is not used again.
  ~Handshake();
  Handshake(const Handshake&) = delete;
  Handshake& operator=(const Handshake&) = delete;

  /// Whether all ranks say so.
  bool all(bool mine);
  /// What each rank says, as far as a text goes (1 KB).
  std::vector<std::string> each(const std::string& mine);
  /// What the first of `ranks` says, on all of them.
  std::string from_first(const std::vector<int>& ranks, const std::string& mine);

 private:
  struct Memory;
  MPI_Request* start();
  void finish();

  MpiCommunicator& over_;
  const char* const doing_;
  std::unique_ptr<Memory> memory_;
};

/// The ranks of a node map a segment of `bytes`, and each takes memory for `reserved` bytes from `first` on. Null on
/// all ranks of `over` where that fails on any, for want of room in /dev/shm; a warning says so once. Its name is gone
/// already. Collective over `over`, whose ranks have all come; `node`: those on this node.
std::shared_ptr<node::SharedSegment> map_together(MpiCommunicator& over, const std::vector<int>& node,
                                                  std::size_t bytes, std::size_t first, std::size_t reserved);

}  // namespace muster::detail::comm
