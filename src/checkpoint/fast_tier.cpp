#include "checkpoint/fast_tier.hpp"

#include "base/log.hpp"
#include "checkpoint/copy_from_tiers.hpp"
#include "checkpoint/fast_tier_note.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "storage/folder_tier.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;
namespace fs = std::filesystem;
namespace {

/// Sets "used" and "first" in the entry of this job's tier.
void note_first(const storage::Tier& run, int index) {
  auto note = read_note(run);
  if (note.empty())
    throw Error(ExitCode::retry, "noting the use of the fast tier in " + note_path(run).string(), "the file is gone",
                "Start the run again");
  note.back().used = true;
  note.back().first = index;
  write_note(run, note);
}

/// Calls `work`. If it throws, logs a warning that begins with `doing`, and returns false.
template <class Work>
bool or_warn(const char* doing, const Work& work) noexcept try {
  work();
  return true;
} catch (const std::exception& error) {
  log::warn(str(doing, ": ", error.what()));
  return false;
}

}  // namespace

FastTiers::FastTiers(const Communicator& communicator, std::shared_ptr<storage::Tier> run)
    : run_(std::move(run)), has_earlier_(finish_copying(communicator, *run_)), is_root_(communicator.rank() == 0) {}

FastTiers::~FastTiers() {
  if (!own_ || used_) return;  // the next start copies what is left
  const auto folder = own_->tier->folder();
  std::error_code ignored;
  if (own_->is_leader) fs::remove(folder, ignored);
  if (!is_root_ || fs::exists(folder, ignored)) return;
  or_warn("removing the fast tier from the run's fast_tier.json", [&] {
    auto note = read_note(*run_);
    const auto own_name = folder.filename().string();
    if (std::erase_if(note, [&](const auto& tier) { return own_name.starts_with(tier.prefix()); }) > 0)
      write_note(*run_, note);
  });
}

void FastTiers::create_own(const Communicator& communicator, const fs::path& place) {
  const auto folder = fs::absolute(place);
  const auto& topology = communicator.topology();
  const auto id = run_on_root(communicator, [&] {
    if (!other_owner(*run_).empty()) return std::string();
    NotedTier made{.folder = folder.string(), .id = new_id(), .run = identity_of(*run_)};
    made.hosts.resize(static_cast<std::size_t>(topology.num_nodes));
    for (std::size_t rank = 0; rank < topology.hosts.size(); ++rank)
      made.hosts[static_cast<std::size_t>(topology.node_of_rank[rank])] = topology.hosts[rank];
    auto note = read_note(*run_);
    note.push_back(made);
    write_note(*run_, note);
    return made.id;
  });
  if (id.empty()) return;
  const auto own = folder / str(NotedTier{folder.string(), id}.prefix(), topology.node_rank, "-",
                                topology.hosts[static_cast<std::size_t>(communicator.rank())]);
  const bool is_leader = topology.local_rank == 0;
  run_on_all(communicator, [&] {
    const auto doing = "making the folder " + own.string() + " of the fast tier";
    const auto remedy = "fast_tier must name a folder that exists on every node and may be written to";
    if (!is_leader) return;
    if (::mkdir(own.c_str(), 0700) != 0) throw Error(ExitCode::usage, doing, std::strerror(errno), remedy);
    if (const auto problem = reason_to_distrust(own); !problem.empty())
      throw Error(ExitCode::usage, doing, problem, remedy);
  });
  own_ = SaveTarget{.tier = std::make_shared<storage::NodeTier>(own), .is_leader = is_leader, .is_per_node = true};
}

void FastTiers::begin_use(const Communicator& communicator, int index) {
  if (used_) return;
  run_on_root(communicator, [&] { note_first(*run_, index); });
  used_ = true;
  first_ = index;
}

void FastTiers::settle(const Communicator& communicator, const Save& save) {
  const int index = save.index();
  if (own_) {
    if (first_ != index && run_on_root(communicator, [&] {
          return or_warn("noting the oldest checkpoint in the fast tier", [&] { note_first(*run_, index); });
        }))
      first_ = index;  // a note that could not be written names the old `first_`, which must stay
    clear(index, /*all=*/false);
    copy(communicator, save);
  }
  if (own_ || has_earlier_) release(communicator);
  if (own_) clear(index, /*all=*/true);
}

void FastTiers::release_earlier(const Communicator& communicator) {
  if (has_earlier_) release(communicator);
}

void FastTiers::copy(const Communicator& communicator, const Save& save) {
  try {
    const int rank = communicator.rank();
    copy_to_run_folder(communicator, save.manifest(),
                       {{own_->tier->published(save.index()), save.pieces_of(rank), save.files_of(rank)}}, *run_);
  } catch (const RemoteError&) {
    throw;  // another rank has failed elsewhere, and its error keeps its code
  } catch (const Error& error) {
    if (!error.agreed() || error.code() != ExitCode::data) throw;
    // The ranks have just written this checkpoint, so somebody else has changed it. A retry makes sense, since the
    // run's folder has an earlier checkpoint.
    throw Error(ExitCode::retry, error.what());
  }
}

void FastTiers::release(const Communicator& communicator) {
  // Called when the run's folder has a checkpoint at least as new as those in all tiers, or after a rollback.
  const bool noted = run_on_root(communicator, [&] {
    return or_warn("noting what has been copied from the fast tier", [&] {
      auto note = read_note(*run_);
      for (auto& tier : note) tier.used = false;
      if (!note.empty()) write_note(*run_, note);
    });
  });
  // Reset even if that failed: the note may or may not have been written, so the next save must set "used" again.
  used_ = false;
  if (noted && std::exchange(has_earlier_, false))
    remove_unused_tiers(communicator, *run_, own_ ? own_->tier->folder() : fs::path());
}

void FastTiers::clear(int index, bool all) const noexcept {
  if (!own_->is_leader) return;
  or_warn("removing what has been copied from the fast tier", [&] {
    for (const auto& [there, path] : own_->tier->list().published)
      if (all || (there < index && there != first_)) own_->tier->remove(there);
  });
}

std::vector<std::string> used_tiers(const storage::Tier& run) {
  std::vector<std::string> ids;
  for (const auto& tier : read_note(run))
    if (tier.used) ids.push_back(tier.id);
  return ids;
}

bool may_hold_newer(const storage::Tier& run) { return std::ranges::any_of(read_note(run), &NotedTier::used); }

}  // namespace muster::detail::checkpoint
