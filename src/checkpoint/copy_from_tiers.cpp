#include "checkpoint/copy_from_tiers.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/fast_tier_note.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/inspect.hpp"
#include "checkpoint/rollbacks.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "storage/folder_tier.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <ranges>
#include <set>

namespace muster::detail::checkpoint {

using comm::run_on_all;
using comm::run_on_root;
namespace {

namespace fs = std::filesystem;

/// A node's folder in a tier, and the node whose first rank reads and removes it.
struct NodeFolder {
  fs::path path;
  int node = 0;
};

/// Returns [names, warnings]: the names of the tier's folders that this rank finds and trusts, and a warning for each
/// other folder and each failure.
Json folders_here(const NotedTier& tier) {
  std::set<std::string> names, warnings;
  std::error_code error;
  for (fs::directory_iterator at(tier.folder, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    if (!name.starts_with(tier.prefix())) continue;
    try {
      const auto problem = reason_to_distrust(at->path());
      if (problem.empty()) {
        names.insert(name);
        continue;
      }
      std::error_code unreadable;
      std::string held;
      for (fs::directory_iterator in(at->path(), unreadable), last; !unreadable && in != last; in.increment(unreadable))
        if (storage::Tier::index_of(in->path().filename())) held += " " + in->path().filename().string();
      warnings.insert(at->path().string() + " is left alone, with" + (held.empty() ? " what it holds" : held) + ": " +
                      problem);
    } catch (const Error& unseen) {
      warnings.insert(unseen.what());
    }
  }
  if (error && error != std::errc::no_such_file_or_directory)
    warnings.insert("looking for a fast tier in " + tier.folder + ": " + error.message());
  return Json::array({names, warnings});
}

/// Returns the tier's folders that the nodes find. If several nodes find the same folder (shared storage), the first of
/// them is responsible for it. With `warn`, rank 0 logs the warnings of folders_here(). Collective.
std::vector<NodeFolder> find_folders(const Communicator& communicator, const NotedTier& tier, bool warn) {
  const auto& topology = communicator.topology();
  std::vector<NodeFolder> folders;
  std::set<std::string> seen;
  const auto of_ranks = run_on_all(communicator, [&] {
    return topology.local_rank == 0 ? folders_here(tier) : Json::array({Json::array(), Json::array()});
  });
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto& here = of_ranks[rank];
    for (const std::string name : here[0])
      if (seen.insert(name).second) folders.push_back({fs::path(tier.folder) / name, topology.node_of_rank[rank]});
    for (const std::string warning : here[1])
      if (warn && communicator.rank() == 0) log::warn(topology.hosts[rank] + ": " + warning);
  }
  return folders;
}

/// What the first rank of a node has read of a checkpoint in one folder.
struct Found {
  std::string manifest = {};  ///< text of the manifest; empty if it cannot be read
  std::string problem = {};   ///< why the manifest cannot be read; empty if it can
};

/// Returns for each folder its checkpoints, by index. Collective.
std::vector<std::map<int, Found>> find_checkpoints(const Communicator& communicator,
                                                   const std::vector<NodeFolder>& folders) {
  const auto& topology = communicator.topology();
  std::vector<std::map<int, Found>> found(folders.size());
  for (const auto& of_rank : run_on_all(communicator, [&] {
         auto all = Json::array();
         for (std::size_t i = 0; i < folders.size(); ++i) {
           if (topology.local_rank != 0 || folders[i].node != topology.node_rank) continue;
           for (const auto& [index, path] : storage::NodeTier(folders[i].path).list().published) {
             Found one;
             try {
               one.manifest = to_text(read_manifest(path));
             } catch (const Error& error) {
               one.problem = error.what();
             }
             all.push_back({i, index, one.manifest, one.problem});
           }
         }
         return all;
       }))
    for (const auto& one : of_rank) found[one[0].get<std::size_t>()][one[1]] = {one[2], one[3]};
  return found;
}

/// Verifies this rank's share of a checkpoint. Returns the pieces and files of the share that are present and intact.
CopySource intact_part(const fs::path& checkpoint, const Manifest& manifest, state::RankInGroup in_node) {
  CopySource part{.checkpoint = checkpoint};
  const auto mine = [&](std::size_t i) { return static_cast<int>(i) % in_node.size == in_node.rank; };
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const auto& file = manifest.files[i];
    if (file.name == state_name || !mine(i) || !fs::exists(status_of(checkpoint / file.name))) continue;
    if (checksum_file(checkpoint, file.name).piece_checksums == file.piece_checksums) part.files.push_back(file.name);
  }
  std::vector<std::uint64_t> pieces;
  for (std::size_t piece = 0; piece < manifest.state_file().piece_checksums.size(); ++piece)
    if (mine(piece)) pieces.push_back(piece);
  part.pieces = intact_pieces(checkpoint, manifest.state_file(), pieces);
  return part;
}

/// Divides a checkpoint among the ranks: the first rank that has found a piece or file intact copies it. Returns the
/// parts of this rank. If some piece or file is intact on no rank, returns nothing on all ranks; then `problem` is the
/// reason, if known. Collective.
std::optional<std::vector<CopySource>> choose_parts(const Communicator& communicator, const Manifest& manifest,
                                                    const std::vector<fs::path>& checkpoints_here,
                                                    std::string& problem) {
  const auto& topology = communicator.topology();
  std::vector<CopySource> mine;
  const auto of_ranks = run_on_all(communicator, [&] {
    auto parts = Json::array();
    for (const auto& checkpoint : checkpoints_here) {
      mine.push_back({.checkpoint = checkpoint});
      std::string unreadable;
      try {
        mine.back() = intact_part(checkpoint, manifest, {topology.local_rank, topology.local_size});
      } catch (const Error& error) {
        unreadable = error.what();
      }
      parts.push_back({mine.back().pieces, mine.back().files, unreadable});
    }
    return parts;
  });
  std::set<std::uint64_t> pieces;
  std::set<std::string> files{state_name};
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto& parts = of_ranks[rank];
    for (std::size_t i = 0; i < parts.size(); ++i) {
      CopySource first;
      for (const std::uint64_t piece : parts[i][0])
        if (pieces.insert(piece).second) first.pieces.push_back(piece);
      for (const std::string file : parts[i][1])
        if (files.insert(file).second) first.files.push_back(file);
      if (problem.empty()) problem = parts[i][2];
      if (static_cast<int>(rank) != communicator.rank()) continue;
      mine[i].pieces = std::move(first.pieces);
      mine[i].files = std::move(first.files);
    }
  }
  const bool whole =
      pieces.size() == manifest.state_file().piece_checksums.size() && files.size() == manifest.files.size();
  return whole ? std::optional(std::move(mine)) : std::nullopt;
}

