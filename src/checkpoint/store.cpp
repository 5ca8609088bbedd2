#include "checkpoint/store.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "checkpoint/files.hpp"
#include "checkpoint/given.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/names.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/state_file.hpp"
#include "checkpoint/steps_back.hpp"
#include "comm/together.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>

namespace muster::detail::checkpoint {

using comm::on_all;
using comm::on_root;
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& doing, int error) {
  throw Error(ExitCode::retry, doing, std::strerror(error), "Check the space and the permissions there");
}

/// Makes the directory for this user alone; gives the mode that the umask wants for it.
mode_t make_private(const fs::path& path) {
  struct stat status {};
  if (::mkdir(path.c_str(), 0777) != 0 || ::stat(path.c_str(), &status) != 0 || ::chmod(path.c_str(), 0700) != 0)
    fail("making the folder " + path.string(), errno);
  return status.st_mode & 07777;
}

/// The user's files on this rank.
std::vector<std::string> user_files(const Contents& contents) {
  if (!contents.directory) return {};
  auto names = list_files(*contents.directory);
  // Those of a checkpoint are not files of the user's; the entries in it are in the state.
  if (is_of_muster(*contents.directory))
    std::erase_if(names, [](const auto& name) { return name == manifest_name || name == state_name; });
  for (const auto& name : names)
    if (name == manifest_name || name == state_name)
      throw Error(ExitCode::usage, "saving the files of " + contents.directory->string(),
                  "it holds a file " + name + ", and that name is muster's in a checkpoint", "Rename it");
  return names;
}

/// The metadata that the user has set on this rank's files. A file of that name that is no JSON object is only a file.
Json user_metadata(const Contents& contents) {
  if (!contents.directory) return Json::object();
  try {
    auto metadata = Checkpoint::from_directory(*contents.directory).get_metadata();
    return metadata.is_object() ? metadata : Json::object();
  } catch (const Error&) {
    return Json::object();
  }
}

/// The random state of every rank as a tensor [world_size, bytes].
at::Tensor random_tensor(const std::vector<std::string>& states) {
  const auto ranks = static_cast<std::int64_t>(states.size()), bytes = static_cast<std::int64_t>(states.front().size());
  auto tensor = at::empty({ranks, bytes}, at::TensorOptions(at::kByte));
  auto* to = static_cast<char*>(tensor.mutable_data_ptr());
  for (const auto& state : states) {
    if (state.size() != states.front().size())
      throw Error(ExitCode::usage, "saving the random state", "it is not as long on every rank",
                  "Give as many bytes on every rank");
    to = std::copy(state.begin(), state.end(), to);
  }
  return tensor;
}

/// The lowest rank that has the file copies it.
std::map<std::string, int> owners(const std::vector<Json>& given) {
  std::map<std::string, int> owner;
  for (int rank = 0; rank < static_cast<int>(given.size()); ++rank)
    for (const auto& name : given[static_cast<std::size_t>(rank)].at("files")) owner.try_emplace(name, rank);
  return owner;
}

/// The trainer's metadata under the user's, of which the lowest rank's win.
Json merged_metadata(Json metadata, const std::vector<Json>& given) {
  for (auto rank = given.rbegin(); rank != given.rend(); ++rank) {
    const auto& users = rank->at("metadata");
    if (users.empty()) continue;
    if (!metadata.is_object()) metadata = Json::object();
    metadata.update(users);
  }
  return metadata;
}

/// The entries of the user's files; a warning for those that differ between ranks.
std::vector<FileEntry> united(const std::vector<Json>& parts, const std::map<std::string, int>& owner) {
  std::map<std::string, FileEntry> kept;
  for (const bool owners_turn : {true, false})
    for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank)
      for (const auto& json : parts[static_cast<std::size_t>(rank)].at("files")) {
        auto file = file_from_json(json);
        const int of = owner.at(file.name);
        if ((of == rank) != owners_turn) continue;
        if (owners_turn)
          kept.emplace(file.name, std::move(file));
        else if (const auto& other = kept.at(file.name); other.bytes != file.bytes || other.crc32 != file.crc32)
          log::warn("saving " + file.name + ": rank " + std::to_string(rank) + " gives other contents than rank " +
                    std::to_string(of) + "; those of rank " + std::to_string(of) + " are kept");
      }
  std::vector<FileEntry> files;
  for (auto& [name, file] : kept) files.push_back(std::move(file));
  return files;
}

/// Rename without replacing, then the folder itself. What cannot be made durable is taken away again.
void publish(const fs::path& from, const fs::path& to) {
  rename_new(from, to);
  try {
    sync_directory(to.parent_path());
  } catch (...) {
    std::error_code ignored;
    fs::rename(to, from, ignored);
    throw;
  }
}

