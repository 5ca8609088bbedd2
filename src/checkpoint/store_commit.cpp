// Saving: what the ranks hold is compared, written by all, published by rank 0, and old checkpoints are pruned.
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/user_files.hpp"
#include "checkpoint/files/write_plan.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/store.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <future>
#include <map>
#include <optional>
#include <set>

namespace muster::detail::checkpoint {

using comm::on_all;
using comm::on_root;
namespace {

bool all_equal(const auto& values) {
  return std::ranges::all_of(values, [&](const auto& value) { return value == values.front(); });
}

/// One save, by its steps. Collective.
class Save {
 public:
  Save(const Communicator& communicator, Rank here, Tier& tier, StateWriter& writer, int index,
       const Contents& contents)
      : communicator_(communicator),
        here_(here),
        tier_(tier),
        writer_(writer),
        index_(index),
        contents_(contents),
        tensors_(contents.state.tensors),
        per_rank_(per_rank_tensors(contents.state, contents.replication)) {}

  /// What each rank has, but for the numbers in its tensors, before anything is written.
  void compare() {
    std::vector<std::uint64_t> outlines;
    std::vector<std::size_t> random_bytes;
    for (const auto& text : on_all(communicator_, [&] {
           const auto mine = list_user_files(contents_.directory);
           check_storable(tensors_);
           if (tensors_.contains(random_name))
             throw Error(ExitCode::usage, "saving the state", "an entry is called random", "Give it another name");
           return Json::array({mine.names, mine.metadata, outline(contents_.state, contents_.replication),
                               contents_.random_state.size()})
               .dump();
         })) {
      const auto rank = Json::parse(text);
      files_.push_back({.names = rank[0], .metadata = rank[1]});
      outlines.push_back(rank[2]);
      random_bytes.push_back(rank[3]);
    }
    if (!all_equal(outlines)) drifted_ = find_drift(communicator_, contents_.state, contents_.replication);
    if (!all_equal(random_bytes))
      throw Error(ExitCode::usage, "saving the random state", "it is not as long on every rank",
                  "Give as many bytes on every rank");
    values_ = gather_values(&communicator_, contents_.state, contents_.replication);
    auto random = at::empty({static_cast<std::int64_t>(random_bytes.front())}, at::TensorOptions(at::kByte));
    std::ranges::copy(contents_.random_state, static_cast<char*>(random.mutable_data_ptr()));
    tensors_.emplace(random_name, std::move(random));
    per_rank_.insert(random_name);
  }

  /// Rank 0 lays out, those that the plan names write, and meanwhile all look at the numbers in their tensors: rank 0's
  /// are what is stored of a tensor that has drifted.
  void write() {
    const auto folder = tier_.saving(index_), path = folder / state_name;
    layout_ = unpack_layout(on_root(communicator_, [&] {
      tier_.begin(index_);
      const auto layout = lay_out(tensors_, per_rank_, here_.size);
      create_state_file(path, layout);
      return pack(layout);
    }));
    on_all(communicator_, [&] { return check_layout(layout_, tensors_), std::string(); });
    writers_ = plan_writers(layout_.bytes, piece_owners(layout_, here_.size), communicator_.topology().node_of_rank);
    const auto rows = gather_rows(communicator_, layout_, tensors_, writers_);
    const auto owners = owners_of(files_);
    std::vector<std::uint64_t> fingerprints;
    for (const auto& text : on_all(communicator_, [&] {
           auto number = std::async(std::launch::async, [&] {
             return here_.size > 1 ? fingerprint(contents_.state, contents_.replication) : 0;
           });
           auto written = Json::array(
               {writer_.write(path, layout_, tensors_, pieces_of(writers_, here_.rank), rows), Json::array()});
           for (const auto& name : files_[static_cast<std::size_t>(here_.rank)].names)
             written[1].push_back(owners.at(name) == here_.rank ? copy_file(*contents_.directory, name, folder)
                                                                : checksum_file(*contents_.directory, name));
           written.push_back(number.get());
           return written.dump();
         })) {
      written_.push_back(Json::parse(text));
      fingerprints.push_back(written_.back()[2]);
    }
    if (!drifted_ && !all_equal(fingerprints))
      drifted_ = find_drift(communicator_, contents_.state, contents_.replication);
    if (!drifted_ || drifted_->empty()) return;
    write_again(
        path, pieces_with(layout_.tensors, layout_.bytes, [&](const auto& name) { return drifted_->contains(name); }));
  }

  /// All have written: what is in the checkpoint gets its manifest and its name. Rank 0 alone.
  void publish() {
    write_manifest(tier_.saving(index_), {.index = index_,
                                          .time = time_now(),
                                          .world_size = here_.size,
                                          .progress = contents_.progress,
                                          .metrics = contents_.metrics,
                                          .metadata = merge_metadata(contents_.metadata, files_),
                                          .values = values_,
                                          .tensors = layout_.tensors,
                                          .files = entries()});
    tier_.publish(index_);
  }

 private:
  /// These pieces are rank 0's after all.
  void write_again(const std::filesystem::path& path, const std::vector<std::uint64_t>& pieces) {
    auto writers = writers_;
    for (const auto piece : pieces) writers[piece] = 0;
    const auto rows = gather_rows(communicator_, layout_, tensors_, writers);
    on_root(communicator_, [&] {
      const auto checksums = writer_.write(path, layout_, tensors_, pieces, rows);
      for (std::size_t i = 0; i < pieces.size(); ++i) written_again_.emplace(pieces[i], checksums[i]);
    });
  }

  /// All files with the checksums that their writers took.
  std::vector<FileEntry> entries() const {
    FileEntry state{.name = state_name, .bytes = layout_.bytes, .piece_bytes = piece_bytes_for(layout_.bytes)};
    std::vector<std::vector<FileEntry>> users;
    std::vector<std::size_t> taken(written_.size(), 0);  // of each rank's checksums
    for (const int writer : writers_) {
      const auto rank = static_cast<std::size_t>(writer);
      state.crc32.push_back(written_[rank][0].at(taken[rank]++).get<std::uint32_t>());
    }
    for (const auto& [piece, checksum] : written_again_) state.crc32[piece] = checksum;
    for (const auto& of_rank : written_) users.push_back(of_rank[1]);
    auto files = merge_files(users);
    files.push_back(std::move(state));
    return files;
  }

  const Communicator& communicator_;
  const Rank here_;
  Tier& tier_;
  StateWriter& writer_;
  const int index_;
  const Contents& contents_;
  Tensors tensors_;                               // with the random state
  std::set<std::string> per_rank_;                // of these
  Json values_;                                   // as they are stored
  std::vector<UserFiles> files_;                  // of each rank
  std::optional<std::set<std::string>> drifted_;  // tensors, where anything is not alike
  Layout layout_;
  std::vector<int> writers_;   // of each piece of state.h5
  std::vector<Json> written_;  // by each rank: checksums of its pieces, entries of its files, its fingerprint
  std::map<std::uint64_t, std::uint32_t> written_again_;  // checksums by piece
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
  Save save(communicator_, here(), tier_, writer_, next_index_, contents);
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
