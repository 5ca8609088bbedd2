// How samples come from the solvers' ranks. A transport brings connections; each fills a ring, which the receiver reads
// whatever the transport is. All calls are made on the receiver's thread.
#pragma once

#include "live/memory.hpp"
#include "live/sender/ring.h"

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace muster::detail::live {

class Receiver;

/// A file descriptor, closed by the destructor.
class Descriptor {
 public:
  Descriptor(int number = -1) noexcept : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();
  operator int() const noexcept { return number_; }

 private:
  int number_;
};

/// Weights for the solvers, as a file without a name and in memory.
struct Weights {
  Descriptor file = {};
  std::shared_ptr<std::byte> memory = {};
  live_weights head{};
};

/// A solver's rank.
class Connection {
 public:
  virtual ~Connection() = default;
  /// False when it publishes no more samples.
  virtual bool is_open() const noexcept = 0;
  /// True if it has said that it ends.
  virtual bool is_closing() const noexcept = 0;
  /// True if it has ended without a word. Where nobody tells of a death, it never is.
  virtual bool has_died() const noexcept { return false; }
  /// Makes the rank look at what its ring tells.
  virtual void tell() = 0;
  /// Wakes the rank if it waits for a slot that is empty again.
  virtual void wake() {}
  virtual void send_weights(const Weights& weights) = 0;
  /// Puts what has come into the ring, and lets the rank send what has room after the sample `next`, which is the next
  /// one to be taken. False if nothing has happened.
  virtual bool receive(std::int64_t /*next*/) { return false; }
  /// Tells the rank that no more of its samples are received.
  virtual void leave() = 0;

  std::shared_ptr<live_ring> ring;  ///< null until it has come
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Begins to accept solvers.
  virtual void start() = 0;
  /// Adds the descriptors to wait for.
  virtual void watch(std::vector<pollfd>& /*events*/) {}
  /// Serves what has come. `events`: of these descriptors. False if nothing has happened.
  virtual bool serve(std::span<const pollfd> events) = 0;
  /// True if no descriptor tells when something comes.
  virtual bool must_be_polled() const noexcept { return false; }
};

/// Through memory and sockets of a node. Binds this rank's address; an Error (ExitCode::usage) if another Live of the
/// job has it.
std::unique_ptr<Transport> node_transport(Receiver& receiver);
/// From other nodes of the job, by MPI.
std::unique_ptr<Transport> mpi_transport(Receiver& receiver);

}  // namespace muster::detail::live
