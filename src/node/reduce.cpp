#include "node/operation.hpp"

#include <cstring>

namespace muster::detail::node {
namespace {

class Reduce final : public Operation {
 public:
  Reduce(NodeCommunicator& ranks, void* data, std::size_t count, const Reduction& reduction, int root)
      : Operation(
            ranks, data,
            {.kind = Call::Kind::reduce, .type = reduction.type, .op = reduction.op, .root = root, .count = count}),
        reduction_(reduction),
        root_(root) {}

  bool advance() override {
    const auto write = [&](std::size_t first, std::size_t n) {
      if (rank_ != root_) std::memcpy(staging(rank_), at(first), n * element_);
    };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (rank_ != root_) return true;
      if (!all_arrived()) return false;
      reduce_here({first, n}, reduction_, [&](int r) { return r == root_ ? at(first) : staging(r); });
      return true;
    };
    return each_chunk(count_, staging_bytes_ / element_, write, read);
  }

 private:
  const Reduction reduction_;
  const int root_;
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::reduce(void* data, std::size_t count, const Reduction& reduction, int root) {
  return start(std::make_unique<Reduce>(*this, data, count, reduction, root));
}

}  // namespace muster::detail::node
