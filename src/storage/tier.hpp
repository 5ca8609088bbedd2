// A tier is a place where a run's checkpoints lie. It writes the files of a checkpoint, and publishes, lists, names and
// removes whole checkpoints. It knows neither ranks nor the content of checkpoints. FolderTier is a folder of a file
// system. Another place, such as object storage, needs another class derived from Tier, which tier_of() must return for
// the paths of that place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::storage {

/// A file of a checkpoint that is being saved. Several ranks write to it at once, each to its own bytes.
class SavedFile {
 public:
  virtual ~SavedFile() = default;
  virtual void write_at(std::span<const std::byte> from, std::uint64_t offset) = 0;
  /// Returns when everything that was written through this object is durable. Called once, at the end.
  virtual void finish() = 0;
};

/// How a writer of a SavedFile aligns its writes. With `direct`, addresses, offsets and lengths are multiples of
/// direct_alignment (base/direct.hpp), so that the writes can bypass the page cache.
enum class Alignment { any, direct };

/// The interface of a tier. Not copyable, since a tier keeps data between begin() and publish().
class Tier {
 public:
  static constexpr int max_index = 999'999'999;

  /// The checkpoints of the tier.
  struct Listing {
    std::map<int, std::filesystem::path> published;     ///< by index
    std::multimap<int, std::filesystem::path> damaged;  ///< by index
    std::vector<std::filesystem::path> unfinished;      ///< interrupted saves and removals
    std::vector<std::filesystem::path> others;          ///< links and files with the name of a published checkpoint
    std::set<int> indices;                              ///< of all of the above; new checkpoints must not get them
  };

  explicit Tier(std::filesystem::path folder) : folder_(std::move(folder)) {}
  virtual ~Tier() = default;
  Tier(const Tier&) = delete;
  Tier& operator=(const Tier&) = delete;

  /// The run's folder, which also holds the run's other files; for a fast tier, the folder of a node.
  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Returns the name of a published checkpoint.
  static std::string name_of(int index);
  /// Returns the index in the name of a published checkpoint; none if it is not such a name.
  static std::optional<int> index_of(const std::string& name);
  /// Returns the folder from which a published checkpoint is read.
  std::filesystem::path published(int index) const { return folder_ / name_of(index); }

  virtual Listing list() const = 0;

  // Saving. Readers see nothing of a checkpoint before publish().
  /// Begins a checkpoint, which only this user can access until publish(). First removes the remains of an interrupted
  /// save with this index.
  virtual void begin(int index) = 0;
  /// Creates a file of the checkpoint, `bytes` long and without content; `name` may contain folders. Throws an Error
  /// (ExitCode::retry) if the tier can find out that there is no space for the file.
  virtual void create(int index, const std::string& name, std::uint64_t bytes) const = 0;
  /// Opens a file of the checkpoint; another rank may have created it.
  virtual std::unique_ptr<SavedFile> open(int index, const std::string& name, Alignment alignment) const = 0;
  /// Creates a small file of the checkpoint with this content, durably.
  void put(int index, const std::string& name, std::string_view content) const;
  /// Makes the checkpoint visible under its published name, durably and with the permissions that the umask asks for.
  /// All its files must be finished. Throws an Error, and does not publish, if that name exists or the files cannot be
  /// made durable.
  virtual void publish(int index) const = 0;
  /// Removes a checkpoint that was begun and will not be published. Does nothing if there is none.
  virtual void abandon(int index) const noexcept = 0;

  /// Moves a published checkpoint to a name that readers do not look for, and returns its new path.
  virtual std::filesystem::path quarantine(int index) const = 0;
  /// Moves a checkpoint from the path that quarantine() gave it back to its published name. Returns false if that name
  /// is taken.
  virtual bool unquarantine(int index, const std::filesystem::path& damaged) const = 0;
  /// Removes a published checkpoint and its names. If the process is killed meanwhile, the checkpoint is still complete
  /// or is listed as unfinished.
  virtual void remove(int index) const = 0;
  virtual void remove_unfinished() const = 0;

  // Names that reports gave to published checkpoints.
  /// Gives `name` to a published checkpoint, atomically. If another checkpoint has the name, that one loses it. Throws
  /// an Error (ExitCode::retry) if that fails, for example because a file or folder has the name.
  virtual void set_name(int index, const std::string& name) const = 0;
  virtual std::vector<std::string> names(int index) const = 0;
  virtual void remove_name(const std::string& name) const noexcept = 0;

 private:
  std::filesystem::path folder_;
};

/// Returns the tier of a run's folder.
std::unique_ptr<Tier> tier_of(const std::filesystem::path& run);

}  // namespace muster::detail::storage
