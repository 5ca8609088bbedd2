#include "node/operation.hpp"

#include "muster/error.hpp"

#include <cstring>
#include <string>
#include <utility>

namespace muster::detail::node {

void Operation::copy_data() {
  if (bytes() == 0 || copy_ || ranks_.is_registered(data_, bytes())) return;
  copy_ = std::make_unique_for_overwrite<std::byte[]>(bytes());
  std::memcpy(copy_.get(), data_, bytes());
  data_ = copy_.get();
}

void Operation::mismatched(int rank, std::uint64_t phase) const {
  std::pair<int, std::string> texts[2];
  for (const int r : {rank_, rank}) {
    const auto& its_call = ranks_.shared_->ranks[r].calls[phase & 1];
    const int known = ranks_.names_.empty() ? r : ranks_.names_[static_cast<std::size_t>(r)];
    texts[r == rank ? 1 : 0] = {known, Call::decode(its_call.word.load(std::memory_order_relaxed)).text() + " as its " +
                                           nth(its_call.call_number.load(std::memory_order_relaxed))};
  }
  if (texts[1].first < texts[0].first) std::swap(texts[0], texts[1]);
  throw mismatch(texts[0].first, texts[0].second, texts[1].first, texts[1].second);
}

bool Operation::all_arrived(std::uint64_t phase) {
  if (ranks_.seen_arrived_ >= phase) return true;
  for (int r = 0; r < size_; ++r)
    if (!arrived(r, phase)) return false;
  ranks_.seen_arrived_ = phase;
  return true;
}

bool Operation::all_finished() {
  if (ranks_.seen_finished_ >= phase_) return true;
  for (int r = 0; r < size_; ++r)
    if (ranks_.shared_->ranks[r].finished.load(std::memory_order_acquire) < phase_) return false;
  ranks_.seen_finished_ = phase_;
  return true;
}

bool Operation::exchange_locations() {
  if (has_locations_) return true;
  const auto write = [&] {
    NodeCommunicator::Shared::DataLocation location;
    if (const auto region = ranks_.region_of(data_, bytes()); region != 0)
      location = {region, static_cast<std::uint64_t>(data_ - ranks_.regions_.at(region).of(rank_))};
    mine().locations[phase_ & 1] = location;
  };
  if (!arrive(write) || !all_arrived()) return false;
  for (int r = 0; r < size_; ++r) {
    const auto& location = ranks_.shared_->ranks[r].locations[phase_ & 1];
    if (location.region == 0) {
      rank_data_.clear();
      next_phase();
      break;
    }
    rank_data_.push_back(ranks_.regions_.at(location.region).of(r) + location.offset);
  }
  return has_locations_ = true;
}

}  // namespace muster::detail::node
