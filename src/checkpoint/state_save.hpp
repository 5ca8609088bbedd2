// The state in one save: it is compared between the ranks, laid out in a file, and written to state.h5.
#pragma once

#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/snapshot.hpp"
#include "checkpoint/files/state_file.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "muster/communicator.hpp"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint {

struct CheckpointContents;

/// The state's part of a Save. Save calls prepare(), take_snapshot() and write() from its functions of these names.
class StateSave {
 public:
  /// `contents` must outlive this object.
  explicit StateSave(CheckpointContents& contents);

  /// Throws an Error if a file cannot hold the state. Returns a description that prepare() compares between the ranks.
  /// Not collective.
  Json outline() const;
  /// Compares names, shapes and JSON values between ranks, but not the values of tensors; lays the file out; sends
  /// per-rank tensors to the ranks that write them. `outlines`: outline() of all ranks. `last`: the layout of the
  /// previous save, the same on all ranks, or an empty layout; it is replaced by this save's layout. Collective.
  void prepare(const Communicator& communicator, const std::vector<Json>& outlines, Layout& last);
  /// Compares the values of tensors and copies this rank's part. Afterwards the program may change the state.
  /// Collective.
  void take_snapshot(const Communicator& communicator, Snapshot& snapshot);
  /// Writes state.h5; plan_writers() has decided which rank writes which piece. If there is no snapshot, it also
  /// compares the values of tensors while it waits for the disk. If a replicated tensor differs between ranks, rank 0's
  /// copy is stored. Collective.
  void write(const Communicator& communicator, StateWriter& writer, const OpenFile& open);

  std::uint64_t file_bytes() const noexcept { return layout_.bytes; }
  /// Returns the pieces of state.h5 that `rank` writes.
  std::vector<std::uint64_t> pieces_of(int rank) const { return checkpoint::pieces_of(writers_, rank); }
  /// Adds to the manifest: the state's values and tensors, and the file state.h5 with the checksums that its writers
  /// have computed.
  void add_to(Manifest& manifest) const;

 private:
  /// Finds the replicated tensors that differ between ranks (state::find_drift()). Does nothing in later calls.
  void find_drift(const Communicator& communicator);
  void write_drifted(const Communicator& communicator, StateWriter& writer, const OpenFile& open);
  std::vector<std::uint64_t> drifted_pieces() const;
  void give_drifted_to_rank_0(const Communicator& communicator);

  CheckpointContents& contents_;
  Tensors tensors_;                 // of the state, and the random state
  std::set<std::string> per_rank_;  // names of the per-rank tensors
  Json values_;                     // gathered from all ranks, as the manifest stores them
  // Names of tensors that differ between ranks; none before find_drift().
  std::optional<std::set<std::string>> drifted_;
  bool has_snapshot_ = false;
  Layout layout_;
  std::vector<int> writers_;              // for each piece of state.h5, the rank that writes it
  std::vector<FileBytes> rows_;           // bytes of per-rank tensors that this rank writes
  std::vector<std::uint32_t> checksums_;  // of all pieces of state.h5; rank 0 puts its list into the manifest
};

}  // namespace muster::detail::checkpoint
