// A checkpoint is a directory: manifest.json, state.h5 and the user's own files.
#pragma once

#include <muster/error.hpp>
#include <muster/json.hpp>
#include <muster/state.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace muster {

namespace detail::checkpoint {
class Store;
}

/// What Checkpoint::from_dict takes under a name: an object as a StateEntry refers to it, or the value itself.
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
            return copy_of(static_cast<double>(value));  // which may be infinite, and JSON may not
          else
            return copy_of(Json(std::forward<T>(value)));
        }()) {}

  const StateEntry& entry() const noexcept { return entry_; }

 private:
  template <class T>
  static StateEntry copy_of(T value) {
    auto copy =
        std::make_shared<std::pair<T, std::shared_ptr<detail::checkpoint::Stateful>>>(std::move(value), nullptr);
    copy->second = StateEntry(copy->first).object();
    return StateEntry(std::shared_ptr<detail::checkpoint::Stateful>(copy, copy->second.get()));
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

/// A handle to a directory; copies are cheap.
class Checkpoint {
 public:
  /// An existing directory. It need not have been written by muster.
  static Checkpoint from_directory(std::filesystem::path path);
  /// A new temporary directory with these entries in its state.h5, this rank's alone, removed with this handle's last
  /// copy.
  static Checkpoint from_dict(const CheckpointDict& dict);

  const std::filesystem::path& path() const noexcept { return path_; }
  /// The directory, for reading.
  const std::filesystem::path& as_directory() const noexcept { return path_; }
  /// A copy of everything under `path`, which is made, by several ranks at once too. Another file there is an Error.
  void to_directory(const std::filesystem::path& path) const;
  /// Everything in state.h5 as tensors on the CPU, and the JSON values. Verifies checksums. What each rank had of its
  /// own (per_rank) is there of all ranks: tensors as [world, …], values as a list.
  StateDict to_dict() const;
  /// Loads the entry of that name ("model") into `entry`; names, shapes and types are compared first, and nothing is
  /// changed if they differ. Through per_rank this rank's part is loaded, from a checkpoint that from_dict() or the
  /// session gave; a directory's own handle does not know which rank this is, and refuses.
  void load(const std::string& name, const StateEntry& entry) const;

  /// JSON that travels with the checkpoint; an empty object where there is none. Reported, a checkpoint's metadata is
  /// merged with the trainer's and with other ranks'; a key that several have is the user's, of the lowest rank.
  Json get_metadata() const;
  void set_metadata(const Json& metadata) const;

 private:
  friend class detail::checkpoint::Store;
  explicit Checkpoint(std::filesystem::path path, std::shared_ptr<void> owner = {});
  std::filesystem::path path_;
  std::shared_ptr<void> owner_;
  int rank_ = 0, ranks_ = 0;  // to whom it was handed out; of no ranks where that is not known
};

/// How far a checkpoint of a run has come; "checkpoint_status" in the row of a report that asked for a validation has
/// it by these names.
enum class CheckpointStatus {
  committed,  ///< and no validation was asked for
  pending_validation,
  validated,
  validation_timeout,
  validation_failed,
};

/// What `muster checkpoint ls` shows of one.
struct CheckpointInfo {
  std::filesystem::path path;
  int index = 0;
  std::int64_t training_iteration = 0;
  std::int64_t epoch = 0;
  int world_size = 0;
  std::uint64_t bytes = 0;
  std::string time = {};  ///< UTC, ISO 8601
  Json metrics = {};      ///< those of its report and of its validation
  CheckpointStatus status = CheckpointStatus::committed;
  std::string problem = {};  ///< empty if it is whole: manifest and file sizes (ls), all checksums too (verify)
  /// Of the problem: data if the checkpoint is damaged, retry if it could not be read, which says nothing about it.
  ExitCode code = ExitCode::done;
};

/// The checkpoints under a run's directory, oldest first.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& run);
/// One checkpoint with every checksum recomputed.
CheckpointInfo verify_checkpoint(const std::filesystem::path& checkpoint);

}  // namespace muster