/// What `look` finds wrong with the content of a checkpoint; empty if nothing is. That something could not be read says
/// nothing about the content, and stays an error.
std::string problem_seen(const std::function<void()>& look) {
  try {
    look();
    return {};
  } catch (const NewerFormat&) {
    throw;
  } catch (const Error& error) {
    if (error.code() != ExitCode::data) throw;
    return error.what();
  }
}

/// What is wrong with the content of the checkpoint; empty if nothing is. Each rank recomputes its share of the
/// checksums. An Error (ExitCode::retry) if it cannot be read, or if not all ranks see the same files. Collective.
std::string problem_of(const fs::path& checkpoint, const Communicator& communicator) {
  Manifest manifest;
  const auto seen = on_all(communicator, [&] {
    return problem_seen([&] {
      manifest = read_manifest(checkpoint);
      verify_sizes(checkpoint, manifest);
    });
  });
  const auto bad = std::ranges::find_if(seen, [](const auto& problem) { return !problem.empty(); });
  if (bad != seen.end()) {
    if (std::ranges::none_of(seen, &std::string::empty)) return *bad;
    const auto rank = static_cast<std::size_t>(bad - seen.begin());
    throw Error(ExitCode::retry, "verifying " + checkpoint.string(),
                "other ranks see it whole, but rank " + std::to_string(rank) + " (" +
                    communicator.topology().hosts[rank] + ") says: " + *bad,
                "The file system does not show all nodes the same; try again");
  }
  const Part part{communicator.rank(), communicator.size()};
  for (auto& problem : on_all(communicator, [&] { return problem_seen([&] { verify(checkpoint, manifest, part); }); }))
    if (!problem.empty()) return std::move(problem);
  return {};
}

}  // namespace

Store::Store(Communicator communicator, fs::path run, CheckpointConfig config)
    : communicator_(std::move(communicator)), run_(std::move(run)), config_(std::move(config)) {
  if (config_.num_to_keep.value_or(1) < 1)
    throw Error(ExitCode::usage, "keeping checkpoints",
                "num_to_keep is " + std::to_string(*config_.num_to_keep) + ", and the newest always stays",
                "Give 1 or more, or leave it out to keep all");
  const auto next = on_root(communicator_, [&] {
    // Before they go: their indices count.
    const auto next_index = find_checkpoints(run_).next_index;
    remove_leftovers(run_);
    return std::to_string(next_index);
  });
  next_index_ = std::stoi(next);
}

void Store::take_back_what_is_whole() {
  // Those after the newest: what the run has gone on without is not its past any more.
  const auto candidates = Json::parse(on_root(communicator_, [&] {
    const auto found = find_checkpoints(run_);
    const auto steps = read_steps_back(run_);
    const auto newest = newest_of(found, steps);
    auto list = Json::array();
    for (const auto& [index, path] : found.damaged)
      if (!given_up(steps, index) && (!newest || index > newest->first))
        list.push_back({path.string(), index, !newest});
    return list.dump();
  }));
  for (const auto& candidate : candidates) {
    const fs::path path = candidate[0].get<std::string>();
    const bool needed = candidate[2];
    try {
      if (!problem_of(path, communicator_).empty()) continue;
    } catch (const Error& error) {
      // Where there is another to go on from, one on a sick disk is left alone.
      if (needed || !error.agreed() || error.code() != ExitCode::retry) throw;
      if (communicator_.rank() == 0) log::warn(path.filename().string() + " is left alone: " + error.what());
      continue;
    }
    on_root(communicator_, [&] {
      const auto to = path.parent_path() / published_name(candidate[1]);
      if (fs::exists(status_of(to))) return std::string();
      rename_new(path, to);
      sync_directory(run_);
      log::warn(path.filename().string() + " is whole, and called " + to.filename().string() + " again");
      return std::string();
    });
  }
}

std::optional<Checkpoint> Store::newest() {
  take_back_what_is_whole();
  for (;;) {
    const fs::path path = on_root(communicator_, [&] {
      const auto found = find_checkpoints(run_);
      const auto newest = newest_of(found, read_steps_back(run_));
      if (newest) return newest->second.string();
      if (!found.published.empty())
        throw Error(ExitCode::data, "looking for a checkpoint in " + run_.string(),
                    "the one to which it went back is gone, and those after it were given up",
                    "Name the one to go on from: --resume " + found.published.rbegin()->second.string());
      if (!found.damaged.empty())
        throw Error(ExitCode::data, "looking for a checkpoint in " + run_.string(),
                    "all that are there are damaged (" + std::to_string(found.damaged.size()) + ")",
                    "`muster checkpoint verify` says what is wrong with each; one that is mended is taken up again. "
                    "To start from the beginning, give the run another name");
      return std::string();
    });
    if (path.empty()) return {};
    const auto problem = problem_of(path, communicator_);
    if (problem.empty()) return handed_out(Checkpoint(path));
    on_root(communicator_, [&] {
      const auto aside = set_aside(path);
      log::warn(path.filename().string() + " is damaged and now called " + aside.filename().string() + ": " + problem);
      return std::string();
    });
  }
}

