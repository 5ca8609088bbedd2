#include "base/readable.hpp"
#include "doctor/checks.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

namespace muster::detail::doctor {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t speed_bytes = std::size_t{64} << 20, chunk_bytes = std::size_t{4} << 20;
constexpr std::chrono::seconds speed_test_time{3};
constexpr double little_space = 1e9, no_space = 100e6, few_inodes = 1000, slow = 20e6;

/// Returns the name of a file system's type, by its magic number (statfs(2)); empty if it is not known here.
std::string type_of(long magic) {
  static const std::map<long, const char*> names{
      {0xEF53, "ext4"},       {0x58465342, "XFS"},     {0x9123683E, "Btrfs"},  {0x01021994, "tmpfs"},
      {0x858458F6, "ramfs"},  {0x6969, "NFS"},         {0x0BD00BD0, "Lustre"}, {0x47504653, "GPFS"},
      {0x19830326, "BeeGFS"}, {0x794C7630, "overlay"}, {0x00C36400, "Ceph"},   {0xFF534D42, "CIFS"},
      {0xFE534D42, "SMB"},    {0x65735546, "FUSE"},    {0x2FC12FC1, "ZFS"},    {0x01021997, "9P"},
      {0x61636673, "ACFS"},   {0x7461636f, "OCFS2"},   {0x01161970, "GFS2"},   {0x6A656A63, "virtiofs"}};
  const auto found = names.find(magic);
  return found == names.end() ? "" : found->second;
}

/// A file descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int number() const noexcept { return number_; }

 private:
  int number_;
};

/// Records failed system calls under "problems" in the facts about a storage.
class FailedCalls {
 public:
  explicit FailedCalls(Json& facts) : facts_(facts) {}

  /// Returns true if a call has succeeded. If its `result` is negative, records the failure with errno.
  bool worked(const char* doing, int result) {
    if (result >= 0) return true;
    facts_["problems"].push_back({{"doing", doing}, {"error", errno}, {"text", std::strerror(errno)}});
    return false;
  }

 private:
  Json& facts_;
};

bool can_lock(int file) {
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_len = 1;
  return ::fcntl(file, F_OFD_SETLK, &range) == 0;
}

void try_small_files(const fs::path& folder, Json& facts, FailedCalls& failed_calls) {
  const auto first = folder / "first", second = folder / "second";
  const Descriptor file(::open(first.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!failed_calls.worked("creating a file", file.number())) return;
  if (!failed_calls.worked("writing", static_cast<int>(::write(file.number(), "muster", 6)))) return;
  failed_calls.worked("writing a file to the disk (fsync)", ::fsync(file.number()));
  struct stat status {};
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  if (::fstat(file.number(), &status) == 0)
    facts["clock_ahead_s"] = static_cast<double>(status.st_mtim.tv_sec - now.tv_sec) +
                             1e-9 * static_cast<double>(status.st_mtim.tv_nsec - now.tv_nsec);
  facts["locks"] = can_lock(file.number());
  const Descriptor other(::open(second.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!failed_calls.worked("creating a file", other.number())) return;
  failed_calls.worked("renaming a file over another one", ::rename(first.c_str(), second.c_str()));
  const Descriptor whole(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (failed_calls.worked("opening a folder", whole.number()))
    failed_calls.worked("writing a folder to the disk (fsync)", ::fsync(whole.number()));
}

void try_speed(const fs::path& folder, Json& facts, FailedCalls& failed_calls) {
  const auto path = folder / "large";
  Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!failed_calls.worked("creating a file", file.number())) return;
  ::unlink(path.c_str());  // so that the file is not left if this process is killed
  const std::unique_ptr<std::byte, decltype(&std::free)> chunk(
      static_cast<std::byte*>(std::aligned_alloc(4096, chunk_bytes)), std::free);
  if (chunk == nullptr) return;
  for (std::size_t i = 0; i < chunk_bytes; ++i)  // not zeros, since some file systems do not store them
    chunk.get()[i] = static_cast<std::byte>(i * 2654435761U >> 13);
  const int flags = ::fcntl(file.number(), F_GETFL);
  bool direct = ::fcntl(file.number(), F_SETFL, flags | O_DIRECT) == 0;
  const auto begin = Clock::now();
  std::size_t written = 0;
  while (written < speed_bytes && Clock::now() - begin < speed_test_time) {
    const auto count = ::pwrite(file.number(), chunk.get(), chunk_bytes, static_cast<off_t>(written));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct) {
      direct = false;
      ::fcntl(file.number(), F_SETFL, flags);
      continue;
    }
    if (!failed_calls.worked("writing 64 MB", static_cast<int>(std::min<ssize_t>(count, 1)))) return;
    written += static_cast<std::size_t>(count);
  }
  if (!failed_calls.worked("writing 64 MB to the disk (fsync)", ::fsync(file.number()))) return;
  facts["direct"] = direct;
  const std::chrono::duration<double> took = Clock::now() - begin;
  facts["write_bytes_per_s"] = std::llround(static_cast<double>(written) / std::max(1e-9, took.count()));
}

}  // namespace

