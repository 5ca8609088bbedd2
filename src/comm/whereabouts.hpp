// What this rank tells the others of where it is, for when one of them waits for it too long.
#pragma once

#include "muster/communicator.hpp"

#include <chrono>
#include <cstdint>

namespace muster::detail::comm {

/// While it lives, a thread of this rank answers where its main thread, the caller, stands.
class Answering {
 public:
  explicit Answering(const Communicator& world);
  Answering(const Answering&) = delete;
  Answering& operator=(const Answering&) = delete;
  ~Answering();

 private:
  Communicator world_;
};

/// While it lives, the others see that this rank waits for the reader of a stream.
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

/// In which step this rank is, from 1 on.
void note_step(const Communicator& communicator, std::int64_t step, std::int64_t epoch);

/// The limit of the others' waits counts from the end of that time, if that is later. Local.
void keep_alive(const Communicator& communicator, std::chrono::milliseconds time);

}  // namespace muster::detail::comm