void Store::step_back(int index) {
  const auto path = run_ / published_name(index);
  const auto doing = "going back to " + path.string();
  const auto done = on_root(communicator_, [&] {
    const auto steps = read_steps_back(run_);
    if (!steps.empty() && steps.back().to == index) {
      log::info("this run has gone back to " + path.filename().string() +
                " already and goes on from its newest; to go "
                "back once more, remove its steps_back.json");
      return std::string("done");
    }
    if (!find_checkpoints(run_).published.contains(index))
      throw Error(ExitCode::data, doing, "there is no such checkpoint",
                  "`muster checkpoint ls " + run_.string() + "` shows those that are there");
    return std::string();
  });
  if (!done.empty()) return;
  if (const auto problem = problem_of(path, communicator_); !problem.empty()) throw Error(ExitCode::data, problem);
  on_root(communicator_, [&] { return add_step_back(run_, {index, next_index_ - 1}), std::string(); });
}

Checkpoint Store::commit(const Contents& contents) {
  const auto path = run_ / published_name(next_index_), saving = run_ / saving_name(next_index_);
  const Part part{communicator_.rank(), communicator_.size()};
  try {
    // What each rank has, before anything is written.
    std::vector<std::string> mine;
    std::vector<Json> given;
    for (const auto& text : on_all(communicator_, [&] {
           mine = user_files(contents);
           check_storable(contents.state.tensors);
           if (contents.state.tensors.contains(random_name))
             throw Error(ExitCode::usage, "saving the state", "an entry is called random", "Give it another name");
           const auto number = part.count > 1 ? fingerprint(contents.state, contents.copies) : 0;
           return Json{{"files", mine}, {"metadata", user_metadata(contents)}, {"fingerprint", number}}.dump();
         }))
      given.push_back(Json::parse(text));
    const auto owner = owners(given);
    const bool alike = std::all_of(given.begin(), given.end(), [&](const Json& rank) {
      return rank.at("fingerprint") == given.front().at("fingerprint");
    });
    const auto rank_0s = alike ? std::set<std::string>() : settle(communicator_, contents.state, contents.copies);
    auto [tensors, values] = put_together(&communicator_, contents.state, contents.copies);
    const auto random = communicator_.all_gather(contents.random_state);

    // Rank 0 lays out, all write.
    mode_t mode = 0;
    const auto layout = layout_from_json(Json::parse(on_root(communicator_, [&] {
      discard(saving);
      mode = make_private(saving);
      tensors.emplace(random_name, random_tensor(random));
      return to_json(lay_out(saving / state_name, tensors)).dump();
    })));
    tensors.try_emplace(random_name, random_tensor(random));
    const auto writers = piece_writers(layout, part.count, rank_0s);
    std::vector<Json> written;
    for (const auto& result : on_all(communicator_, [&] {
           Json json{{"state", write_pieces(saving / state_name, layout, tensors, writers, part.index)},
                     {"files", Json::array()}};
           for (const auto& name : mine)
             json["files"].push_back(to_json(owner.at(name) == part.index ? copy_file(*contents.directory, name, saving)
                                                                          : checksum_file(*contents.directory, name)));
           return json.dump();
         }))
      written.push_back(Json::parse(result));

    // All have written: rank 0 publishes, then prunes.
    on_root(communicator_, [&] {
      Manifest manifest{.index = next_index_,
                        .time = time_now(),
                        .world_size = communicator_.size(),
                        .progress = contents.progress,
                        .metrics = contents.metrics,
                        .metadata = merged_metadata(contents.metadata, given),
                        .values = values,
                        .tensors = layout.tensors,
                        .files = united(written, owner)};
      FileEntry state{.name = state_name, .bytes = layout.bytes, .piece_bytes = piece_bytes_for(layout.bytes)};
      std::vector<std::size_t> taken(written.size(), 0);  // of each rank's checksums
      for (const int writer : writers) {
        const auto rank = static_cast<std::size_t>(writer);
        state.crc32.push_back(written[rank].at("state").at(taken[rank]++).get<std::uint32_t>());
      }
      manifest.files.push_back(std::move(state));
      write_manifest(saving, manifest);
      sync_folders(saving);
      if (::chmod(saving.c_str(), mode) != 0) fail("setting the mode of " + saving.string(), errno);
      publish(saving, path);
      prune();
      return std::string();
    });
  } catch (...) {
    if (communicator_.rank() == 0) discard(saving);
    throw;
  }
  ++next_index_;
  return handed_out(Checkpoint(path));
}

