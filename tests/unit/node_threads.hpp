// Ranks of a node as threads of this process, for tests of the engine.
#pragma once

#include "node/communicator.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <thread>
#include <vector>

namespace muster::test {

/// Zeroes, aligned to a page; freed with the last copy.
inline std::shared_ptr<std::byte> shared_bytes(std::size_t bytes) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  return {static_cast<std::byte*>(data), [bytes](std::byte* p) { ::munmap(p, bytes); }};
}

template <class Ready>
void wait_for(Ready&& ready) {
  for (int spin = 0; !ready(); ++spin)
    if (spin > 20) ::sched_yield();
}

inline void wait(detail::node::NodeCommunicator& local, detail::node::NodeCommunicator::Ticket ticket) {
  wait_for([&] { return local.done(ticket); });
}

/// Runs body(local) on `size` threads, each a rank; `region_bytes` of registered memory per rank in `region`.
inline void on_ranks(
    int size, std::size_t region_bytes,
    const std::function<void(detail::node::NodeCommunicator& local, const detail::node::Region& region)>& body) {
  const auto memory = shared_bytes(detail::node::NodeCommunicator::memory_bytes(size));
  const auto registered = shared_bytes(std::max<std::size_t>(1, region_bytes * static_cast<std::size_t>(size)));
  const detail::node::Region region{registered.get(), region_bytes};
  std::vector<std::thread> ranks;
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      try {
        detail::node::NodeCommunicator local(memory.get(), r, size);
        local.register_region(region);
        body(local, region);
      } catch (...) {
        failures[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  for (auto& rank : ranks) rank.join();
  for (const auto& failure : failures)
    if (failure) std::rethrow_exception(failure);
}

}  // namespace muster::test
