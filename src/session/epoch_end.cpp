#include "session/epoch_end.hpp"

#include "base/log.hpp"
#include "data/passes/pass_positions.hpp"

#include <utility>

namespace muster::detail::session {

void EpochEnd::begin_epoch() { averaged_before_ = models_.gradient_average_count(); }

bool EpochEnd::trains_on_unknown_data() const {
  const auto passes = data_.pass_positions->epoch_progress();
  using EpochProgress = data::PassPositions::EpochProgress;
  if (passes != EpochProgress::none) return passes == EpochProgress::unknown;
  // No dataset has had a training pass in this epoch. If gradients were averaged in it all the same, the epoch trains
  // on data that muster does not read.
  return progress_.steps->epoch.is_in_loop() && models_.gradient_average_count() != averaged_before_;
}

void EpochEnd::note_report(bool has_state) {
  is_mid_epoch_ = false;
  if (!progress_.steps->epoch.is_in_loop() || !trains_on_unknown_data()) return;
  const std::size_t kind = has_state ? 1 : 0;
  auto& last = last_reports_[kind];
  const auto averaged = models_.gradient_average_count();
  const auto epoch = progress_.steps->epoch.number;
  const bool same_epoch = std::exchange(last.epoch, epoch) == epoch;
  const bool trained = std::exchange(last.averaged, averaged) != averaged || models_.empty();
  const bool again = same_epoch && trained;
  is_mid_epoch_ = trained_between_reports_[kind] = trained_between_reports_[kind] || again;
  if (!again || !has_state || std::exchange(has_warned_, true) || !workers_.is_first()) return;
  log::warn(
      "a State is reported several times in an epoch whose data muster does not know, so the position in the data is "
      "not saved: a run that goes on from here begins the epoch again, and one that goes on from the first State of an "
      "epoch may leave out the rest of it. Take the data from get_dataset_shard() or prepare_data_loader(), whose "
      "position is saved, or report the State once, at the end of the epoch");
}

void EpochEnd::set_back(const EpochEnd& before) noexcept {
  last_reports_ = before.last_reports_;
  trained_between_reports_ = before.trained_between_reports_;
  is_mid_epoch_ = before.is_mid_epoch_;
}

bool EpochEnd::is_complete() const {
  if (progress_.is_between_epochs) return true;
  return trains_on_unknown_data() ? !is_mid_epoch_
                                  : data_.pass_positions->epoch_progress() == data::PassPositions::EpochProgress::over;
}

}  // namespace muster::detail::session
