#include "muster/checkpoint.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/temporary.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/write_plan.hpp"
#include "muster/error.hpp"
#include "state/collect.hpp"
#include "state/replication.hpp"
#include "storage/folder_tier.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace muster {
namespace {

namespace fs = std::filesystem;
using namespace detail::checkpoint;

constexpr const char* metadata_name = "metadata.json";

bool has_manifest(const fs::path& path) { return fs::exists(detail::status_of(path / manifest_name)); }

/// Opens the folder and locks it. Returns its file descriptor, or −1 on failure. The lock lasts until the descriptor is
/// closed or the process ends.
int open_locked(const fs::path& folder) noexcept {
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0 || ::flock(descriptor, LOCK_EX | LOCK_NB) == 0) return descriptor;
  ::close(descriptor);
  return -1;
}

/// Returns the boot ID of this machine; empty if there is none. The name of a temporary folder contains it, since
/// processes see each other's locks reliably only on one running system.
std::string boot_id() {
  try {
    std::string id(36, '\0');
    detail::File("/proc/sys/kernel/random/boot_id", detail::File::Mode::read)
        .read_at(std::as_writable_bytes(std::span(id)), 0);
    return id;
  } catch (const Error&) {
    return {};
  }
}

/// Removes the temporary folders of this user's processes that were killed.
void remove_abandoned(const fs::path& parent, const std::string& prefix) noexcept try {
  std::error_code error;
  for (fs::directory_iterator at(parent, error), end; !error && at != end; at.increment(error)) {
    struct stat status {};
    if (!at->path().filename().string().starts_with(prefix) || ::lstat(at->path().c_str(), &status) != 0) continue;
    if (!S_ISDIR(status.st_mode) || status.st_uid != ::geteuid()) continue;
    const int descriptor = open_locked(at->path());
    if (descriptor < 0) continue;
    detail::storage::remove_folder(at->path());
    ::close(descriptor);
  }
} catch (const std::exception&) {
  // The next process removes what is left.
}

/// Creates a temporary folder that only this user can access. Returns its path and an owner: the folder is removed when
/// the last copy of the owner is destroyed. If this process is killed, the folder is removed by the next process of
/// this user that calls this function before the machine is started again.
std::pair<fs::path, std::shared_ptr<void>> make_temporary_folder() {
  const auto parent = detail::temporary_parent();
  const auto boot = boot_id(), prefix = "muster-checkpoint-" + boot + (boot.empty() ? "" : "-");
  [[maybe_unused]] static const bool cleaned_up = !boot.empty() && (remove_abandoned(parent, prefix), true);
  auto name = (parent / ("." + prefix + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr)
    throw Error(ExitCode::retry, "making the folder " + name, std::strerror(errno),
                "Set TMPDIR to a folder with space");
  // The folder is locked before it is renamed to a name that remove_abandoned() looks for. If folders cannot be locked
  // here, other processes never remove it.
  const int descriptor = open_locked(name);
  const auto path = parent / fs::path(name).filename().string().substr(1);
  std::shared_ptr<void> owner(nullptr, [path, descriptor](void*) {
    detail::storage::remove_folder(path);
    if (descriptor >= 0) ::close(descriptor);
  });
  try {
    detail::rename_new(name, path);
  } catch (...) {
    detail::storage::remove_folder(name);
    throw;
  }
  return {path, std::move(owner)};
}

/// Calls `write_and_read`, which writes the metadata and reads it back. Turns its exceptions into an Error
/// (ExitCode::usage).
void check_metadata(const fs::path& path, const std::function<void()>& write_and_read) try {
  write_and_read();
} catch (const std::exception& error) {
  throw Error(ExitCode::usage, "setting the metadata of " + path.string(), error.what(),
              "Nothing was changed; give values that JSON can hold");
}

}  // namespace

Checkpoint::Checkpoint(fs::path path, std::shared_ptr<void> owner)
    : path_(std::move(path)), owner_(std::move(owner)), folder_(folder_id(path_)) {}

Checkpoint Checkpoint::from_directory(fs::path path) {
  if (!path.has_filename()) path = path.parent_path();  // drops a trailing slash
  path = without_links(path);
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::none)
    throw Error(detail::read_error_code(error.value()), "opening the checkpoint " + path.string(), error.message(),
                "Check the path and the permissions");
  if (!fs::is_directory(status))
    throw Error(ExitCode::data, "opening the checkpoint " + path.string(), "there is no such directory",
                "Check the path");
  return Checkpoint(std::move(path));
}