/// True if the run's folder has an intact checkpoint with this index or a higher one. Renames a checkpoint with this
/// index that is a copy of another one, or damaged: a failed copy followed by a power loss may have left it incomplete.
bool has_index_or_newer(const storage::Tier& run, int index) {
  const auto published = run.list().published;
  for (const auto& [there, path] : published | std::views::reverse) {
    if (there < index) break;
    const auto problem = data_problem([&] { verify(path, read_manifest(path)); });
    const auto copied = copied_index(there, path);
    if (copied && there > index) continue;
    if (problem.empty() && !copied) return true;
    if (there == index) {
      const auto new_path = run.quarantine(index);
      const auto cause = copied ? str(" is a copy of the checkpoint ", *copied) : " is damaged";
      log::warn(path.filename().string() + cause + " and now named " + new_path.filename().string() +
                (problem.empty() ? "" : ": " + problem));
    }
  }
  return false;
}

/// Copies one checkpoint of the tier to the run's folder. Returns an empty string, or the reason why it cannot be
/// copied now; the same on all ranks. Collective.
std::string take_checkpoint(const Communicator& communicator, const std::vector<NodeFolder>& folders,
                            const std::vector<std::map<int, Found>>& found, int index, storage::Tier& run) {
  std::string text, problem;
  std::vector<fs::path> here;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    const auto one = found[i].find(index);
    if (one == found[i].end()) continue;
    if (problem.empty()) problem = one->second.problem;
    if (text.empty()) text = one->second.manifest;
    if (!text.empty() && text == one->second.manifest && folders[i].node == communicator.topology().node_rank)
      here.push_back(storage::NodeTier(folders[i].path).published(index));
  }
  if (text.empty()) return problem;
  const auto manifest = from_text(text, "the manifest of " + run.published(index).filename().string());
  const auto parts = choose_parts(communicator, manifest, here, problem);
  if (!parts) return problem.empty() ? "some of it is missing or damaged" : problem;
  try {
    copy_to_run_folder(communicator, manifest, *parts, run);
  } catch (const Error& error) {
    if (!error.agreed() || error.code() != ExitCode::data) throw;
    return error.what();
  }
  return {};
}

