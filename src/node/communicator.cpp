#include "node/communicator.hpp"

#include "base/page_size.hpp"
#include "node/operation.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::node {
namespace {

/// Bytes of one staging buffer. The two buffers of all ranks together take at most 8 MB, or 32 KB per rank if that is
/// more.
std::size_t staging_bytes_of(int size) {
  const auto share = (std::size_t{4} << 20) / static_cast<std::size_t>(size);
  return std::clamp(share / page_size() * page_size(), std::size_t{16} << 10, std::size_t{256} << 10);
}

}  // namespace

std::size_t NodeCommunicator::memory_bytes(int size) {
  return Shared::bytes(size) + 2 * staging_bytes_of(size) * static_cast<std::size_t>(size);
}

NodeCommunicator::NodeCommunicator(std::byte* memory, int rank, int size, std::vector<int> names)
    : shared_(reinterpret_cast<Shared*>(memory)),
      rank_(rank),
      size_(size),
      names_(std::move(names)),
      staging_bytes_(staging_bytes_of(size)),
      staging_(memory + Shared::bytes(size)) {}

NodeCommunicator::~NodeCommunicator() = default;

std::set<std::uint64_t> NodeCommunicator::unused_regions() const {
  std::set<std::uint64_t> unused;
  if (!is_idle()) return unused;
  for (const auto& [number, region] : regions_)
    if (region.memory.use_count() == 1) unused.insert(number);
  return unused;
}

std::uint64_t NodeCommunicator::region_of(const void* data, std::size_t bytes) const noexcept {
  const auto* begin = static_cast<const std::byte*>(data);
  for (const auto& [number, region] : regions_) {
    const auto* mine = region.of(rank_);
    if (begin >= mine && begin + bytes <= mine + region.stride) return number;
  }
  return 0;
}

NodeCommunicator::Ticket NodeCommunicator::start(std::unique_ptr<Operation> operation, Start start) {
  operation->start = start;
  operation->call_number = call_number_;
  queue_.push_back(std::move(operation));
  ++started_;
  advance();
  return started_;
}

void NodeCommunicator::advance() {
  while (!queue_.empty() && queue_.front()->start == Start::open && queue_.front()->advance()) {
    queue_.pop_front();
    ++finished_;
  }
}

void NodeCommunicator::open(Ticket ticket) {
  queue_[ticket - finished_ - 1]->start = Start::open;
  advance();
}

void NodeCommunicator::detach_data(Ticket ticket) {
  if (finished_ < ticket) queue_[ticket - finished_ - 1]->copy_data();
}

bool NodeCommunicator::done(Ticket ticket) {
  if (finished_ < ticket) advance();
  return finished_ >= ticket;
}

}  // namespace muster::detail::node
