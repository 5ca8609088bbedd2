#include "node/operation.hpp"

#include <cstring>

namespace muster::detail::node {
namespace {

class Broadcast final : public Operation {
 public:
  Broadcast(NodeCommunicator& ranks, void* data, std::size_t bytes, int root)
      : Operation(ranks, data, {.kind = Call::Kind::broadcast, .root = root, .count = bytes}), root_(root) {}

  bool advance() override {
    const auto write = [&](std::size_t first, std::size_t n) {
      if (rank_ == root_) std::memcpy(staging(root_), at(first), n);
    };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (rank_ == root_) return true;
      if (!arrived(root_)) return false;
      std::memcpy(at(first), staging(root_), n);
      return true;
    };
    return each_chunk(count_, staging_bytes_, write, read);
  }

 private:
  const int root_;
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::broadcast(void* data, std::size_t bytes, int root) {
  return start(std::make_unique<Broadcast>(*this, data, bytes, root));
}

}  // namespace muster::detail::node
