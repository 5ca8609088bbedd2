// A checkpoint is a directory: manifest.json, state.h5, the user's own files, and validation.json once it is validated.
#pragma once

#include <muster/detail/export.hpp>
#include <muster/error.hpp>
#include <muster/json.hpp>
#include <muster/state.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

namespace detail::checkpoint {
class CheckpointStore;
}

/// A value for Checkpoint::from_dict: an object to which a StateEntry can refer, or the value itself.
class DictEntry {
 public:
  template <class T>
  requires(!std::same_as<std::remove_cvref_t<T>, DictEntry>) DictEntry(T&& value)
      : entry_([&]() -> StateEntry {
          if constexpr (std::constructible_from<StateEntry, T>)
            return StateEntry(std::forward<T>(value));
          else if constexpr (std::convertible_to<T, at::Tensor>)
            return copy_of(at::Tensor(std::forward<T>(value)));
          else if constexpr (std::floating_point<std::remove_cvref_t<T>>)
            return copy_of(static_cast<double>(value));  // not as JSON, which has no infinity
          else
            return copy_of(Json(std::forward<T>(value)));
        }()) {}

  const StateEntry& entry() const noexcept { return entry_; }

 private:
  template <class T>
  static StateEntry copy_of(T value) {
    auto copy = std::make_shared<std::pair<T, std::shared_ptr<detail::state::Stateful>>>(std::move(value), nullptr);
    copy->second = StateEntry(copy->first).object();
    return StateEntry(std::shared_ptr<detail::state::Stateful>(copy, copy->second.get()));
  }

  StateEntry entry_;
};

/// The entries of Checkpoint::from_dict: {{"model", net}, {"epoch", 3}, {"classes", names}}.
class CheckpointDict {
 public:
  CheckpointDict() = default;
  CheckpointDict(std::initializer_list<std::pair<std::string, DictEntry>> entries) {
    for (const auto& [name, entry] : entries) entries_.emplace_back(name, entry.entry());
  }
  CheckpointDict(StateEntries entries) : entries_(std::move(entries)) {}

  const StateEntries& entries() const noexcept { return entries_; }

 private:
  StateEntries entries_ = {};
};

/// A handle to a checkpoint's directory; copies are cheap. It keeps referring to the directory that was opened: if
/// another directory has its name now, calls throw an Error (ExitCode::retry).
class MUSTER_API Checkpoint {
 public:
  /// Opens an existing directory, which need not have been written by muster. A symbolic link, such as a name that
  /// moves to a newer checkpoint, is resolved now; path() is then the path of its target.
  static Checkpoint from_directory(std::filesystem::path path);
  /// Makes a temporary directory with these entries in its state.h5, for this rank only. It is removed with the last
  /// copy of this handle. If every rank reports one, or starts from one, the ranks' values of a per_rank() entry become
  /// one entry with all of them.
  static Checkpoint from_dict(const CheckpointDict& dict);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Copies everything into the directory `path`, which is created; several ranks may do so at the same time. If there
  /// is a manifest, compares the copy with its checksums, and copies it last. An Error if `path` has a file of the same
  /// name with other contents.
  void to_directory(const std::filesystem::path& path) const;
  /// Returns all entries: their tensors, on the CPU, and JSON values. Verifies checksums. Per-rank entries (per_rank)
  /// have the values of all ranks: tensors as [world, …], other values as a list.
  StateDict to_dict() const;
  /// Loads the entry of that name ("model") into `entry`. Names, shapes and types are compared first; if they differ,
  /// nothing is changed. Through per_rank(), this rank's part is loaded, if the checkpoint came from from_dict() or the
  /// session; a handle made from a directory does not know this rank, and throws.
  void load(const std::string& name, const StateEntry& entry) const;

  /// The checkpoint's JSON metadata; an empty object if it has none. When a checkpoint is reported, its metadata is
  /// merged with the trainer's and with other ranks'. If a key comes several times, a checkpoint's value counts before
  /// the trainer's, and a lower rank's before a higher rank's.
  Json get_metadata() const;
  void set_metadata(const Json& metadata);

 private:
  friend class detail::checkpoint::CheckpointStore;
  explicit Checkpoint(std::filesystem::path path, std::shared_ptr<void> owner = {});
  std::filesystem::path path_;
  std::shared_ptr<void> owner_;
  std::pair<std::uint64_t, std::uint64_t> folder_;  // device and inode of the directory; zeros: unknown
  int rank_ = 0, ranks_ = 0;                        // this rank, and the number of ranks; 0 ranks: unknown
};

/// The status of a run's checkpoint. In the row of a report that asked for a validation, "checkpoint_status" has one of
/// these names other than `committed`.
enum class CheckpointStatus {
  committed,  ///< no validation was asked for
  pending_validation,
  validated,
  validation_timeout,
  validation_failed,
};

/// What `muster checkpoint ls` shows about a checkpoint.
struct CheckpointInfo {
  std::filesystem::path path;
  int index = 0;
  std::int64_t training_iteration = 0;
  std::int64_t epoch = 0;
  int world_size = 0;
  std::uint64_t bytes = 0;
  std::string time = {};  ///< when it was saved: UTC, ISO 8601
  Json metrics = {};      ///< the metrics of its report and of its validation
  CheckpointStatus status = CheckpointStatus::committed;
  std::string problem = {};  ///< empty if it is complete; checksums are compared by verify_checkpoint() only
  /// The code of the problem: data if the checkpoint is damaged, retry if it could not be read and may be whole.
  ExitCode code = ExitCode::done;
};

/// Lists the checkpoints in a run's directory, oldest first, and looks for problems in their manifests and file sizes.
/// Checkpoints that a start has found damaged and renamed to `….damaged` are among them, with a `problem`.
MUSTER_API std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& run);
/// Describes one checkpoint after recomputing every checksum.
MUSTER_API CheckpointInfo verify_checkpoint(const std::filesystem::path& checkpoint);

}  // namespace muster
