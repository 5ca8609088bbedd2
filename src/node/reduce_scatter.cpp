#include "node/operation.hpp"

#include <cstring>

namespace muster::detail::node {
namespace {

class ReduceScatter final : public Operation {
 public:
  ReduceScatter(NodeCommunicator& ranks, void* data, std::size_t count, int owners, const Reduction& reduction)
      : Operation(ranks, data,
                  {.kind = Call::Kind::reduce_scatter, .type = reduction.type, .op = reduction.op, .count = count}),
        owners_(owners),
        reduction_(reduction) {}

  bool advance() override {
    if (size_ == 1) return true;
    if (!exchange_locations()) return false;
    if (rank_data_.empty()) return advance_through_staging();
    const auto mine = slice(rank_).first * element_;
    if (rank_ < owners_)
      reduce_here(slice(rank_), reduction_, [&](int r) { return rank_data_[static_cast<std::size_t>(r)] + mine; });
    return true;
  }

 private:
  Slice slice(int owner) const { return slice_of(count_, owners_, owner, type_); }

  /// Goes through the slices in chunks. In each phase the buffer holds one chunk of every slice, side by side.
  bool advance_through_staging() {
    const auto most = staging_bytes_ / static_cast<std::size_t>(owners_) / cache_line * cache_line / element_;
    const auto place = [&](int rank, int owner, std::size_t n) {
      return staging(rank) + static_cast<std::size_t>(owner) * n * element_;
    };
    const auto write = [&](std::size_t first, std::size_t n) {
      for (int o = 0; o < owners_; ++o) {
        if (o == rank_) continue;
        const auto chunk = slice(o).chunk(first, n);
        std::memcpy(place(rank_, o, n), at(chunk.first), chunk.count * element_);
      }
    };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (rank_ >= owners_) return true;
      if (!all_arrived()) return false;
      const auto mine = slice(rank_).chunk(first, n);
      reduce_here(mine, reduction_, [&](int r) { return r == rank_ ? at(mine.first) : place(r, rank_, n); });
      return true;
    };
    return each_chunk(slice(0).count, std::max<std::size_t>(1, most), write, read);
  }

  const int owners_;
  const Reduction reduction_;
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::reduce_scatter(void* data, std::size_t count, int owners,
                                                          const Reduction& reduction) {
  return start(std::make_unique<ReduceScatter>(*this, data, count, owners, reduction));
}

}  // namespace muster::detail::node
