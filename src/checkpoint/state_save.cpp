#include "checkpoint/state_save.hpp"

#include "checkpoint/files/write_plan.hpp"
#include "checkpoint/save.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "state/replica_fingerprint.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;
namespace {

bool all_equal(const auto& values) {
  return std::ranges::all_of(values, [&](const auto& value) { return value == values.front(); });
}

}  // namespace

StateSave::StateSave(CheckpointContents& contents)
    : contents_(contents),
      tensors_(contents.state.tensors),
      per_rank_(state::per_rank_tensors(contents.state, contents.replication)) {}

Json StateSave::outline() const {
  check_storable(tensors_);
  if (tensors_.contains(random_name))
    throw Error(ExitCode::usage, "saving the state", "an entry is named \"random\", which muster uses itself",
                "Give it another name");
  return {{"structure", state::structure_fingerprint(contents_.state, contents_.replication)},
          {"random_bytes", contents_.random_state.size()}};
}

void StateSave::find_drift(const Communicator& communicator) {
  if (!drifted_) drifted_ = state::find_drift(communicator, contents_.state, contents_.replication);
}

void StateSave::prepare(const Communicator& communicator, const std::vector<Json>& outlines, Layout& last) {
  const auto differ = [&](const char* key) {
    return std::ranges::any_of(outlines, [&](const Json& one) { return one.at(key) != outlines.front().at(key); });
  };
  if (differ("structure")) find_drift(communicator);
  if (differ("random_bytes"))
    throw Error(ExitCode::usage, "saving the random state", "it is not as long on every rank",
                "Give the same number of bytes on every rank");
  values_ = state::gather_values(&communicator, contents_.state, contents_.replication);
  const auto& bytes = contents_.random_state;
  auto random = at::empty({static_cast<std::int64_t>(bytes.size())}, at::TensorOptions(at::kByte));
  std::ranges::copy(bytes, static_cast<char*>(random.mutable_data_ptr()));
  tensors_.emplace(random_name, std::move(random));
  per_rank_.insert(random_name);

  // Laying out with HDF5 is slow, and most saves have the layout of the previous save.
  const int ranks = communicator.size();
  const auto new_layout = run_on_root(communicator, [&] {
    return layout_fits(last, tensors_, per_rank_, ranks) ? "" : pack(make_layout(tensors_, per_rank_, ranks));
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
  writers_ = plan_writers(layout_.bytes, piece_owners(layout_, ranks), communicator.topology().node_of_rank);
  rows_ = gather_rows(communicator, layout_, tensors_, writers_);
}

std::vector<std::uint64_t> StateSave::drifted_pieces() const {
  return pieces_of_tensors(layout_.tensors, layout_.bytes, [&](const auto& name) { return drifted_->contains(name); });
}

void StateSave::give_drifted_to_rank_0(const Communicator& communicator) {
  for (const auto piece : drifted_pieces()) writers_[piece] = 0;
  rows_ = gather_rows(communicator, layout_, tensors_, writers_);
}

void StateSave::take_snapshot(const Communicator& communicator, Snapshot& snapshot) {
  const bool known = drifted_.has_value();
  if (known) give_drifted_to_rank_0(communicator);
  const auto take = [&](bool compare) {
    return snapshot.take(layout_, tensors_, pieces_of(communicator.rank()), contents_.snapshots, compare);
  };
  auto taken = take(communicator.size() > 1 && !known);
  if (!known && !all_equal(communicator.all_gather(std::to_string(taken.fingerprint)))) {
    find_drift(communicator);
    give_drifted_to_rank_0(communicator);
    taken = take(false);
  }
  tensors_ = std::move(taken.tensors);
  contents_.state = {};
  contents_.snapshots.clear();
  has_snapshot_ = true;
}

void StateSave::write(const Communicator& communicator, StateWriter& writer, const OpenFile& open) {
  std::vector<std::uint64_t> fingerprints;
  std::vector<std::vector<std::uint32_t>> by_rank;
  for (const auto& rank : run_on_all(communicator, [&] {
         std::optional<state::ReplicaFingerprint> fingerprint;
         std::function<bool()> meanwhile;
         if (!has_snapshot_ && communicator.size() > 1) {
           fingerprint.emplace(state::replicated_tensors(contents_.state, contents_.replication));
           meanwhile = [&] { return fingerprint->advance(); };
         }
         const auto checksums = writer.write(open, layout_, tensors_, pieces_of(communicator.rank()), rows_, meanwhile);
         return Json::array({checksums, fingerprint ? fingerprint->value() : 0});
       })) {
    by_rank.push_back(rank[0]);
    fingerprints.push_back(rank[1]);
  }
  std::vector<std::size_t> taken(by_rank.size(), 0);
  for (const int writer_rank : writers_) {
    const auto rank = static_cast<std::size_t>(writer_rank);
    checksums_.push_back(by_rank[rank].at(taken[rank]++));
  }
  if (has_snapshot_) return;
  if (!all_equal(fingerprints)) find_drift(communicator);
  if (drifted_ && !drifted_->empty()) write_drifted(communicator, writer, open);
}

void StateSave::write_drifted(const Communicator& communicator, StateWriter& writer, const OpenFile& open) {
  give_drifted_to_rank_0(communicator);
  run_on_root(communicator, [&] {
    const auto pieces = drifted_pieces();
    const auto checksums = writer.write(open, layout_, tensors_, pieces, rows_);
    for (std::size_t i = 0; i < pieces.size(); ++i) checksums_[pieces[i]] = checksums[i];
  });
}

void StateSave::add_to(Manifest& manifest) const {
  manifest.values = values_;
  manifest.per_rank = state::per_rank_entries(values_, contents_.replication);
  manifest.tensors = layout_.tensors;
  manifest.files.push_back({.name = state_name,
                            .bytes = layout_.bytes,
                            .piece_bytes = piece_bytes_for(layout_.bytes),
                            .piece_checksums = checksums_});
}

}  // namespace muster::detail::checkpoint
