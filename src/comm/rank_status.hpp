// This rank's information about itself, for other ranks that wait for it too long.
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <cstdint>

namespace muster::detail::comm {

/// While it lives, a thread of this rank answers questions about what the main thread, its creator, is doing.
class AnsweringThread {
 public:
  explicit AnsweringThread(const Communicator& world);
  AnsweringThread(const AnsweringThread&) = delete;
  AnsweringThread& operator=(const AnsweringThread&) = delete;
  ~AnsweringThread();

 private:
  Communicator world_;
};

/// While it lives, other ranks see that this rank waits for the reader of a stream.
class WaitingForReader {
 public:
  explicit WaitingForReader(const Communicator& communicator);
  WaitingForReader(const WaitingForReader&) = delete;
  WaitingForReader& operator=(const WaitingForReader&) = delete;
  ~WaitingForReader();

 private:
  Communicator communicator_;
  std::uint64_t ticket_;
};

/// Records the step, from 1, and the epoch that this rank is in. Local.
void note_step(const Communicator& communicator, std::int64_t step, std::int64_t epoch);

/// Announces that this rank works for up to `time` from now. If other ranks wait for this rank, their timeouts begin
/// only when this time has ended. Local.
void keep_alive(const Communicator& communicator, std::chrono::milliseconds time);

}  // namespace muster::detail::comm
