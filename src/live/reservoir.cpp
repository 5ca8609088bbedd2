#include "live/reservoir.hpp"

#include "base/hash.hpp"

#include <algorithm>
#include <utility>

namespace muster::detail::live {

Reservoir::Reservoir(const Options& options) : options_(options) {}

bool Reservoir::holds_out(std::int64_t number) const noexcept {
  // Not by the number itself, by which the samples are dealt out to the ranks.
  const auto every = static_cast<std::uint64_t>(options_.validation_every);
  return every > 0 && scrambled(static_cast<std::uint64_t>(number)) % every == 0 &&
         held_out() + validation_filling_ < options_.validation;
}

/// A random number from 0 to count − 1. Which one depends on the seed and on how many were drawn before.
std::int64_t Reservoir::pick(std::int64_t count) noexcept {
  const auto random = scrambled(options_.seed + scrambled(++random_));
  return static_cast<std::int64_t>((static_cast<unsigned __int128>(random) * static_cast<std::uint64_t>(count)) >> 64);
}

bool Reservoir::can_take(std::int64_t number) const noexcept {
  if (has_room() || holds_out(number)) return true;
  return options_.rule == LiveRule::reservoir ? !used_.empty() : options_.rule == LiveRule::uniform && size() > 0;
}

std::int64_t Reservoir::take(std::deque<std::int64_t>& from, std::int64_t index) {
  const auto at = from.begin() + index;
  const auto slot = *at;
  if (at == from.begin()) {
    from.pop_front();
  } else {
    *at = from.back();
    from.pop_back();
  }
  return slot;
}

std::int64_t Reservoir::take_free_slot() {
  if (free_.empty()) return samples_.emplace_back(), slot_count() - 1;
  const auto slot = free_.back();
  free_.pop_back();
  return slot;
}

std::optional<std::int64_t> Reservoir::make_room(std::int64_t number) {
  const bool is_held_out = holds_out(number);
  if (is_held_out || has_room()) {
    const auto slot = take_free_slot();
    samples_[static_cast<std::size_t>(slot)].is_held_out = is_held_out;
    ++(is_held_out ? validation_filling_ : filling_);
    return slot;
  }
  if (options_.rule == LiveRule::reservoir)
    return ++filling_, take(used_, pick(static_cast<std::int64_t>(used_.size())));
  // Algorithm R: the k-th sample that came for training is kept with the probability capacity / k.
  const auto k = fates_.received + 1 - fates_.validation;
  if (pick(k) >= drawable_capacity()) return drop(), std::nullopt;
  ++filling_;
  const auto index = pick(size());
  if (index >= waiting()) return take(used_, index - waiting());
  ++fates_.dropped;
  return take(fresh_, index);
}

void Reservoir::fill(std::int64_t slot, std::int64_t solver, std::int64_t number) {
  auto& sample = samples_[static_cast<std::size_t>(slot)];
  sample = {.solver = solver, .number = number, .arrival = arrivals_++, .is_held_out = sample.is_held_out};
  ++fates_.received;
  --(sample.is_held_out ? validation_filling_ : filling_);
  if (!sample.is_held_out) return fresh_.push_back(slot);
  ++fates_.validation;
  held_out_.push_back(slot);
}

void Reservoir::give_back(std::int64_t slot) {
  --(std::exchange(samples_[static_cast<std::size_t>(slot)].is_held_out, false) ? validation_filling_ : filling_);
  free_.push_back(slot);
  lose(1);
}

void Reservoir::use(std::int64_t slot, std::deque<std::int64_t>& before, std::int64_t index) {
  auto& sample = samples_[static_cast<std::size_t>(slot)];
  ++fates_.draws;
  if (sample.uses++ == 0) ++fates_.used;
  const bool leaves = uses_once() || (options_.max_uses > 0 && sample.uses >= options_.max_uses);
  if (&before == &used_ && !leaves) return;
  take(before, index);
  leaves ? free_.push_back(slot) : used_.push_back(slot);
}

std::vector<std::int64_t> Reservoir::draw(std::int64_t count, std::int64_t fresh) {
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < count && size() > 0; ++i) {
    const auto fresh_only = i < fresh || uses_once();
    const auto index = options_.rule == LiveRule::fifo ? 0 : pick(fresh_only ? waiting() : size());
    auto& from = index < waiting() ? fresh_ : used_;
    const auto at = index < waiting() ? index : index - waiting();
    slots.push_back(from[static_cast<std::size_t>(at)]);
    use(slots.back(), from, at);
  }
  return slots;
}

std::vector<std::int64_t> Reservoir::next_held_out(std::int64_t count) {
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < count; ++i) {
    next_held_out_ = next_held_out_ < held_out() ? next_held_out_ : 0;
    slots.push_back(held_out_[static_cast<std::size_t>(next_held_out_++)]);
  }
  return slots;
}

std::int64_t Reservoir::slot(std::int64_t index) const {
  const auto at = static_cast<std::size_t>(index);
  return at < fresh_.size() ? fresh_[at] : used_[at - fresh_.size()];
}

void Reservoir::clear() {
  for (auto* const slots : {&fresh_, &used_}) {
    free_.insert(free_.end(), slots->begin(), slots->end());
    slots->clear();
  }
  free_.insert(free_.end(), held_out_.begin(), held_out_.end());
  held_out_.clear();
  next_held_out_ = 0;
}

std::optional<std::int64_t> Reservoir::restore(const Sample& sample) {
  if (sample.is_held_out ? held_out() + validation_filling_ >= options_.validation
                         : !has_room() || (uses_once() && sample.uses > 0))
    return std::nullopt;
  const auto slot = take_free_slot();
  samples_[static_cast<std::size_t>(slot)] = sample;
  arrivals_ = std::max(arrivals_, sample.arrival + 1);
  if (sample.is_held_out)
    held_out_.push_back(slot);
  else
    (sample.uses > 0 ? used_ : fresh_).push_back(slot);
  return slot;
}

void Reservoir::restore(const Fates& fates) noexcept {
  fates_ = fates;
  random_ = scrambled(static_cast<std::uint64_t>(fates.draws + fates.received));  // not the draws of the first start
}

}  // namespace muster::detail::live
