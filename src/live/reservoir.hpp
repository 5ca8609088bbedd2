// Which samples a rank keeps, and which of them are drawn: numbers only, no values and no threads.
#pragma once

#include "muster/live.hpp"

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

namespace muster::detail::live {

/// A sample in memory.
struct Sample {
  std::int64_t solver = 0, number = 0;
  std::int64_t uses = 0;
  std::int64_t arrival = 0;  ///< counts the samples of this rank
  bool is_held_out = false;
};

/// What has become of the samples that came to a rank: received = waiting + used + validation + dropped + lost.
struct Fates {
  std::int64_t received = 0, used = 0, validation = 0, dropped = 0, lost = 0;
  std::int64_t draws = 0;
};

class Reservoir {
 public:
  struct Options {
    LiveRule rule = LiveRule::reservoir;
    std::int64_t capacity = 1;    ///< samples in memory
    std::int64_t validation = 0;  ///< those of them that are held out, at most
    std::int64_t validation_every = 0;
    std::int64_t max_uses = 0;
    std::uint64_t seed = 0;
  };
  explicit Reservoir(const Options& options);

  /// True if make_room() can be called for the sample with this number; otherwise the sample waits.
  bool can_take(std::int64_t number) const noexcept;
  /// Returns the slot into which the next sample goes; none if the sample is dropped. A sample that was in the slot is
  /// gone.
  std::optional<std::int64_t> make_room(std::int64_t number);
  /// The sample is in the slot that make_room() has returned.
  void fill(std::int64_t slot, std::int64_t solver, std::int64_t number);
  /// The sample for the slot was lost.
  void give_back(std::int64_t slot);
  /// A sample has come that is not wanted.
  void drop() { ++fates_.received, ++fates_.dropped; }
  /// A sample in no slot was lost: it never came, or there is no room any more.
  void lose(std::int64_t count) { fates_.received += count, fates_.lost += count; }

  /// Draws `count` samples and counts their uses: first `fresh` that were never used, then any. The slots of samples
  /// that leave the memory keep their values until the next make_room(). At least `fresh` samples wait; with `fifo` and
  /// `firo`, `count` do.
  std::vector<std::int64_t> draw(std::int64_t count, std::int64_t fresh);
  /// The next `count` of the samples that are held out, round and round.
  std::vector<std::int64_t> next_held_out(std::int64_t count);

  bool uses_once() const noexcept { return options_.rule == LiveRule::fifo || options_.rule == LiveRule::firo; }
  std::int64_t waiting() const noexcept { return static_cast<std::int64_t>(fresh_.size()); }
  /// Samples that can be drawn.
  std::int64_t size() const noexcept { return static_cast<std::int64_t>(fresh_.size() + used_.size()); }
  /// The most samples that can be drawn at a time.
  std::int64_t drawable_capacity() const noexcept { return options_.capacity - options_.validation; }
  std::int64_t held_out() const noexcept { return static_cast<std::int64_t>(held_out_.size()); }
  /// How many slots were used so far.
  std::int64_t slot_count() const noexcept { return static_cast<std::int64_t>(samples_.size()); }
  /// The slot of the sample with this index, 0 ≤ index < size().
  std::int64_t slot(std::int64_t index) const;
  std::span<const std::int64_t> held_out_slots() const noexcept { return held_out_; }
  const Sample& operator[](std::int64_t slot) const noexcept { return samples_[static_cast<std::size_t>(slot)]; }
  const Fates& fates() const noexcept { return fates_; }

  /// For a restart: forgets the samples that are in memory.
  void clear();
  /// For a restart: puts back a sample that was in memory. Returns its slot; none, and the sample is lost, if there is
  /// no room. Call it in the order of arrival.
  std::optional<std::int64_t> restore(const Sample& sample);
  /// For a restart: sets the counts, after the samples.
  void restore(const Fates& fates) noexcept;

 private:
  bool holds_out(std::int64_t number) const noexcept;
  /// True if there is room for another sample to draw. The slots of those that are held out are kept for them.
  bool has_room() const noexcept { return size() + filling_ < drawable_capacity(); }
  std::int64_t take_free_slot();
  std::int64_t pick(std::int64_t count) noexcept;
  std::int64_t take(std::deque<std::int64_t>& from, std::int64_t index);
  void use(std::int64_t slot, std::deque<std::int64_t>& before, std::int64_t index);

  const Options options_;
  std::vector<Sample> samples_;     ///< by slot; of the slots that were used so far
  std::vector<std::int64_t> free_;  ///< those of them without a sample
  std::deque<std::int64_t> fresh_,
      used_;                            ///< slots of samples that were never used, in the order of arrival; and others
  std::vector<std::int64_t> held_out_;  ///< slots for validation
  /// Samples that are being received: those to draw, and those to be held out.
  std::int64_t filling_ = 0, validation_filling_ = 0;
  std::int64_t next_held_out_ = 0;
  std::int64_t arrivals_ = 0;
  std::uint64_t random_ = 0;  ///< random numbers drawn
  Fates fates_;
};

}  // namespace muster::detail::live
