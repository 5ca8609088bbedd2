// Saves checkpoints, synchronously or in the background, and prunes old ones.
#include "base/log.hpp"
#include "checkpoint/fast_tier.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/store.hpp"
#include "comm/on_ranks.hpp"
#include "comm/world.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <exception>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_root;
namespace {

/// Stores the time of its destruction in `at`.
struct EndTime {
  Clock::time_point& at;
  ~EndTime() { at = Clock::now(); }
};

}  // namespace

CheckpointStore::CheckpointStore(Communicator communicator, std::filesystem::path run, CheckpointConfig config)
    : communicator_(std::move(communicator)), tier_(std::move(run)), config_(std::move(config)) {
  if (config_.num_to_keep.value_or(1) < 1)
    throw Error(ExitCode::usage, "keeping checkpoints",
                "num_to_keep is " + std::to_string(*config_.num_to_keep) + ", and the newest always stays",
                "Give 1 or more, or leave it out to keep all");
  has_earlier_tier_ = finish_copying(communicator_, tier_);
  const auto indices = run_on_root(communicator_, [&] {
    const auto there = tier_.list();  // listed before remove_unfinished(), whose indices are not used again
    for (const auto& path : there.others)
      log::warn(path.string() +
                " is a link or a file, not a folder, so the run does not go on from it. Move the "
                "checkpoint's folder back there");
    const int next = next_index(tier_.folder());
    tier_.remove_unfinished();
    return Json{next, std::set(there.indices.lower_bound(next), there.indices.end())};
  });
  next_index_ = indices[0];
  taken_ = indices[1].get<std::set<int>>();
  if (!config_.fast_tier.empty()) fast_ = create_fast_tier(communicator_, tier_, config_.fast_tier);
  if (fast_ || config_.async_save) background_communicator_ = comm::make_separate_world(communicator_);
}

CheckpointStore::~CheckpointStore() {
  if (background_save_.valid()) background_save_.wait();
  if (!fast_ || fast_used_) return;  // the next start copies what is left
  std::error_code ignored;
  if (fast_->is_leader) std::filesystem::remove(fast_->tier.folder(), ignored);
  if (here().rank == 0 && !std::filesystem::exists(fast_->tier.folder(), ignored)) remove_from_note(tier_, *fast_);
}

int CheckpointStore::free_index() {
  while (taken_.contains(next_index_)) ++next_index_;
  return next_index_;
}

Checkpoint CheckpointStore::commit(CheckpointContents contents, Mode mode) {
  confirm_rollback();
  const int index = free_index();
  save_begun_ = contents.began_at;
  const bool is_async = mode == Mode::async && background_communicator_;
  SaveTarget run{.tier = tier_, .is_leader = here().rank == 0};
  auto& first = fast_ ? *fast_ : run;
  const auto save = std::make_shared<Save>(std::move(contents), index, communicator_, writer_);
  const auto write = [this, save, index](const Communicator& communicator, SaveTarget& target) {
    save->write(communicator, target);
    if (fast_ && !fast_used_) {
      run_on_root(communicator, [&] { mark_used(tier_, index); });
      fast_used_ = true;
      fast_first_ = index;
    }
    if (fast_) next_index_ = index + 1;  // if another node fails, this node may be left with that published name
    save->publish(communicator, target);
  };
  const auto or_abandon = [index](SaveTarget& target, auto&& work) {
    try {
      work();
    } catch (...) {
      target.abandon(index);
      throw;
    }
  };
  or_abandon(first, [&] {
    save->prepare(communicator_, layout_);
    save->copy_files(communicator_, first);
    if (is_async)
      save->take_snapshot(communicator_, snapshot_);
    else
      write(communicator_, first);
  });
  next_index_ = index + 1;
  const auto to_run = [this, save, index](const Communicator& communicator) {
    if (fast_) {
      if (fast_first_ != index && run_on_root(communicator, [&] { return note_first(tier_, index); }))
        fast_first_ = index;
      clear_fast_tier(index, /*after=*/false);
      copy_from_fast_tier(communicator, *save, index);
    }
    if (fast_ || has_earlier_tier_) release_fast_tiers(communicator);
    if (fast_) clear_fast_tier(index, /*after=*/true);
    if (config_.num_to_keep) run_on_root(communicator, [&] { prune(tier_, config_, is_needed_); });
  };
  if (is_async)
    run_in_background([=, target = first](const Communicator& communicator) mutable {
      or_abandon(target, [&] { write(communicator, target); });
      to_run(communicator);
    });
  else if (fast_)
    run_in_background(to_run);
  else
    to_run(communicator_), last_save_duration_ = Clock::now() - save_begun_;
  return as_this_rank(Checkpoint(tier_.published(index)));
}

void CheckpointStore::copy_from_fast_tier(const Communicator& communicator, const Save& save, int index) {
  try {
    copy_to_run_folder(communicator, save.manifest(), {{fast_->tier.published(index), save.pieces(), save.files()}},
                       tier_);
  } catch (const Error& error) {
    if (!error.agreed() || error.code() != ExitCode::data) throw;
    // The checkpoint was intact a moment ago, so somebody else has changed the tier. The run's folder has an earlier
    // checkpoint, so a retry makes sense.
    throw Error(ExitCode::retry, error.what());
  }
}

void CheckpointStore::run_in_background(std::function<void(const Communicator&)> work) {
  const auto run = [this, communicator = *background_communicator_, work = std::move(work)] {
    const EndTime end_time{save_ended_};
    const auto limit = comm::time_limit(communicator);
    return comm::attempt_on_all(communicator, {.done = limit, .failed = limit}, [&] { work(communicator); });
  };
  // If somebody else initialized MPI, it may allow calls from one thread only; then `work` runs here.
  if (comm::threads_may_call_mpi()) {
    background_save_ = std::async(std::launch::async, run).share();
  } else {
    std::promise<std::optional<Error>> done;
    done.set_value(run());
    background_save_ = done.get_future().share();
  }
}

bool CheckpointStore::is_saving() const {
  return background_save_.valid() && background_save_.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

std::optional<Clock::duration> CheckpointStore::current_save_duration() const noexcept {
  if (!background_save_.valid()) return {};
  return (is_saving() ? Clock::now() : save_ended_) - save_begun_;
}

bool CheckpointStore::wait_for_success() const { return !background_save_.valid() || !background_save_.get(); }

std::optional<Error> CheckpointStore::finish() {
  if (!background_save_.valid()) return {};
  const auto writing = std::exchange(background_save_, {});
  writing.wait();
  last_save_duration_ = save_ended_ - save_begun_;
  return writing.get();
}

void CheckpointStore::release_fast_tiers(const Communicator& communicator) {
  const bool noted = run_on_root(communicator, [&] { return mark_copied(tier_); });
  // Also after a failure: the note may say either then, so the next save marks the tier as used again.
  fast_used_ = false;
  if (!noted) return;
  if (std::exchange(has_earlier_tier_, false)) remove_unused_tiers(communicator, tier_, fast_);
}

void CheckpointStore::clear_fast_tier(int index, bool after) const noexcept {
  if (!fast_->is_leader) return;
  try {
    for (const auto& [there, path] : fast_->tier.list().published)
      if (after || (there < index && there != fast_first_)) fast_->tier.remove(there);
  } catch (const std::exception& error) {
    log::warn("removing what has been copied from the fast tier: " + std::string(error.what()));
  }
}

}  // namespace muster::detail::checkpoint
