#include "node/operation.hpp"

namespace muster::detail::node {
namespace {

class Barrier final : public Operation {
 public:
  explicit Barrier(NodeCommunicator& ranks) : Operation(ranks, nullptr, {.kind = Call::Kind::barrier}) {}

  bool advance() override {
    return arrive([] {}) && all_arrived();
  }
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::barrier() { return start(std::make_unique<Barrier>(*this)); }

}  // namespace muster::detail::node