/// Returns the hosts of the tier whose folders were not found.
std::vector<std::string> missing_hosts(const NotedTier& tier, const std::vector<NodeFolder>& folders) {
  std::vector<std::string> hosts;
  for (std::size_t node = 0; node < tier.hosts.size(); ++node) {
    const auto begin = str(tier.prefix(), node, "-");
    if (std::ranges::none_of(folders,
                             [&](const auto& folder) { return folder.path.filename().string().starts_with(begin); }))
      hosts.push_back(tier.hosts[node]);
  }
  return hosts;
}

/// Copies the newest whole checkpoint of the tier, if it is newer than all in the run's folder. Returns false if the
/// tier may still hold a newer checkpoint. `is_own`: false if the tier belongs to the run from which this run's folder
/// was copied. Then only the checkpoint tier.first may be copied, since that run may have made later ones after the
/// copy. Collective.
bool copy_newest(const Communicator& communicator, const NotedTier& tier, bool is_own, storage::Tier& run) {
  const int only_index = is_own ? -1 : tier.first;
  const auto folders = find_folders(communicator, tier, /*warn=*/true);
  const auto found = find_checkpoints(communicator, folders);
  std::string missing;
  for (const auto& host : missing_hosts(tier, folders)) missing += (missing.empty() ? "" : ", ") + host;
  const auto warn_left = [&](const std::string& what) {
    if (communicator.rank() == 0)
      log::warn(what + (missing.empty() ? "" : " (there is no folder of the hosts " + missing + ")") +
                ". The run goes on without it. A later start that finds it there takes it, unless the run's folder has "
                "a newer checkpoint by then");
  };
  if (folders.empty()) {
    warn_left("the newest checkpoint may be in the fast tier " + tier.shown() + ", which is not on these nodes");
    return false;
  }
  std::set<int, std::greater<>> indices;
  for (const auto& folder : found)
    for (const auto& [index, one] : folder)
      if (only_index < 0 || index == only_index) indices.insert(index);
  const auto has = [&](int index) { return run_on_root(communicator, [&] { return has_index_or_newer(run, index); }); };
  if (only_index >= 0 && indices.empty() && !has(only_index)) {
    std::set<int> newer;
    for (const auto& folder : found)
      for (const auto& [index, one] : folder) newer.insert(index);
    const auto wanted = run.published(only_index).filename().string() + " is not in the fast tier " + tier.shown();
    if (newer.empty()) {
      warn_left(wanted + " any more");
    } else if (communicator.rank() == 0) {
      const auto newest = run.published(*newer.rbegin()).filename().string();
      log::warn(wanted + " any more, which holds " + newest +
                ". The run goes on without it: the run from which this folder was copied may have made it later. If "
                "this folder was moved and that run is gone, move the folder " +
                newest + " from there to here before the next save, and start again");
    }
    return false;
  }
  bool is_current = true;
  if (is_own && (indices.empty() || *indices.begin() < tier.first) && !has(tier.first)) {
    // Or it has never existed: the note names a checkpoint before it is published, and a job may be killed in between.
    warn_left(run.published(tier.first).filename().string() + " may have been in the fast tier " + tier.shown() +
              ", and is not there now");
    is_current = missing.empty();
  }
  for (const int index : indices) {
    if (has(index)) break;
    const auto name = run.published(index).filename().string();
    const auto problem = take_checkpoint(communicator, folders, found, index, run);
    if (problem.empty()) {
      if (communicator.rank() == 0) log::info(name + " was taken from the fast tier " + tier.folder);
      break;
    }
    warn_left(name + " of the fast tier " + tier.shown() + " cannot be taken: " + problem);
    is_current = false;
  }
  return is_current;
}

}  // namespace

void copy_to_run_folder(const Communicator& communicator, const Manifest& manifest, const std::vector<CopySource>& mine,
                        storage::Tier& run) {
  const int index = manifest.index;
  try {
    run_on_root(communicator, [&] {
      run.begin(index);
      run.create(index, state_name, manifest.state_file().bytes);
    });
    run_on_all(communicator, [&] {
      for (const auto& [checkpoint, pieces, files] : mine) {
        if (!pieces.empty()) {
          const auto file = run.open(index, state_name, storage::Alignment::any);
          read_pieces(checkpoint, manifest.state_file(), pieces, {},
                      [&](Range range, std::span<const std::byte> bytes) { file->write_at(bytes, range.begin); });
          file->finish();
        }
        for (const auto& name : files) {
          const auto& file = *std::ranges::find(manifest.files, name, &FileEntry::name);
          if (copy_file(checkpoint, name, run, index).piece_checksums != file.piece_checksums)
            throw Error(ExitCode::data, "copying " + (checkpoint / name).string(), "its checksum is wrong");
        }
      }
    });
    run_on_root(communicator, [&] {
      write_manifest(run, manifest);
      run.publish(index);
    });
  } catch (...) {
    if (communicator.rank() == 0) run.abandon(index);
    throw;
  }
}

