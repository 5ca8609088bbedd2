// Saving: what the ranks hold is compared, written by all, published by rank 0, and old checkpoints are pruned.
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/state_file.hpp"
#include "checkpoint/files/user_files.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/store.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace muster::detail::checkpoint {

using comm::on_all;
using comm::on_root;
namespace {

/// The random state of every rank as a tensor [world_size, bytes].
at::Tensor random_tensor(const std::vector<std::string>& states) {
  const auto ranks = static_cast<std::int64_t>(states.size()), bytes = static_cast<std::int64_t>(states.front().size());
  auto tensor = at::empty({ranks, bytes}, at::TensorOptions(at::kByte));
  auto* to = static_cast<char*>(tensor.mutable_data_ptr());
  for (const auto& state : states) {
    if (state.size() != states.front().size())
      throw Error(ExitCode::usage, "saving the random state", "it is not as long on every rank",
                  "Give as many bytes on every rank");
    to = std::copy(state.begin(), state.end(), to);
  }
  return tensor;
}

/// One save, by its steps. Collective.
class Save {
 public:
  Save(const Communicator& communicator, Rank here, Tier& tier, int index, const Contents& contents)
      : communicator_(communicator), here_(here), tier_(tier), index_(index), contents_(contents) {}

  /// What each rank has, before anything is written.
  void compare() {
    std::vector<std::uint64_t> fingerprints;
    for (const auto& text : on_all(communicator_, [&] {
           const auto mine = list_user_files(contents_.directory);
           check_storable(contents_.state.tensors);
           if (contents_.state.tensors.contains(random_name))
             throw Error(ExitCode::usage, "saving the state", "an entry is called random", "Give it another name");
           const auto number = here_.size > 1 ? fingerprint(contents_.state, contents_.replication) : 0;
           return Json::array({mine.names, mine.metadata, number}).dump();
         })) {
      const auto rank = Json::parse(text);
      files_.push_back({.names = rank[0], .metadata = rank[1]});
      fingerprints.push_back(rank[2]);
    }
    if (std::ranges::count(fingerprints, fingerprints.front()) != here_.size)
      drifted_ = find_drift(communicator_, contents_.state, contents_.replication);
    state_ = gather_per_rank(&communicator_, contents_.state, contents_.replication);
  }

  /// Rank 0 lays out, all write.
  void write() {
    const auto random = communicator_.all_gather(contents_.random_state);
    const auto folder = tier_.saving(index_);
    layout_ = layout_from_json(Json::parse(on_root(communicator_, [&] {
      tier_.begin(index_);
      state_.tensors.emplace(random_name, random_tensor(random));
      return to_json(lay_out(folder / state_name, state_.tensors)).dump();
    })));
    state_.tensors.try_emplace(random_name, random_tensor(random));
    writers_ = piece_writers(layout_, here_.size, drifted_);
    const auto owners = owners_of(files_);
    for (const auto& text : on_all(communicator_, [&] {
           auto written = Json::array(
               {write_pieces(folder / state_name, layout_, state_.tensors, writers_, here_.rank), Json::array()});
           for (const auto& name : files_[static_cast<std::size_t>(here_.rank)].names)
             written[1].push_back(owners.at(name) == here_.rank ? copy_file(*contents_.directory, name, folder)
                                                                : checksum_file(*contents_.directory, name));
           return written.dump();
         }))
      written_.push_back(Json::parse(text));
  }

  /// All have written: what is in the checkpoint gets its manifest and its name. Rank 0 alone.
  void publish() {
    write_manifest(tier_.saving(index_), {.index = index_,
                                          .time = time_now(),
                                          .world_size = here_.size,
                                          .progress = contents_.progress,
                                          .metrics = contents_.metrics,
                                          .metadata = merge_metadata(contents_.metadata, files_),
                                          .values = state_.values,
                                          .tensors = layout_.tensors,
                                          .files = entries()});
    tier_.publish(index_);
  }

 private:
  /// All files with the checksums that their writers took.
  std::vector<FileEntry> entries() const {
    FileEntry state{.name = state_name, .bytes = layout_.bytes, .piece_bytes = piece_bytes_for(layout_.bytes)};
    std::vector<std::vector<FileEntry>> users;
    std::vector<std::size_t> taken(written_.size(), 0);  // of each rank's checksums
    for (const int writer : writers_) {
      const auto rank = static_cast<std::size_t>(writer);
      state.crc32.push_back(written_[rank][0].at(taken[rank]++).get<std::uint32_t>());
    }
    for (const auto& of_rank : written_) users.push_back(of_rank[1]);
    auto files = merge_files(users);
    files.push_back(std::move(state));
    return files;
  }

  const Communicator& communicator_;
  const Rank here_;
  Tier& tier_;
  const int index_;
  const Contents& contents_;
  std::vector<UserFiles> files_;   // of each rank
  std::set<std::string> drifted_;  // tensors of which rank 0's are written
  StateDict state_;                // as it is stored
  Layout layout_;
  std::vector<int> writers_;   // of each piece of state.h5
  std::vector<Json> written_;  // by each rank: checksums of its pieces, entries of its files
};

}  // namespace

Store::Store(Communicator communicator, std::filesystem::path run, CheckpointConfig config)
    : communicator_(std::move(communicator)), tier_(std::move(run)), config_(std::move(config)) {
  if (config_.num_to_keep.value_or(1) < 1)
    throw Error(ExitCode::usage, "keeping checkpoints",
                "num_to_keep is " + std::to_string(*config_.num_to_keep) + ", and the newest always stays",
                "Give 1 or more, or leave it out to keep all");
  next_index_ = std::stoi(on_root(communicator_, [&] {
    const auto next = tier_.list().next_index;  // before what is unfinished goes: its indices count
    tier_.remove_unfinished();
    return std::to_string(next);
  }));
}

Checkpoint Store::commit(const Contents& contents) {
  Save save(communicator_, here(), tier_, next_index_, contents);
  try {
    save.compare();
    save.write();
    on_root(communicator_, [&] {
      save.publish();
      prune();
    });
  } catch (...) {
    if (here().rank == 0) tier_.abandon(next_index_);
    throw;
  }
  return as_this_rank(Checkpoint(tier_.published(next_index_++)));
}

void Store::prune() const noexcept {
  if (!config_.num_to_keep) return;
  try {
    const auto rollbacks = read_rollbacks(tier_.folder());
    std::vector<Scored> checkpoints;
    for (const auto& [index, path] : tier_.list().published) try {
        checkpoints.push_back({index, score_of(read_manifest(path).metrics, config_.checkpoint_score_attribute),
                               rolled_back(rollbacks, index)});
      } catch (const Error&) {
        // Damaged: it does not count, and whoever resumes next will look at it.
      }
    for (const int index : surplus(std::move(checkpoints), config_)) tier_.remove(index);
  } catch (const std::exception& error) {
    log::warn(std::string("removing old checkpoints: ") + error.what());
  }
}

}  // namespace muster::detail::checkpoint