Checkpoint Checkpoint::from_dict(const CheckpointDict& dict) {
  const auto& entries = dict.entries();
  const auto state = detail::state::collect(entries);
  const auto replication = detail::state::replication_of(entries);
  check_storable(state.tensors);
  const auto [path, owner] = make_temporary_folder();
  Checkpoint checkpoint(path, owner);
  checkpoint.ranks_ = 1;
  const auto layout = make_layout(state.tensors, detail::state::per_rank_tensors(state, replication));
  const auto state_file = path / state_name;
  detail::storage::create_file(state_file, layout.bytes);
  const OpenFile open = [&](auto alignment) { return detail::storage::open_file(state_file, alignment); };
  FileEntry file{
      .name = state_name,
      .bytes = layout.bytes,
      .piece_bytes = piece_bytes_for(layout.bytes),
      .piece_checksums = StateWriter().write(open, layout, state.tensors,
                                             pieces_of(plan_writers(layout.bytes, piece_owners(layout, 1), {0}), 0))};
  write_manifest(path, {.time = time_now(),
                        .values = detail::state::gather_values(nullptr, state, replication),
                        .per_rank = detail::state::per_rank_entries(state.values, replication),
                        .tensors = layout.tensors,
                        .files = {file}});
  return checkpoint;
}

void Checkpoint::to_directory(const fs::path& path) const {
  detail::make_directories(path);
  const bool is_ours = is_checkpoint(path_);
  const auto wanted = is_ours ? read_manifest(path_).files : std::vector<FileEntry>();
  std::vector<FileEntry> copied;
  for (const auto& name : list_files(path_))
    if (!is_ours || name != manifest_name) copied.push_back(copy_file_unless_there(path_, name, path));
  for (const auto& file : wanted)
    if (const auto copy = std::ranges::find(copied, file.name, &FileEntry::name);
        copy == copied.end() || copy->bytes != file.bytes || copy->piece_checksums != file.piece_checksums)
      throw Error(ExitCode::data, "copying " + (path_ / file.name).string() + " to " + path.string(),
                  "its checksums are not those of the manifest", "Use another checkpoint");
  require_same_folder(path_, folder_);
  if (is_ours) copy_file_unless_there(path_, manifest_name, path);
  detail::storage::sync_folders(path);
}

StateDict Checkpoint::to_dict() const {
  const auto manifest = read_manifest(path_);
  verify_sizes(path_, manifest);
  StateDict all{.tensors = read_tensors(path_, manifest, [](const auto& name) { return name != random_name; }),
                .values = manifest.values};
  detail::state::take_gradients(all, manifest.world_size);
  require_same_folder(path_, folder_);
  return all;
}

void Checkpoint::load(const std::string& name, const StateEntry& entry) const {
  const auto manifest = read_manifest(path_);
  verify_sizes(path_, manifest);
  const auto wanted = [&](const std::string& path) { return detail::state::entry_name_of(path) == name; };
  StateDict all{.tensors = {}, .values = manifest.values};
  if (const auto& file = manifest.state_file(); const auto mapped = MappedState::open(path_, file)) {
    mapped->verify(pieces_of_tensors(manifest.tensors, file.bytes, wanted));
    all.tensors = mapped->tensors(manifest);
  } else {
    all.tensors = read_tensors(path_, manifest, wanted);
  }
  require_same_folder(path_, folder_);
  detail::state::restore({{name, entry}}, detail::state::select_entry(all, name),
                         detail::state::RankInGroup{rank_, ranks_}, manifest.per_rank);
}

Json Checkpoint::get_metadata() const {
  const auto file = path_ / metadata_name;
  auto metadata = has_manifest(path_)                   ? read_manifest(path_).metadata
                  : fs::exists(detail::status_of(file)) ? detail::read_json(file)
                                                        : Json::object();
  require_same_folder(path_, folder_);
  return metadata;
}

void Checkpoint::set_metadata(const Json& metadata) {
  std::string text;
  if (!has_manifest(path_)) {
    check_metadata(path_,
                   [&] { detail::parse_json(text = detail::json_text(metadata, 2) + "\n", "reading it again"); });
    require_same_folder(path_, folder_);
    return detail::write_file(path_ / metadata_name, text);
  }
  auto manifest = read_manifest(path_);
  manifest.metadata = metadata;
  check_metadata(path_, [&] { from_text(text = to_text(manifest), (path_ / manifest_name).string()); });
  require_same_folder(path_, folder_);
  detail::write_file(path_ / manifest_name, text);
}

}  // namespace muster
