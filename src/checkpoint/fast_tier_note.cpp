#include "checkpoint/fast_tier_note.hpp"

#include "base/file.hpp"
#include "base/json.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <fcntl.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>

namespace muster::detail::checkpoint {

namespace fs = std::filesystem;
namespace {

bool is_id(const std::string& id) {
  return id.size() == 32 && id.find_first_not_of("0123456789abcdef") == std::string::npos;
}

struct stat status_at(const fs::path& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0)
    throw Error(ExitCode::retry, "looking at " + path.string(), std::strerror(errno), "Check the path");
  return status;
}

std::string user_name(uid_t id) {
  const passwd* const user = ::getpwuid(id);
  return user != nullptr ? user->pw_name : str("user ", id);
}

}  // namespace

fs::path note_path(const storage::Tier& run) { return run.folder() / "fast_tier.json"; }

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int word = 0; word < 4; ++word) id += formatted("%08x", random());
  return id;
}

std::string identity_of(const storage::Tier& run) {
  struct statx status {};
  const auto path = run.folder();
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_INO | STATX_BTIME, &status) != 0)
    throw Error(ExitCode::retry, "looking at " + path.string(), std::strerror(errno), "Check the path");
  auto identity = std::to_string(status.stx_ino);
  if ((status.stx_mask & STATX_BTIME) != 0)
    identity += str(" ", status.stx_btime.tv_sec, ".", status.stx_btime.tv_nsec);
  return identity;
}

bool is_of_another_run(const NotedTier& tier, const storage::Tier& run) {
  // Two clients of one file server may differ in whether they report the birth time.
  const auto here = identity_of(run);
  const auto inode_of = [](const std::string& identity) { return identity.substr(0, identity.find(' ')); };
  const bool have_birth = here.find(' ') != std::string::npos && tier.run.find(' ') != std::string::npos;
  return have_birth ? tier.run != here : inode_of(tier.run) != inode_of(here);
}

std::string other_owner(const storage::Tier& run) {
  const auto path = note_path(run);
  if (!fs::exists(status_of(path))) return {};
  const auto owner = status_at(path).st_uid;
  if (owner == ::geteuid()) return {};
  try {
    const auto probe = run.folder() / ".owner";
    write_file(probe, "");
    const auto own = status_at(probe).st_uid;
    fs::remove(probe);
    if (own == owner) return {};
  } catch (const std::exception&) {
    // This user may not write to the folder, so the note is not this user's.
  }
  return user_name(owner);
}

std::vector<NotedTier> read_note(const storage::Tier& run) {
  const auto path = note_path(run);
  if (!fs::exists(status_of(path)) || !other_owner(run).empty()) return {};
  const auto json = read_json(path);
  try {
    std::vector<NotedTier> note;
    for (const auto& tier : json) {
      note.push_back(
          {tier.at("folder"), tier.at("id"), tier.at("hosts"), tier.at("used"), tier.at("first"), tier.at("run")});
      if (!is_id(note.back().id))
        throw Error(ExitCode::data, "reading " + path.string(), "\"" + note.back().id + "\" is not an ID");
    }
    return note;
  } catch (const std::exception&) {
    throw Error(ExitCode::data, "reading " + path.string(), "it does not name fast tiers",
                "Remove it: the run then goes on from its own folder");
  }
}

void write_note(const storage::Tier& run, const std::vector<NotedTier>& note) {
  if (note.empty()) {
    fs::remove(note_path(run));
    return sync_directory(run.folder());
  }
  auto json = Json::array();
  for (const auto& tier : note)
    json.push_back({{"folder", tier.folder},
                    {"id", tier.id},
                    {"hosts", tier.hosts},
                    {"used", tier.used},
                    {"first", tier.first},
                    {"run", tier.run}});
  write_file(note_path(run), [&](File& file) {
    if (::fchmod(file.descriptor(), 0600) != 0)
      throw Error(ExitCode::retry, "setting the mode of " + file.path().string(), std::strerror(errno),
                  "Check the permissions there");
    file.append(json_text(json, 2) + "\n");
  });
}

std::string reason_to_distrust(const fs::path& folder) {
  const auto status = status_at(folder);
  if (!S_ISDIR(status.st_mode)) return "it is not a folder";
  if (status.st_uid != ::geteuid()) return "it belongs to " + user_name(status.st_uid);
  return (status.st_mode & 077) != 0 ? "other users may read or write it" : "";
}

}  // namespace muster::detail::checkpoint
