#include "checkpoint/save.hpp"

#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/write_plan.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "state/replica_fingerprint.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;
namespace {

bool all_equal(const auto& values) {
  return std::ranges::all_of(values, [&](const auto& value) { return value == values.front(); });
}

}  // namespace

Save::Save(CheckpointContents contents, int index, const Communicator& ranks, StateWriter& writer)
    : contents_(std::move(contents)),
      index_(index),
      rank_(ranks.rank()),
      ranks_(ranks.size()),
      writer_(writer),
      tensors_(contents_.state.tensors),
      per_rank_(state::per_rank_tensors(contents_.state, contents_.replication)) {}

void Save::compare(const Communicator& communicator) {
  std::vector<std::uint64_t> outlines;
  std::vector<std::size_t> random_bytes;
  for (const auto& rank : run_on_all(communicator, [&] {
         const auto mine = list_user_files(contents_.directory);
         check_storable(tensors_);
         if (tensors_.contains(random_name))
           throw Error(ExitCode::usage, "saving the state", "an entry is named \"random\", which muster uses itself",
                       "Give it another name");
         return Json::array({mine.names, mine.metadata,
                             state::structure_fingerprint(contents_.state, contents_.replication),
                             contents_.random_state.size()});
       })) {
    files_.push_back({.names = rank[0], .metadata = rank[1]});
    outlines.push_back(rank[2]);
    random_bytes.push_back(rank[3]);
  }
  if (!all_equal(outlines)) find_drift(communicator);
  if (!all_equal(random_bytes))
    throw Error(ExitCode::usage, "saving the random state", "it is not as long on every rank",
                "Give the same number of bytes on every rank");
  values_ = state::gather_values(&communicator, contents_.state, contents_.replication);
  auto random = at::empty({static_cast<std::int64_t>(random_bytes.front())}, at::TensorOptions(at::kByte));
  std::ranges::copy(contents_.random_state, static_cast<char*>(random.mutable_data_ptr()));
  tensors_.emplace(random_name, std::move(random));
  per_rank_.insert(random_name);
}

void Save::find_drift(const Communicator& communicator) {
  if (!drifted_) drifted_ = state::find_drift(communicator, contents_.state, contents_.replication);
}

void Save::prepare(const Communicator& communicator, Layout& last) {
  compare(communicator);
  // Laying out with HDF5 is slow, and most saves have the same layout as the previous one.
  const auto new_layout = run_on_root(communicator, [&] {
    return layout_fits(last, tensors_, per_rank_, ranks_) ? "" : pack(make_layout(tensors_, per_rank_, ranks_));
  });
  try {
    run_on_all(communicator, [&] {
      if (!new_layout.empty()) last = unpack_layout(new_layout);
      check_layout(last, tensors_);
    });
  } catch (...) {
    last = {};
    throw;
  }
  layout_ = last;
  writers_ = plan_writers(layout_.bytes, piece_owners(layout_, ranks_), communicator.topology().node_of_rank);
  rows_ = gather_rows(communicator, layout_, tensors_, writers_);
}

void Save::open(const Communicator& communicator, SaveTarget& target) {
  if (std::exchange(opened_, true)) return;
  run_on_all(communicator, [&] {
    if (target.is_leader) {
      target.tier->begin(index_);
      target.tier->create(index_, state_name, layout_.bytes);
    }
  });
}

void Save::copy_files(const Communicator& communicator, SaveTarget& target) {
  copied_files_.resize(static_cast<std::size_t>(ranks_));
  if (std::ranges::all_of(files_, [](const UserFiles& files) { return files.names.empty(); })) return;
  open(communicator, target);
  copied_files_.clear();
  const auto owners = owners_of(files_);
  for (auto& copied_files : run_on_all(communicator, [&] {
         auto copied = Json::array();
         for (const auto& name : files_[static_cast<std::size_t>(rank_)].names)
           copied.push_back(owners.at(name) == rank_ ? copy_file(*contents_.directory, name, *target.tier, index_)
                                                     : checksum_file(*contents_.directory, name));
         return copied;
       }))
    copied_files_.push_back(std::move(copied_files));
}

std::vector<std::uint64_t> Save::drifted_pieces() const {
  return pieces_of_tensors(layout_.tensors, layout_.bytes, [&](const auto& name) { return drifted_->contains(name); });
}

