// The state in one save: compares it between the ranks, lays it out, and writes it to state.h5.
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

/// The state's part of a Save, which calls these functions in the order of its own.
class StateSave {
 public:
  /// `contents` must outlive this.
  explicit StateSave(CheckpointContents& contents);

  /// Checks that a file can hold the state. Returns what must be equal on all ranks. Not collective.
  Json outline() const;
  /// Compares names, shapes and JSON values between ranks, but not the values of tensors; lays the file out; and sends
  /// per-rank tensors to the ranks that write them. `outlines`: outline() of all ranks. `last`: the layout of the
  /// previous save, the same on all ranks, or an empty one; it is replaced by this save's layout. Collective.
  void prepare(const Communicator& communicator, const std::vector<Json>& outlines, Layout& last);
  /// Compares the values of tensors and takes a snapshot. The state may change afterwards. Collective.
  void take_snapshot(const Communicator& communicator, Snapshot& snapshot);
  /// Writes state.h5, each piece by the rank that the plan names. Without a snapshot it also compares the values of
  /// tensors, while it waits for the disk. Of a tensor that has drifted, rank 0's copy is stored. Collective.
  void write(const Communicator& communicator, StateWriter& writer, const OpenFile& open);

  std::uint64_t file_bytes() const noexcept { return layout_.bytes; }
  /// Returns the pieces of state.h5 that `rank` writes.
  std::vector<std::uint64_t> pieces_of(int rank) const { return checkpoint::pieces_of(writers_, rank); }
  /// Adds the state and its file, with the checksums that its writers computed.
  void add_to(Manifest& manifest) const;

 private:
  /// Finds the tensors that have drifted, once; see state::find_drift().
  void find_drift(const Communicator& communicator);
  void write_drifted(const Communicator& communicator, StateWriter& writer, const OpenFile& open);
  std::vector<std::uint64_t> drifted_pieces() const;
  void give_drifted_to_rank_0(const Communicator& communicator);

  CheckpointContents& contents_;
  Tensors tensors_;                               // includes the random state
  std::set<std::string> per_rank_;                // names of the per-rank tensors
  Json values_;                                   // as stored, gathered from all ranks
  std::optional<std::set<std::string>> drifted_;  // names of tensors; set once ranks were found to differ
  bool copied_ = false;
  Layout layout_;
  std::vector<int> writers_;              // for each piece of state.h5, the rank that writes it
  std::vector<FileBytes> rows_;           // bytes of per-rank tensors that this rank writes
  std::vector<std::uint32_t> checksums_;  // one per piece; only rank 0's are stored
};

}  // namespace muster::detail::checkpoint
