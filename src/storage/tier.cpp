#include "storage/tier.hpp"

#include "base/file.hpp"
#include "base/log.hpp"
#include "muster/error.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string_view>

namespace muster::detail::storage {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view prefix = "checkpoint_";

std::string name_of(int index) {
  char digits[16];
  std::snprintf(digits, sizeof digits, "%06d", index);
  return std::string(prefix) + digits;
}

/// Returns the number after the prefix of a name; none if there is none.
std::optional<int> leading_index(std::string_view name) {
  if (!name.starts_with(prefix)) return {};
  name = name.substr(prefix.size(), 9);  // as many digits as Tier::max_index has
  int index = 0;
  if (std::from_chars(name.data(), name.data() + name.size(), index).ec != std::errc{} || index < 0) return {};
  return index;
}

[[noreturn]] void fail(const std::string& doing) {
  throw Error(ExitCode::retry, doing, std::strerror(errno), "Check the space and the permissions there");
}

}  // namespace

fs::path Tier::published(int index) const { return folder_ / name_of(index); }
fs::path Tier::saving(int index) const { return folder_ / ("." + name_of(index) + ".saving"); }
fs::path Tier::pruning(int index) const { return folder_ / ("." + name_of(index) + ".pruning"); }

std::optional<int> Tier::index_of(const std::string& name) {
  const auto index = leading_index(name);
  return index && name == name_of(*index) ? index : std::nullopt;
}

Tier::Listing Tier::list() const {
  Listing listing;
  std::error_code error;
  for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    const auto index = leading_index(std::string_view(name).substr(name.starts_with('.') ? 1 : 0));
    if (!index) continue;
    const bool is_folder = status_of(at->path()).type() == fs::file_type::directory;
    if (!is_folder && name == name_of(*index))
      listing.others.push_back(at->path());
    else if (!is_folder)
      continue;
    else if (name == name_of(*index))
      listing.published.emplace(*index, at->path());
    else if (name == saving(*index).filename() || name == pruning(*index).filename())
      listing.unfinished.push_back(at->path());
    else if (name.starts_with(name_of(*index) + ".damaged"))
      listing.damaged.emplace(*index, at->path());
    else
      continue;
    listing.indices.insert(*index);
  }
  if (error)
    throw Error(read_error_code(error.value()), "looking for checkpoints in " + folder_.string(), error.message(),
                "Check the path");
  return listing;
}

void Tier::begin(int index) {
  abandon(index);
  const auto path = saving(index);
  struct stat status {};
  if (::mkdir(path.c_str(), 0777) != 0 || ::stat(path.c_str(), &status) != 0 || ::chmod(path.c_str(), 0700) != 0)
    fail("making the folder " + path.string());
  mode_ = status.st_mode & 07777;
}

void Tier::publish(int index) const {
  const auto from = saving(index), to = published(index);
  sync_folders(from);
  if (::chmod(from.c_str(), mode_) != 0) fail("setting the mode of " + from.string());
  rename_new(from, to);
  try {
    sync_directory(folder_);
  } catch (...) {
    std::error_code ignored;
    fs::rename(to, from, ignored);
    throw;
  }
}

void Tier::abandon(int index) const noexcept { remove_folder(saving(index)); }

fs::path Tier::quarantine(int index) const {
  const auto from = published(index);
  auto to = fs::path(from) += ".damaged";
  for (int n = 1; fs::exists(status_of(to)); ++n) to = fs::path(from) += ".damaged." + std::to_string(n);
  rename_new(from, to);
  sync_directory(folder_);
  return to;
}

bool Tier::unquarantine(int index, const fs::path& damaged) const {
  const auto to = published(index);
  if (fs::exists(status_of(to))) return false;
  rename_new(damaged, to);
  sync_directory(folder_);
  return true;
}

void Tier::link_name(const std::string& checkpoint, const std::string& name) const {
  const auto to = folder_ / name, unfinished = folder_ / ("." + name + ".naming");
  std::error_code ignored;
  if (fs::read_symlink(to, ignored) == checkpoint) return;
  fs::remove(unfinished, ignored);  // a killed job may have left it
  // rename(2) would replace a file, and fails for a folder without saying what is in the way.
  if (fs::exists(status_of(to)) && !fs::is_symlink(status_of(to)))
    throw Error(ExitCode::retry, "naming " + checkpoint + " " + to.string(), "a file or folder with that name is there",
                "Remove it, or choose another name");
  if (::symlink(checkpoint.c_str(), unfinished.c_str()) != 0 || ::rename(unfinished.c_str(), to.c_str()) != 0)
    fail("naming " + checkpoint + " " + to.string());
  sync_directory(folder_);
}

std::vector<fs::path> Tier::links_to(int index) const {
  std::vector<fs::path> names;
  std::error_code error;
  for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error))
    if (std::error_code none; at->is_symlink(none) && fs::read_symlink(at->path(), none) == name_of(index))
      names.push_back(at->path());
  return names;
}

void Tier::remove(int index) const {
  std::error_code ignored;
  for (const auto& name : links_to(index)) fs::remove(name, ignored);
  const auto hidden = pruning(index);
  remove_folder(hidden);
  rename_new(published(index), hidden);
  remove_folder(hidden);
}

void Tier::remove_unfinished() const {
  for (const auto& folder : list().unfinished) remove_folder(folder);
}

void sync_folders(const fs::path& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (status_of(at->path()).type() == fs::file_type::directory) sync_directory(at->path());
  if (error) throw Error(ExitCode::retry, "syncing " + folder.string(), error.message());
  sync_directory(folder);
}

void remove_folder(const fs::path& folder) noexcept {
  try {
    std::error_code error;
    fs::remove_all(folder, error);
    if (error) log::warn("removing " + folder.string() + ": " + error.message());
  } catch (...) {
    // Out of memory. The next start removes what is left.
  }
}

}  // namespace muster::detail::storage
