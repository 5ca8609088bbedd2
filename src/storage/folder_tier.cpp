#include "storage/folder_tier.hpp"

#include "base/direct.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "muster/error.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace muster::detail::storage {
namespace {

namespace fs = std::filesystem;

/// Files of at least this size bypass the page cache if they are opened for it (Alignment::direct), and their disk
/// space is reserved in advance, except in a NodeTier. Smaller files stay in the page cache, from which a restarted run
/// reads them quickly.
constexpr std::uint64_t min_direct_bytes = 16 << 20;

[[noreturn]] void fail(const std::string& doing) {
  throw Error(ExitCode::retry, doing, std::strerror(errno), "Check the space and the permissions there");
}

/// The path of a file in a checkpoint. Creates the folders in the file's name, which publish() syncs. Does not create
/// the checkpoint's folder: if it is gone, the user has removed the run, which must not appear again.
fs::path path_in(const fs::path& checkpoint, const fs::path& name) {
  auto folder = checkpoint;
  for (const auto& part : name.parent_path())
    if (::mkdir((folder /= part).c_str(), 0777) != 0 && errno != EEXIST) fail("making the folder " + folder.string());
  return checkpoint / name;
}

class OpenFile : public SavedFile {
 public:
  OpenFile(const fs::path& path, Alignment alignment) : file_(path, File::Mode::write) {
    if (alignment == Alignment::direct && file_.size() >= min_direct_bytes) write_directly(file_);
  }
  void write_at(std::span<const std::byte> from, std::uint64_t offset) override { file_.write_at(from, offset); }
  void finish() override {
    file_.sync();
    file_.close();
  }

 private:
  File file_;
};

}  // namespace

fs::path FolderTier::saving(int index) const { return folder() / ("." + name_of(index) + ".saving"); }
fs::path FolderTier::pruning(int index) const { return folder() / ("." + name_of(index) + ".pruning"); }

Tier::Listing FolderTier::list() const {
  // While a job publishes and removes checkpoints, one listing may miss all of them: a new one may appear in a part of
  // the folder that was read already, and an old one may be gone before its type is known.
  constexpr int most_listings = 8;
  auto listing = list_once();
  for (int i = 1; i < most_listings && listing.published.empty(); ++i) listing = list_once();
  return listing;
}

Tier::Listing FolderTier::list_once() const {
  Listing listing;
  std::error_code error;
  for (fs::directory_iterator at(folder(), error), end; !error && at != end; at.increment(error)) {
    const auto name = at->path().filename().string();
    const auto index = leading_index(std::string_view(name).substr(name.starts_with('.') ? 1 : 0));
    if (!index) continue;
    const auto type = status_of(at->path()).type();
    if (type == fs::file_type::not_found) continue;  // gone meanwhile
    const bool is_folder = type == fs::file_type::directory;
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
    throw Error(read_error_code(error.value()), "looking for checkpoints in " + folder().string(), error.message(),
                "Check the path");
  return listing;
}

void FolderTier::begin(int index) {
  const auto path = saving(index);
  remove_folder(path);
  struct stat status {};
  if (::mkdir(path.c_str(), 0777) != 0 || ::stat(path.c_str(), &status) != 0 || ::chmod(path.c_str(), 0700) != 0)
    fail("making the folder " + path.string());
  mode_ = status.st_mode & 07777;
}

void FolderTier::create(int index, const std::string& name, std::uint64_t bytes) const {
  create_file(path_in(saving(index), name), bytes);
}

std::unique_ptr<SavedFile> FolderTier::open(int index, const std::string& name, Alignment alignment) const {
  return open_file(saving(index) / name, alignment);
}

void FolderTier::publish(int index) const {
  const auto from = saving(index), to = published(index);
  sync_folders(from);
  if (::chmod(from.c_str(), mode_) != 0) fail("setting the mode of " + from.string());
  rename_new(from, to);
  try {
    sync_directory(folder());
  } catch (...) {
    std::error_code ignored;
    fs::rename(to, from, ignored);
    throw;
  }
}

void FolderTier::abandon(int index) const noexcept { remove_folder(saving(index)); }

fs::path FolderTier::quarantine(int index) const {
  const auto from = published(index);
  auto to = fs::path(from) += ".damaged";
  for (int n = 1; fs::exists(status_of(to)); ++n) to = fs::path(from) += str(".damaged.", n);
  rename_new(from, to);
  sync_directory(folder());
  return to;
}

bool FolderTier::unquarantine(int index, const fs::path& damaged) const {
  const auto to = published(index);
  if (fs::exists(status_of(to))) return false;
  rename_new(damaged, to);
  sync_directory(folder());
  return true;
}

void FolderTier::set_name(int index, const std::string& name) const {
  const auto checkpoint = name_of(index);
  const auto to = folder() / name, unfinished = folder() / ("." + name + ".naming");
  std::error_code ignored;
  if (fs::read_symlink(to, ignored) == checkpoint) return;
  fs::remove(unfinished, ignored);  // a killed job may have left it
  // rename(2) would replace a file, and fails for a folder without saying what is in the way.
  if (fs::exists(status_of(to)) && !fs::is_symlink(status_of(to)))
    throw Error(ExitCode::retry, "naming " + checkpoint + " " + to.string(), "a file or folder with that name is there",
                "Remove it, or choose another name");
  if (::symlink(checkpoint.c_str(), unfinished.c_str()) != 0 || ::rename(unfinished.c_str(), to.c_str()) != 0)
    fail("naming " + checkpoint + " " + to.string());
  sync_directory(folder());
}

std::vector<std::string> FolderTier::names(int index) const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder(), error), end; !error && at != end; at.increment(error))
    if (std::error_code none; at->is_symlink(none) && fs::read_symlink(at->path(), none) == name_of(index))
      names.push_back(at->path().filename());
  return names;
}

void FolderTier::remove_name(const std::string& name) const noexcept {
  std::error_code ignored;
  if (fs::is_symlink(folder() / name, ignored)) fs::remove(folder() / name, ignored);
}

void FolderTier::remove(int index) const {
  for (const auto& name : names(index)) remove_name(name);
  const auto hidden = pruning(index);
  remove_folder(hidden);
  rename_new(published(index), hidden);
  remove_folder(hidden);
}

void FolderTier::remove_unfinished() const {
  for (const auto& folder : list().unfinished) remove_folder(folder);
}

void sync_folders(const fs::path& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    if (status_of(at->path()).type() == fs::file_type::directory) sync_directory(at->path());
  if (error)
    throw Error(ExitCode::retry, "syncing " + folder.string(), error.message(),
                "Check the disk or the file server, then try again");
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

void NodeTier::create(int index, const std::string& name, std::uint64_t bytes) const {
  create_file(path_in(saving(index), name), bytes, /*with_space=*/false);
}

void NodeTier::abandon(int index) const noexcept {
  FolderTier::abandon(index);
  try {
    if (list().published.contains(index)) remove(index);
  } catch (const std::exception& error) {
    log::warn(str("removing a checkpoint that another node could not publish: ", error.what()));
  }
}

void create_file(const fs::path& path, std::uint64_t bytes, bool with_space) {
  File file(path, File::Mode::create);
  with_space&& bytes >= min_direct_bytes ? allocate(file, bytes) : file.truncate(bytes);
  file.close();
}

std::unique_ptr<SavedFile> open_file(const fs::path& path, Alignment alignment) {
  return std::make_unique<OpenFile>(path, alignment);
}

}  // namespace muster::detail::storage