void Save::give_drifted_to_rank_0(const Communicator& communicator) {
  for (const auto piece : drifted_pieces()) writers_[piece] = 0;
  rows_ = gather_rows(communicator, layout_, tensors_, writers_);
}

void Save::take_snapshot(const Communicator& communicator, Snapshot& snapshot) {
  const bool known = drifted_.has_value();
  if (known) give_drifted_to_rank_0(communicator);
  auto taken = snapshot.take(layout_, tensors_, pieces(), contents_.snapshots, ranks_ > 1 && !known);
  if (!known && !all_equal(communicator.all_gather(std::to_string(taken.fingerprint)))) {
    find_drift(communicator);
    give_drifted_to_rank_0(communicator);
    taken = snapshot.take(layout_, tensors_, pieces(), contents_.snapshots, false);
  }
  tensors_ = std::move(taken.tensors);
  contents_.state = {};
  contents_.snapshots.clear();
  copied_ = true;
}

void Save::write(const Communicator& communicator, SaveTarget& target) {
  open(communicator, target);
  const OpenFile open_state = [&](storage::Alignment alignment) {
    return target.tier->open(index_, state_name, alignment);
  };
  std::vector<std::uint64_t> fingerprints;
  std::vector<std::vector<std::uint32_t>> by_rank;
  for (const auto& rank : run_on_all(communicator, [&] {
         std::optional<state::ReplicaFingerprint> fingerprint;
         std::function<bool()> meanwhile;
         if (!copied_ && ranks_ > 1) {
           fingerprint.emplace(state::replicated_tensors(contents_.state, contents_.replication));
           meanwhile = [&] { return fingerprint->advance(); };
         }
         const auto checksums = writer_.write(open_state, layout_, tensors_, pieces(), rows_, meanwhile);
         return Json::array({checksums, fingerprint ? fingerprint->value() : 0});
       })) {
    by_rank.push_back(rank[0]);
    fingerprints.push_back(rank[1]);
  }
  std::vector<std::size_t> taken(by_rank.size(), 0);
  for (const int writer : writers_) {
    const auto rank = static_cast<std::size_t>(writer);
    checksums_.push_back(by_rank[rank].at(taken[rank]++));
  }
  if (copied_) return;
  if (!all_equal(fingerprints)) find_drift(communicator);
  if (drifted_ && !drifted_->empty()) write_drifted(communicator, open_state);
}

void Save::write_drifted(const Communicator& communicator, const OpenFile& open) {
  give_drifted_to_rank_0(communicator);
  run_on_root(communicator, [&] {
    const auto pieces = drifted_pieces();
    const auto checksums = writer_.write(open, layout_, tensors_, pieces, rows_);
    for (std::size_t i = 0; i < pieces.size(); ++i) checksums_[pieces[i]] = checksums[i];
  });
}

void Save::publish(const Communicator& communicator, SaveTarget& target) {
  if (!target.is_per_node)
    return run_on_root(communicator, [&] {
      write_manifest(*target.tier, manifest_ = make_manifest());
      target.tier->publish(index_);
    });
  // All nodes store rank 0's manifest.
  manifest_ = from_text(run_on_root(communicator, [&] { return to_text(make_manifest()); }), "the manifest");
  run_on_all(communicator, [&] {
    if (target.is_leader) {
      write_manifest(*target.tier, manifest_);
      target.tier->publish(index_);
    }
  });
}

Manifest Save::make_manifest() const {
  return {.index = index_,
          .time = time_now(),
          .world_size = ranks_,
          .progress = contents_.progress,
          .metrics = contents_.metrics,
          .metadata = merge_metadata(contents_.metadata, files_),
          .values = values_,
          .per_rank = state::per_rank_entries(values_, contents_.replication),
          .tensors = layout_.tensors,
          .files = entries()};
}

std::vector<FileEntry> Save::entries() const {
  FileEntry state{.name = state_name,
                  .bytes = layout_.bytes,
                  .piece_bytes = piece_bytes_for(layout_.bytes),
                  .piece_checksums = checksums_};
  auto files = merge_files(copied_files_);
  files.push_back(std::move(state));
  return files;
}

std::vector<std::string> Save::files() const {
  std::vector<std::string> names;
  for (const auto& [name, owner] : owners_of(files_))
    if (owner == rank_) names.push_back(name);
  return names;
}

}  // namespace muster::detail::checkpoint
