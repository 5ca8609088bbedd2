#include "checkpoint/fast_tier.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/inspect.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <ranges>
#include <set>
#include <tuple>

namespace muster::detail::checkpoint {

using comm::on_all;
using comm::on_root;
namespace {

namespace fs = std::filesystem;

fs::path note_of(const Tier& run) { return run.folder() / "fast_tier.json"; }

/// The host of this rank is in the name, since nodes may share the folder after all.
fs::path folder_of_node(const Communicator& communicator, const fs::path& folder, const std::string& id) {
  return folder / ("muster-" + id + "-" + communicator.topology().hosts[static_cast<std::size_t>(communicator.rank())]);
}

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int word = 0; word < 4; ++word) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(random()));
    id += digits;
  }
  return id;
}

bool is_id(const std::string& id) {
  return id.size() == 32 && id.find_first_not_of("0123456789abcdef") == std::string::npos;
}

NodeShare read_share(const fs::path& checkpoint) {
  const auto path = checkpoint / share_name;
  const auto json = read_json(path);
  try {
    return {json.at("pieces"), json.at("files")};
  } catch (const Json::exception& error) {
    throw Error(ExitCode::data, "reading " + path.string(), error.what());
  }
}

/// What fast_tier.json says.
struct Note {
  std::string folder, id;
  bool used = false;

  std::string text() const { return Json{{"folder", folder}, {"id", id}, {"used", used}}.dump() + "\n"; }
};

std::optional<Note> read_note(const Tier& run) {
  const auto path = note_of(run);
  if (!fs::exists(status_of(path))) return {};
  const auto json = read_json(path);
  const bool whole = json.is_object() && json.contains("folder") && json.contains("id") && json.contains("used") &&
                     json["folder"].is_string() && json["id"].is_string() && is_id(json["id"]) &&
                     json["used"].is_boolean();
  if (!whole)
    throw Error(ExitCode::data, "reading " + path.string(), "it does not name a fast tier",
                "Remove it: the run then goes on from its own folder");
  return Note{json["folder"], json["id"], json["used"]};
}

/// What the first rank of each node says of a checkpoint there.
struct Found {
  int index = -1;
  std::string manifest = {};  ///< its text
  NodeShare share = {};
};

/// The newest first.
std::vector<Found> look(const fs::path& folder) {
  std::vector<Found> found;
  if (!fs::exists(status_of(folder))) return found;
  require_own_directory(folder);
  for (const auto& [index, path] : Tier(folder).list().published | std::views::reverse) try {
      found.push_back({index, to_text(read_manifest(path)), read_share(path)});
    } catch (const Error& error) {
      log::warn(path.string() + " is left alone: " + error.what());
    }
  return found;
}

/// The part of a node's share that this rank takes, where of several nodes the first has the piece or the file.
NodeShare part_of(const std::vector<NodeShare>& nodes, int node, Rank in_node) {
  std::set<std::uint64_t> pieces;
  std::set<std::string> files;
  NodeShare mine;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    const bool is_here = static_cast<int>(n) == node;
    for (const auto piece : nodes[n].pieces)
      if (pieces.insert(piece).second && is_here) mine.pieces.push_back(piece);
    for (const auto& file : nodes[n].files)
      if (files.insert(file).second && is_here && in_node.rank == 0) mine.files.push_back(file);
  }
  const auto range = share(mine.pieces.size(), in_node);
  const auto begin = mine.pieces.begin();
  mine.pieces = {begin + static_cast<std::ptrdiff_t>(range.begin), begin + static_cast<std::ptrdiff_t>(range.end)};
  return mine;
}

/// Whether the run's folder has a whole one of that index or a newer one. One of that index which is not is set aside:
/// after a copy that failed, and then lost the power, it may be there in part.
bool has_as_new(const Tier& run, int index) {
  for (const auto& [there, path] : run.list().published | std::views::reverse) {
    if (there < index) break;
    const auto problem = problem_seen([&] { verify(path, read_manifest(path)); });
    if (problem.empty()) return true;
    if (there == index) {
      const auto aside = run.set_aside(index);
      log::warn(path.filename().string() + " is damaged and now called " + aside.filename().string() + ": " + problem);
    }
  }
  return false;
}

bool is_complete(const Manifest& manifest, const std::vector<NodeShare>& nodes) {
  std::set<std::uint64_t> pieces;
  std::set<std::string> files{state_name};
  for (const auto& node : nodes) {
    pieces.insert(node.pieces.begin(), node.pieces.end());
    files.insert(node.files.begin(), node.files.end());
  }
  return pieces.size() == manifest.state_file().crc32.size() &&
         std::ranges::all_of(manifest.files, [&](const FileEntry& file) { return files.contains(file.name); });
}

}  // namespace

void write_share(const fs::path& checkpoint, const NodeShare& share) {
  write_file(checkpoint / share_name, Json{{"pieces", share.pieces}, {"files", share.files}}.dump() + "\n");
}