bool finish_copying(const Communicator& communicator, storage::Tier& run) {
  const auto tiers = run_on_root(communicator, [&] {
    remove_unfinished(note_path(run));
    if (const auto owner = other_owner(run); !owner.empty()) {
      const auto there = run.list().published;
      log::warn(note_path(run).string() + " belongs to " + owner +
                ": the fast tier of that job is not read, though it may hold a newer checkpoint. The run goes on "
                "from " +
                (there.empty() ? "its beginning" : there.rbegin()->second.filename().string()) +
                ", without a fast tier until that file is gone");
    }
    std::set<std::string> rolled_back;  // IDs of tiers; a job may have been killed before it removed them
    for (const auto& rollback : read_rollbacks(run.folder()))
      rolled_back.insert(rollback.tiers.begin(), rollback.tiers.end());
    auto noted = Json::array();
    for (const auto& tier : read_note(run))
      noted.push_back({tier.folder, tier.id, tier.hosts, tier.used && !rolled_back.contains(tier.id), tier.first,
                       !is_of_another_run(tier, run)});
    return noted;
  });
  if (tiers.empty()) return false;
  std::set<std::string> kept;
  for (const auto& tier : tiers | std::views::reverse)
    if (tier[3] && !copy_newest(communicator, {.folder = tier[0], .id = tier[1], .hosts = tier[2], .first = tier[4]},
                                tier[5], run))
      kept.insert(tier[1].get<std::string>());
  run_on_root(communicator, [&] {
    // A killed job may have renamed a checkpoint here without making the new name durable.
    sync_directory(run.folder());
    auto note = read_note(run);
    for (auto& tier : note) tier.used = kept.contains(tier.id);
    for (const auto& tier : note)
      if (!tier.used && is_of_another_run(tier, run))
        log::warn(run.folder().string() + " is a copy of another run's folder: the fast tier " + tier.shown() +
                  " belongs to that run and is left as it is. Remove it by hand if that run is gone");
    std::erase_if(note, [&](const auto& tier) { return !tier.used && is_of_another_run(tier, run); });
    write_note(run, note);
  });
  remove_unused_tiers(communicator, run);
  return !kept.empty();
}

void remove_unused_tiers(const Communicator& communicator, const storage::Tier& run, const fs::path& own) {
  const auto is_own = [&](const NotedTier& tier) { return own.filename().string().starts_with(tier.prefix()); };
  const auto unused = run_on_root(communicator, [&] {
    auto tiers = Json::array();
    for (const auto& tier : read_note(run))
      if (!tier.used && !is_own(tier) && !is_of_another_run(tier, run))
        tiers.push_back({tier.folder, tier.id, tier.hosts});
    return tiers;
  });
  if (unused.empty()) return;
  // IDs of tiers with folders that could not be reached or removed; a later start tries again
  std::set<std::string> left;
  for (const auto& tier : unused) {
    const NotedTier noted{tier[0], tier[1], tier[2]};
    const auto folders = find_folders(communicator, noted, /*warn=*/false);
    const auto& present = communicator.topology().hosts;
    if (std::ranges::any_of(missing_hosts(noted, folders),
                            [&](const auto& host) { return std::ranges::find(present, host) == present.end(); }))
      left.insert(noted.id);
    const auto removed_on_ranks = run_on_all(communicator, [&] {
      bool removed = true;
      for (const auto& folder : folders) {
        if (communicator.topology().local_rank != 0 || folder.node != communicator.topology().node_rank) continue;
        storage::remove_folder(folder.path);
        removed = removed && !fs::exists(status_of(folder.path));
      }
      return removed;
    });
    if (std::ranges::find(removed_on_ranks, false) != removed_on_ranks.end()) left.insert(noted.id);
  }
  run_on_root(communicator, [&] {
    auto note = read_note(run);
    std::erase_if(note, [&](const auto& tier) { return !tier.used && !is_own(tier) && !left.contains(tier.id); });
    write_note(run, note);
  });
}

}  // namespace muster::detail::checkpoint