Finding::Severity severity_of(int error) {
  constexpr std::array may_pass{ENOSPC,       EDQUOT,   EIO,    ESTALE, ETIMEDOUT, EHOSTDOWN,
                                EHOSTUNREACH, ENOTCONN, EMFILE, ENFILE, ENOMEM,    EAGAIN};
  return std::ranges::find(may_pass, error) != may_pass.end() ? Finding::Severity::may_pass
                                                              : Finding::Severity::to_mend;
}

fs::path existing_parent(const fs::path& path) {
  std::error_code error;
  auto place = fs::absolute(path, error).lexically_normal();
  while (place.has_relative_path() && !fs::exists(place, error) && !error) place = place.parent_path();
  return place;
}

Json look_at_storage(const fs::path& path) {
  const auto place = existing_parent(path);
  std::error_code none;
  const auto wanted = fs::absolute(path, none).lexically_normal();
  Json facts{{"wanted", wanted.string()},
             {"parent_exists", place == wanted || place == wanted.parent_path()},
             {"path", place.string()},
             {"type", nullptr},
             {"free_bytes", nullptr},
             {"free_inodes", nullptr},
             {"locks", nullptr},
             {"direct", nullptr},
             {"clock_ahead_s", nullptr},
             {"problems", Json::array()},
             {"write_bytes_per_s", nullptr}};
  FailedCalls failed_calls(facts);
  struct statfs type {};
  struct statvfs space {};
  if (!failed_calls.worked("looking at the file system", ::statfs(place.c_str(), &type)) ||
      !failed_calls.worked("looking at the file system", ::statvfs(place.c_str(), &space)))
    return facts;
  facts["type"] = type_of(type.f_type);
  facts["free_bytes"] = space.f_bavail * space.f_frsize;
  // Some file systems make inodes when they are needed and report 0.
  if (space.f_files > 0) facts["free_inodes"] = space.f_favail;
  auto name = (place / ".muster-doctor-XXXXXX").string();
  if (!failed_calls.worked("making a folder", ::mkdtemp(name.data()) == nullptr ? -1 : 0)) return facts;
  try_small_files(name, facts, failed_calls);
  if (facts["problems"].empty()) try_speed(name, facts, failed_calls);
  std::error_code error;
  fs::remove_all(name, error);
  if (error)
    facts["problems"].push_back({{"doing", "removing a folder"}, {"error", error.value()}, {"text", error.message()}});
  return facts;
}

Findings check_storage(const Json& facts) {
  using enum Finding::Severity;
  const auto wanted = facts.at("wanted").get<std::string>(), place = facts.at("path").get<std::string>();
  const auto subject = "storage " + wanted;
  const auto number = [&](const char* key, double missing) {
    return facts.at(key).is_number() ? facts.at(key).get<double>() : missing;
  };
  Findings findings;
  for (const auto& problem : facts.at("problems")) {
    const auto severity = severity_of(problem.at("error"));
    findings.push_back(
        {severity, subject,
         problem.at("doing").get<std::string>() + " in " + place + ": " + problem.at("text").get<std::string>(),
         severity == may_pass
             ? "Free some space there, have the disk or the file server looked at, or choose another --storage"
             : "Choose a --storage that this user may write to, or have the permission given"});
  }
  if (!findings.empty()) return findings;
  const auto type = facts.at("type").is_string() ? facts.at("type").get<std::string>() : "";
  const auto free = number("free_bytes", 0), inodes = number("free_inodes", few_inodes);
  const auto speed = number("write_bytes_per_s", slow), ahead = number("clock_ahead_s", 0);
  if (facts.at("parent_exists") == false)
    findings.push_back({warning, subject,
                        "of its folders only " + place + " is there, and the others would be made in it",
                        "Check the name, and that the file system is mounted"});
  if (free < little_space)
    findings.push_back({free < no_space ? may_pass : warning, subject, "only " + bytes_text(free) + " are free",
                        "Free some space there, or choose another --storage"});
  if (inodes < few_inodes)
    findings.push_back({warning, subject, str("only ", static_cast<long>(inodes), " more files fit (inodes)"),
                        "Remove files there, or choose another --storage"});
  if (facts.at("locks") == false)
    findings.push_back({warning, subject,
                        "the file system has no locks, so that muster uses a lease and cannot tell whether a job of "
                        "another host has ended",
                        "Mount it with locks (Lustre: -o flock), or choose another --storage"});
  if (type == "tmpfs" || type == "ramfs")
    findings.push_back({warning, subject, "it is in memory (" + type + "), and is lost when the node starts again",
                        "Choose a --storage on a disk"});
  if (ahead > 1 || ahead < -1)
    findings.push_back({warning, subject,
                        formatted("the clock of its server is %.1f s %s this node's", std::abs(ahead),
                                  ahead > 0 ? "ahead of" : "behind"),
                        "Have the clocks set by NTP"});
  if (speed < slow)
    findings.push_back({warning, subject, "it takes " + bytes_text(speed) + "/s",
                        "Choose a faster --storage, or save behind training (async_save)"});
  if (findings.empty())
    findings.push_back({ok, subject,
                        (place == wanted ? "" : "made in " + place + ", ") + (type.empty() ? "" : type + ", ") +
                            bytes_text(free) + " free, takes " + bytes_text(speed) + "/s" +
                            (facts.at("direct") == true ? " past the cache" : "")});
  return findings;
}

}  // namespace muster::detail::doctor
