#include "node/operation.hpp"

#include <cstring>

namespace muster::detail::node {
namespace {

/// Up to this many bytes a copy costs less than finding out whether one is needed.
constexpr std::size_t small_bytes = std::size_t{8} << 10;
/// Up to this many bytes of all ranks together, each rank reduces everything; above it is cheaper to reduce one slice
/// per rank.
constexpr std::size_t direct_bytes = std::size_t{1} << 20;
/// In registered memory of up to this many bytes, a rank always reduces the same slice, which stays in its cache.
constexpr std::size_t cached_bytes = std::size_t{2} << 20;

class AllReduce final : public Operation {
 public:
  AllReduce(NodeCommunicator& ranks, void* data, std::size_t count, const Reduction& reduction)
      : Operation(ranks, data,
                  {.kind = Call::Kind::all_reduce, .type = reduction.type, .op = reduction.op, .count = count}),
        reduction_(reduction) {}

  bool advance() override {
    if (bytes() <= small_bytes) return direct();
    if (!exchange_locations()) return false;
    if (!rank_data_.empty()) return in_place();
    return bytes() * static_cast<std::size_t>(size_) <= direct_bytes ? direct() : sliced();
  }

 private:
  /// Every rank reduces everything.
  bool direct() {
    const auto write = [&](std::size_t first, std::size_t n) { std::memcpy(staging(rank_), at(first), n * element_); };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (!all_arrived()) return false;
      reduce_here({first, n}, reduction_, [&](int r) { return staging(r); });
      return true;
    };
    return each_chunk(count_, staging_bytes_ / element_, write, read);
  }

  /// Each rank reduces one slice of each chunk; the others copy it.
  bool sliced() {
    const auto write = [&](std::size_t first, std::size_t n) {
      const auto mine = slice_of(n, size_, rank_, type_);
      const auto before = mine.first * element_, after = (mine.first + mine.count) * element_;
      std::memcpy(staging(rank_), at(first), before);
      std::memcpy(staging(rank_) + after, at(first) + after, n * element_ - after);
    };
    const auto read = [&](std::size_t first, std::size_t n) {
      if (!reduced_) {
        if (!all_arrived()) return false;
        const auto mine = slice_of(n, size_, rank_, type_);
        const auto from = mine.first * element_;
        void* const targets[] = {at(first) + from, staging(rank_) + from};
        reduce_to(targets, mine.count, reduction_, [&](int r) { return (r == rank_ ? at(first) : staging(r)) + from; });
        finish();
        reduced_ = true;
      }
      if (!all_finished()) return false;
      for (int r = 0; r < size_; ++r) {
        if (r == rank_) continue;
        const auto theirs = slice_of(n, size_, r, type_);
        std::memcpy(at(first + theirs.first), staging(r) + theirs.first * element_, theirs.count * element_);
      }
      reduced_ = false;
      return true;
    };
    return each_chunk(count_, staging_bytes_ / element_, write, read);
  }

  /// Reduces in registered memory, one chunk at a time (of small data, this rank's slice), and writes the result to the
  /// memory of all ranks.
  bool in_place() {
    if (!reduced_) {
      if (bytes() <= cached_bytes) {
        reduce_everywhere(slice_of(count_, size_, rank_, type_));
      } else {
        const auto most = claimed_bytes / element_;
        if (const auto next = claim([&](std::size_t number) { return number * most < count_; })) {
          reduce_everywhere(Slice{0, count_}.chunk(*next * most, most));
          return false;
        }
      }
      finish();
      reduced_ = true;
    }
    return all_finished();
  }

  void reduce_everywhere(const Slice& slice) {
    targets_.clear();
    for (auto* data : rank_data_) targets_.push_back(data + slice.first * element_);
    reduce_to(targets_, slice.count, reduction_, [&](int r) { return targets_[static_cast<std::size_t>(r)]; });
  }

  const Reduction reduction_;
  std::vector<void*> targets_;
  bool reduced_ = false;
};

}  // namespace

NodeCommunicator::Ticket NodeCommunicator::all_reduce(void* data, std::size_t count, const Reduction& reduction) {
  return start(std::make_unique<AllReduce>(*this, data, count, reduction));
}

}  // namespace muster::detail::node
