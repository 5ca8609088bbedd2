#include "muster/checkpoint.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "checkpoint/components.hpp"
#include "checkpoint/copies.hpp"
#include "checkpoint/files.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/names.hpp"
#include "checkpoint/progress.hpp"
#include "checkpoint/state_file.hpp"
#include "muster/error.hpp"

#include <stdlib.h>

#include <cerrno>
#include <cstring>

namespace muster {
namespace {

namespace fs = std::filesystem;
using namespace detail::checkpoint;

constexpr const char* metadata_name = "metadata.json";

bool has_manifest(const fs::path& path) { return fs::exists(detail::status_of(path / manifest_name)); }

/// The manifest's part of what is shown.
CheckpointInfo info_of(const fs::path& path, const Manifest& manifest) {
  CheckpointInfo info{.path = path,
                      .index = manifest.index,
                      .world_size = manifest.world_size,
                      .time = manifest.time,
                      .metrics = manifest.metrics};
  const auto progress = progress_from_json(manifest.progress);
  info.training_iteration = progress.training_iteration;
  info.epoch = progress.epoch;
  for (const auto& file : manifest.files) info.bytes += file.bytes;
  return info;
}

CheckpointInfo look_at(const fs::path& path, bool checksums) {
  CheckpointInfo info{.path = path};
  try {
    const auto manifest = read_manifest(path);
    info = info_of(path, manifest);
    checksums ? verify(path, manifest, Part{}) : verify_sizes(path, manifest);
  } catch (const Error& error) {
    info.problem = error.what();
    info.code = error.code();
  }
  return info;
}

}  // namespace

Checkpoint::Checkpoint(fs::path path, std::shared_ptr<void> owner) : path_(std::move(path)), owner_(std::move(owner)) {}

Checkpoint Checkpoint::from_directory(fs::path path) {
  if (!path.has_filename()) path = path.parent_path();  // a slash at the end would hide its name
  std::error_code error;
  const auto status = fs::status(path, error);
  if (status.type() == fs::file_type::none)
    throw Error(detail::code_of_reading(error.value()), "opening the checkpoint " + path.string(), error.message());
  if (!fs::is_directory(status))
    throw Error(ExitCode::data, "opening the checkpoint " + path.string(), "there is no such directory",
                "Check the path");
  return Checkpoint(std::move(path));
}

Checkpoint Checkpoint::from_dict(const StateEntries& entries) {
  const auto state = put_together(nullptr, collect(entries), copies_of(entries));
  check_storable(state.tensors);
  auto name = (fs::temp_directory_path() / "muster-checkpoint-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr)
    throw Error(ExitCode::retry, "making the folder " + name, std::strerror(errno),
                "Set TMPDIR to a folder with space");
  const fs::path path = name;
  Checkpoint made(path, std::shared_ptr<void>(nullptr, [path](void*) { discard(path); }));
  made.ranks_ = 1;
  const auto layout = lay_out(path / state_name, state.tensors);
  FileEntry file{.name = state_name,
                 .bytes = layout.bytes,
                 .piece_bytes = piece_bytes_for(layout.bytes),
                 .crc32 = write_pieces(path / state_name, layout, state.tensors, piece_writers(layout, 1), 0)};
  write_manifest(path, {.time = time_now(), .values = state.values, .tensors = layout.tensors, .files = {file}});
  return made;
}

void Checkpoint::to_directory(const fs::path& path) const {
  detail::make_directories(path);
  for (const auto& name : list_files(path_)) copy_file(path_, name, path);
  sync_folders(path);
}

StateDict Checkpoint::to_dict() const {
  const auto manifest = read_manifest(path_);
  verify_sizes(path_, manifest);
  StateDict state{.tensors = read_tensors(path_ / state_name, manifest, Part{}), .values = manifest.values};
  state.tensors.erase(random_name);
  return state;
}

void Checkpoint::load(const std::string& name, const StateEntry& entry) const {
  restore({{name, entry}}, only(to_dict(), name), Part{rank_, ranks_});
}

Json Checkpoint::get_metadata() const {
  if (has_manifest(path_)) return read_manifest(path_).metadata;
  const auto beside = path_ / metadata_name;
  if (!fs::exists(detail::status_of(beside))) return Json::object();
  return detail::read_json(beside);
}

void Checkpoint::set_metadata(const Json& metadata) const {
  if (has_manifest(path_)) {
    auto manifest = read_manifest(path_);
    manifest.metadata = metadata;
    detail::write_file(path_ / manifest_name, to_text(manifest));
  } else {
    detail::write_file(path_ / metadata_name, metadata.dump(2) + "\n");
  }
}

std::vector<CheckpointInfo> list_checkpoints(const fs::path& run) {
  std::vector<CheckpointInfo> infos;
  for (const auto& [index, path] : find_checkpoints(run).published) {
    infos.push_back(look_at(path, false));
    infos.back().index = index;
  }
  return infos;
}

CheckpointInfo verify_checkpoint(const fs::path& path) {
  Checkpoint::from_directory(path);
  return look_at(path, true);
}

}  // namespace muster
