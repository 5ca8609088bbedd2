#include "doctor/shared_storage.hpp"

#include "base/text.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <optional>
#include <thread>

namespace muster::detail::doctor {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds sight_timeout{5};
constexpr double slow_after_s = 1;

struct flock whole_file() {
  struct flock range {};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  return range;
}

/// A locked file of rank 0 in a folder of its own. Both are removed when this object is destroyed.
class WrittenFile {
 public:
  explicit WrittenFile(const fs::path& storage) {
    auto name = (existing_parent(storage) / ".muster-doctor-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) return;
    folder_ = name;
    const auto path = folder_ / "file";
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    auto range = whole_file();
    if (file_ >= 0 && ::write(file_, "muster", 6) == 6 && ::fsync(file_) == 0) path_ = path;
    if (file_ >= 0) ::fcntl(file_, F_OFD_SETLK, &range);
  }
  WrittenFile(const WrittenFile&) = delete;
  WrittenFile& operator=(const WrittenFile&) = delete;
  ~WrittenFile() {
    if (file_ >= 0) ::close(file_);
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
  }
  /// Empty if the file could not be written.
  const fs::path& path() const noexcept { return path_; }

 private:
  fs::path folder_, path_;
  int file_ = -1;
};

Json look_for(const fs::path& path) {
  const auto begin = Clock::now();
  Json facts{{"path", path.parent_path().parent_path().string()},
             {"seen", false},
             {"after_s", nullptr},
             {"sees_lock", nullptr}};
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status {};
    const bool seen = file >= 0 && ::fstat(file, &status) == 0 && status.st_size == 6;
    if (seen) {
      facts["seen"] = true;
      facts["after_s"] = std::chrono::duration<double>(Clock::now() - begin).count();
      auto range = whole_file();
      if (::fcntl(file, F_OFD_GETLK, &range) == 0) facts["sees_lock"] = range.l_type != F_UNLCK;
    }
    if (file >= 0) ::close(file);
    if (seen || Clock::now() - begin > sight_timeout) return facts;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

}  // namespace

Json try_shared_storage(const Communicator& world, const fs::path& storage) {
  std::optional<WrittenFile> written;
  if (world.rank() == 0) written.emplace(storage);
  const fs::path path = world.broadcast(written ? written->path().string() : "");
  Json facts;
  if (!path.empty() && world.topology().local_rank == 0 && world.rank() != 0) facts = look_for(path);
  world.barrier();
  return facts;
}

Findings check_shared_storage(const Json& facts, const std::string& writer) {
  using enum Finding::Severity;
  if (facts.is_null()) return {};
  const auto subject = "storage " + facts.at("path").get<std::string>();
  if (facts.at("seen") == false)
    return {{to_mend, subject,
             str("a file that ", writer, " has written is not seen within ", sight_timeout.count(), " s"),
             "Choose a --storage on a file system that all nodes share"}};
  Findings findings;
  if (facts.at("after_s") > slow_after_s)
    findings.push_back({warning, subject,
                        "a file that " + writer + " has written is seen only after " +
                            formatted("%.1f s", facts.at("after_s").get<double>()),
                        "Shorten the time for which its attributes are cached (NFS: actimeo)"});
  if (facts.at("sees_lock") == false)
    findings.push_back({warning, subject,
                        "a lock of " + writer + " is not seen, so that two jobs on different hosts might use one run",
                        "Mount it with locks between nodes (Lustre: -o flock; NFS: without nolock)"});
  return findings;
}

}  // namespace muster::detail::doctor