void copy_to_run(const Communicator& communicator, const fs::path& checkpoint, const Manifest& manifest,
                 const NodeShare& mine, Tier& run) {
  const int index = manifest.index;
  const auto to = run.saving(index);
  try {
    on_root(communicator, [&] {
      run.begin(index);
      create_state_file(to / state_name, {.tensors = {}, .bytes = manifest.state_file().bytes});
    });
    on_all(communicator, [&] {
      if (!mine.pieces.empty()) {
        File file(to / state_name, File::Mode::write);
        read_pieces(checkpoint, manifest.state_file(), mine.pieces, {},
                    [&](Range range, std::span<const std::byte> bytes) { file.write_at(bytes, range.begin); });
        file.sync();
        file.close();
      }
      for (const auto& name : mine.files) {
        const auto& file = *std::ranges::find(manifest.files, name, &FileEntry::name);
        if (copy_file(checkpoint, name, to).crc32 != file.crc32)
          throw Error(ExitCode::data, "copying " + (checkpoint / name).string(), "its checksum is wrong");
      }
      return std::string();
    });
    on_root(communicator, [&] {
      write_manifest(to, manifest);
      run.publish(index);
    });
  } catch (...) {
    if (communicator.rank() == 0) run.abandon(index);
    throw;
  }
}

void note_use(const Tier& run) {
  auto note = read_note(run).value();
  note.used = true;
  write_file(note_of(run), note.text());
}

bool may_have_more(const Tier& run) {
  const auto note = read_note(run);
  return note && note->used;
}

void finish_copying(const Communicator& communicator, Tier& run) {
  const auto told = Json::parse(on_root(communicator, [&] {
    remove_unfinished(note_of(run));
    const auto note = read_note(run);
    return note ? Json{note->folder, note->id}.dump() : Json().dump();
  }));
  if (told.is_null()) return;

  const auto& topology = communicator.topology();
  const auto folder = folder_of_node(communicator, told[0].get<std::string>(), told[1]);
  std::vector<std::map<int, Json>> ranks;
  std::set<int, std::greater<>> indices;
  for (const auto& text : on_all(communicator, [&] {
         auto all = Json::array();
         try {
           if (topology.local_rank == 0)
             for (const auto& one : look(folder))
               all.push_back({one.index, one.manifest, one.share.pieces, one.share.files});
         } catch (const Error& error) {
           log::warn("what lies in " + folder.string() + " is left alone: " + error.what());
         }
         return all.dump();
       })) {
    auto& rank = ranks.emplace_back();
    for (auto& one : Json::parse(text)) {
      const int index = one[0];
      indices.insert(index);
      rank.emplace(index, std::move(one));
    }
  }
  // Whether it is in the run's folder then.
  const auto copy = [&](int index) {
    const auto is_there = on_root(communicator, [&] { return std::string(has_as_new(run, index) ? "yes" : ""); });
    if (!is_there.empty()) return true;
    std::string newest;
    std::vector<NodeShare> nodes(static_cast<std::size_t>(topology.num_nodes));
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto found = ranks[rank].find(index);
      if (found == ranks[rank].end()) continue;
      const auto& [unused, text, pieces, files] = found->second.get<std::tuple<int, std::string, Json, Json>>();
      if (newest.empty()) newest = text;
      if (text == newest) nodes[static_cast<std::size_t>(topology.node_of_rank[rank])] = {pieces, files};
    }
    const auto name = run.published(index).filename().string();
    const auto give_up = [&](const std::string& why) {
      if (communicator.rank() == 0)
        log::warn(name + " of the fast tier " + told[0].get<std::string>() + " is given up: " + why);
      return false;
    };
    const auto manifest = from_text(newest, "the manifest of " + name);
    if (!is_complete(manifest, nodes)) return give_up("not all nodes that have a share of it are here");
    try {
      copy_to_run(communicator, Tier(folder).published(index), manifest,
                  part_of(nodes, topology.node_rank, {topology.local_rank, topology.local_size}), run);
    } catch (const Error& error) {
      if (!error.agreed() || error.code() != ExitCode::data) throw;
      return give_up(error.what());
    }
    if (communicator.rank() == 0) log::info(name + " was taken from the fast tier");
    return true;
  };
  std::ranges::find_if(indices, copy);
  // A name there that a job which was killed has given may not be durable yet. Then nobody knows of the tier any more.
  on_root(communicator, [&] { sync_directory(run.folder()); });
  if (topology.local_rank == 0 && fs::exists(status_of(folder))) remove_folder(folder);
  on_root(communicator, [&] {
    std::error_code ignored;
    fs::remove(note_of(run), ignored);
    sync_directory(run.folder());
  });
}

Place make_fast_place(const Communicator& communicator, const Tier& run, const fs::path& place) {
  const auto folder = fs::absolute(place);
  const auto id = on_root(communicator, [&] {
    const auto id = new_id();
    write_file(note_of(run), Note{folder.string(), id}.text());
    return id;
  });
  const auto own = folder_of_node(communicator, folder, id);
  const bool leads = communicator.topology().local_rank == 0;
  on_all(communicator, [&] {
    if (leads && ::mkdir(own.c_str(), 0700) != 0)
      throw Error(ExitCode::usage, "making the folder " + own.string() + " of the fast tier", std::strerror(errno),
                  "fast_tier names a folder that is there on every node and may be written");
    return std::string();
  });
  return {.tier = Tier(own), .leads = leads, .of_a_node = true};
}

}  // namespace muster::detail::checkpoint