Checkpoint Store::handed_out(Checkpoint checkpoint) const {
  checkpoint.rank_ = communicator_.rank();
  checkpoint.ranks_ = communicator_.size();
  return checkpoint;
}

void Store::prune() const noexcept {
  if (!config_.num_to_keep) return;
  try {
    const auto found = find_checkpoints(run_);
    const auto steps = read_steps_back(run_);
    std::vector<Scored> checkpoints;
    for (const auto& [index, path] : found.published) try {
        checkpoints.push_back(
            {index, score_of(read_manifest(path).metrics, config_.checkpoint_score_attribute), given_up(steps, index)});
      } catch (const Error&) {
        // Damaged: it does not count, and whoever resumes next will look at it.
      }
    for (const int index : surplus(std::move(checkpoints), config_)) {
      const auto aside = run_ / pruning_name(index);
      discard(aside);
      rename_new(found.published.at(index), aside);
      discard(aside);
    }
  } catch (const std::exception& error) {
    log::warn(std::string("removing old checkpoints: ") + error.what());
  }
}

Restored Store::read(const Checkpoint& checkpoint) const {
  const auto kinds = on_all(communicator_, [&] {
    const auto& path = checkpoint.path();
    if (!is_of_muster(path) && !fs::exists(status_of(path / state_name))) return std::string("files");
    return std::string(read_manifest(path).progress.empty() ? "entries" : "run");
  });
  if (std::ranges::any_of(kinds, [&](const auto& kind) { return kind != kinds.front(); }))
    throw Error(ExitCode::usage, "reading " + checkpoint.path().string(),
                "not all ranks give the same kind of checkpoint", "Give the same one on every rank");
  Restored restored;
  if (kinds.front() == "files") return restored;
  if (kinds.front() == "entries") {
    restored.state = united_entries(communicator_, checkpoint);
    return restored;
  }
  const Part part{communicator_.rank(), communicator_.size()};
  on_all(communicator_, [&] {
    const auto manifest = read_manifest(checkpoint.path());
    verify_sizes(checkpoint.path(), manifest);
    restored.state.tensors = read_tensors(checkpoint.path() / state_name, manifest, part);
    restored.state.values = manifest.values;
    restored.progress = manifest.progress;
    restored.where = progress_from_json(manifest.progress);
    restored.metrics = manifest.metrics;
    restored.world_size = manifest.world_size;
    return std::string();
  });
  const auto random = restored.state.tensors.extract(random_name);
  if (random && random.mapped().scalar_type() == at::kByte) {
    const auto& all = random.mapped();
    restored.random_states.assign(static_cast<const char*>(all.const_data_ptr()),
                                  static_cast<std::size_t>(all.numel()));
  }
  if (random && restored.world_size == communicator_.size()) {
    const auto& tensor = random.mapped();
    if (tensor.scalar_type() == at::kByte && tensor.dim() == 2 && tensor.size(0) == part.count && tensor.size(1) > 0) {
      const auto bytes = static_cast<std::size_t>(tensor.size(1));
      restored.random_state.emplace(
          static_cast<const char*>(tensor.const_data_ptr()) + bytes * static_cast<std::size_t>(part.index), bytes);
    }
  }
  return restored;
}

std::vector<CheckpointInfo> Store::list() const {
  // One rank looks, so that all see the same.
  std::vector<CheckpointInfo> seen;
  const auto text = on_root(communicator_, [&] {
    auto json = Json::array();
    for (const auto& info : list_checkpoints(run_))
      json.push_back({info.path.string(), info.index, info.training_iteration, info.epoch, info.world_size, info.bytes,
                      info.time, info.metrics, info.problem, static_cast<int>(info.code)});
    return json.dump();
  });
  for (const auto& info : Json::parse(text))
    seen.push_back({.path = info[0].get<std::string>(),
                    .index = info[1],
                    .training_iteration = info[2],
                    .epoch = info[3],
                    .world_size = info[4],
                    .bytes = info[5],
                    .time = info[6],
                    .metrics = info[7],
                    .problem = info[8],
                    .code = static_cast<ExitCode>(info[9].get<int>())});
  return seen;
}

}  // namespace muster::detail::checkpoint
