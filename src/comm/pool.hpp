// A pool of MPI communicators, so that a job of many attempts and trials makes a constant number of them.
//
// Ranks take a communicator together, and each gives its own handle back alone. A communicator can be taken again when
// all of its ranks have given it back. If no communicator is free on all ranks, they make a new one.
#pragma once

#include "comm/mpi_communicator.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace muster::detail::comm {

class Pool;

/// A communicator in use. Move-only. The destructor gives it back to this rank's pool. Local.
class PooledCommunicator {
 public:
  PooledCommunicator(std::unique_ptr<MpiCommunicator> communicator, std::shared_ptr<Pool> pool) noexcept
      : communicator_(std::move(communicator)), pool_(std::move(pool)) {}
  PooledCommunicator(PooledCommunicator&&) noexcept = default;
  PooledCommunicator& operator=(PooledCommunicator&&) = delete;
  ~PooledCommunicator();

  MpiCommunicator& operator*() const noexcept { return *communicator_; }
  MpiCommunicator* operator->() const noexcept { return communicator_.get(); }
  operator MPI_Comm() const noexcept { return communicator_->comm; }

 private:
  std::unique_ptr<MpiCommunicator> communicator_;
  std::shared_ptr<Pool> pool_;
};

/// Keeps the idle MPI communicators of this rank and hands them out. Thread-safe. Each rank has a member number, which
/// is the same on all ranks of the pool.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  /// Takes `count` communicators over `ranks` of `over`, whose member numbers are `members`. Collective over `ranks`:
  /// all of them must come (see Handshake) and take the same count. If two threads of a rank take communicators of the
  /// same members at once, new ones may be made.
  std::vector<PooledCommunicator> take(std::size_t count, const std::vector<int>& members, MpiCommunicator& over,
                                       const std::vector<int>& ranks, const char* doing);
  /// Puts a communicator that this rank no longer uses back into the pool. Local.
  void give_back(std::unique_ptr<MpiCommunicator> communicator) noexcept;

 private:
  std::vector<std::unique_ptr<MpiCommunicator>> claim(const std::vector<int>& members);

  std::mutex mutex_;
  std::vector<std::unique_ptr<MpiCommunicator>> idle_;
};

/// The number of communicators that the pools of this process have made.
std::int64_t num_mpi_communicators() noexcept;

}  // namespace muster::detail::comm
