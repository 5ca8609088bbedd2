#include "supervise/temporary_folders.hpp"

#include "base/temporary.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace muster::detail::supervise {
namespace {

namespace fs = std::filesystem;

// A folder's name is the prefix, the process number and the suffix.
constexpr const char *prefix = "muster-run-", *suffix = "-XXXXXX";

int open_folder(const fs::path& folder) {
  return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/// Returns the process that has made the folder with this name; none if the name has another form.
std::optional<pid_t> maker_of(const std::string& name) {
  const std::string_view start = prefix;
  if (!name.starts_with(start)) return {};
  const auto dash = name.find('-', start.size());
  pid_t process = 0;
  const auto [end, error] = std::from_chars(name.data() + start.size(), name.data() + name.size(), process);
  if (error != std::errc() || end != name.data() + dash || name.size() - dash != std::strlen(suffix)) return {};
  return process;
}

/// Removes the folders of this user's dead processes if no process holds the lock of the folder.
void remove_leftovers(const fs::path& parent) {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    const auto maker = maker_of(entry.path().filename().string());
    if (!maker || ::kill(*maker, 0) == 0 || errno != ESRCH) continue;
    const int folder = open_folder(entry.path());
    struct stat found {};
    if (folder >= 0 && ::fstat(folder, &found) == 0 && found.st_uid == ::geteuid() &&
        ::flock(folder, LOCK_EX | LOCK_NB) == 0)
      fs::remove_all(entry.path(), ignored);
    if (folder >= 0) ::close(folder);
  }
}

/// Removes leftovers, makes a new folder in `parent` and locks it. Throws an Error (ExitCode::retry) if the folder
/// cannot be made or opened.
fs::path make_folder(const fs::path& parent, int& lock) {
  remove_leftovers(parent);
  for (;;) {
    auto name = (parent / str(prefix, ::getpid(), suffix)).string();
    if (::mkdtemp(name.data()) == nullptr)
      throw Error(ExitCode::retry, "making a folder in " + parent.string(), std::strerror(errno),
                  "Make room there; TMPDIR names another place than /tmp");
    lock = open_folder(name);
    if (lock < 0 && fs::exists(name))
      throw Error(ExitCode::retry, "making a folder in " + parent.string(), std::strerror(errno),
                  "Allow this process more open files (ulimit -n)");
    if (lock >= 0 && ::flock(lock, LOCK_EX | LOCK_NB) == 0 && fs::exists(name)) return name;
    if (lock >= 0) ::close(lock);  // another muster run has removed it as a leftover before it was locked
  }
}

}  // namespace

TemporaryFolders::TemporaryFolders() {
  paths_.temporary = make_folder(temporary_parent(), locks_[0]);
  try {
    paths_.shared_memory = make_folder("/dev/shm", locks_[1]);
  } catch (const Error&) {  // the ranks report the consequences
  }
}

TemporaryFolders::~TemporaryFolders() {
  std::error_code ignored;
  for (const auto& folder : {paths_.temporary, paths_.shared_memory}) fs::remove_all(folder, ignored);
  for (const int lock : locks_) ::close(lock);
}

void TemporaryFolders::empty() noexcept {
  std::error_code ignored;
  for (const auto& folder : {paths_.temporary, paths_.shared_memory})
    for (const auto& entry : fs::directory_iterator(folder, ignored)) fs::remove_all(entry.path(), ignored);
}

}  // namespace muster::detail::supervise
