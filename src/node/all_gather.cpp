#include "node/operation.hpp"

#include <cstring>

namespace muster::detail::node {
namespace {

class AllGather final : public Operation {
 public:
  AllGather(NodeCommunicator& ranks, void* data, std::size_t count, int owners, Dtype type)
      : Operation(ranks, data, {.kind = Call::Kind::all_gather, .type = type, .count = count}), owners_(owners) {}

  bool advance() override {
    if (size_ == 1) return true;
    if (!exchange_locations()) return false;
    if (rank_data_.empty()) return advance_through_staging();
    if (!written_) {
      const auto mine = slice(rank_);  // empty if this rank owns none
      for (int r = 0; r < size_; ++r)
        if (r != rank_)
          std::memcpy(rank_data_[static_cast<std::size_t>(r)] + mine.first * element_, at(mine.first),
                      mine.count * element_);
      finish();
      written_ = true;
    }
    return all_finished();
  }

 private:
  Slice slice(int owner) const { return slice_of(count_, owners_, owner, type_); }

  bool advance_through_staging() {
    const auto write = [&](std::size_t first, std::size_t n) {
      const auto mine = slice(rank_).chunk(first, n);
      std::memcpy(staging(rank_), at(mine.first), mine.count * element_);
    };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (!all_arrived()) return false;
      for (int o = 0; o < owners_; ++o) {
        if (o == rank_) continue;
        const auto chunk = slice(o).chunk(first, n);
        std::memcpy(at(chunk.first), staging(o), chunk.count * element_);
      }
      return true;
    };
    return each_chunk(slice(0).count, staging_bytes_ / element_, write, read);
  }

  const int owners_;
  bool written_ = false;
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::all_gather(void* data, std::size_t count, int owners, Dtype type,
                                                      Start when) {
  return start(std::make_unique<AllGather>(*this, data, count, owners, type), when);
}

}  // namespace muster::detail::node
