#include "run/run_lock.hpp"

#include "base/host.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/number.hpp"
#include "checkpoint/files/manifest.hpp"
#include "comm/wait.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

namespace muster::detail::run {
namespace {

constexpr auto patience_with_others = std::chrono::seconds(10);
constexpr off_t byte_of_root = 0, byte_of_ranks = 1;
constexpr std::string_view lease_prefix = ".lease.";
constexpr std::uint64_t longest_record = 64 << 20;

/// Calls fcntl with `command` on one byte of the file. Returns F_UNLCK if no lock of another process conflicts;
/// otherwise, for F_OFD_GETLK, the type of that lock, and for F_OFD_SETLK, F_WRLCK. Returns nothing if the file system
/// has no locks.
std::optional<short> lock_byte(const File& file, int command, short type, off_t byte) {
  struct flock range {};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = byte;
  range.l_len = 1;
  int status;
  do status = ::fcntl(file.descriptor(), command, &range);
  while (status != 0 && errno == EINTR);
  if (status == 0) return command == F_OFD_GETLK ? range.l_type : F_UNLCK;
  if (errno == EAGAIN || errno == EACCES) return F_WRLCK;
  return {};
}
/// True if the byte is locked now, or if the file system has no locks.
bool try_lock(const File& file, short type, off_t byte) {
  return lock_byte(file, F_OFD_SETLK, type, byte).value_or(F_UNLCK) == F_UNLCK;
}

/// The lock files that this process has open. A child of fork() would share them and keep the folder locked as long as
/// it lives, so in the child each descriptor is redirected to /dev/null. That code only makes calls that are safe after
/// fork().
class LockFiles {
 public:
  static void add(int descriptor) {
    static std::once_flag registered;
    std::call_once(registered, [] { ::pthread_atfork(nullptr, nullptr, close_in_child); });
    replace(0, descriptor + 1);
  }
  static void remove(int descriptor) noexcept { replace(descriptor + 1, 0); }

 private:
  static void replace(int before, int after) noexcept {
    for (auto& slot : slots)
      if (int expected = before; slot.compare_exchange_strong(expected, after)) return;
  }
  static void close_in_child() {
    const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    for (auto& slot : slots)
      if (const int value = slot.exchange(0); value > 0) ::dup3(null, value - 1, O_CLOEXEC);
    ::close(null);
  }

  /// Each element is a descriptor + 1, or 0. There is one element for each run that this process has open.
  static inline std::array<std::atomic<int>, 64> slots{};
};

/// Returns the start time of a process in the kernel's clock ticks; empty if the process does not exist or has ended.
std::string start_of(const std::string& process) {
  const auto text = first_line("/proc/" + process + "/stat");
  std::istringstream after_name(text.substr(std::min(text.size(), text.rfind(')') + 1)));
  std::vector<std::string> fields(20);  // the third field, the state, to the 22nd, the start time
  for (auto& field : fields) after_name >> field;
  return fields[0] == "Z" || fields[0] == "X" ? "" : fields[19];
}

/// Returns the ids of the kernel's boot and of the process namespace. Within both, a process id is unique.
std::string this_pid_namespace() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::error_code error;
  return boot + " " + std::filesystem::read_symlink("/proc/self/ns/pid", error).string();
}

std::string this_job() {
  auto text = str(host_name(), ", process ", ::getpid(), ", since ", checkpoint::time_now());
  if (const auto job = value_of("SLURM_JOB_ID"); !job.empty()) text += ", Slurm job " + job;
  return text;
}

Json record_of_this_job(const std::vector<std::string>& processes) {
  return {{"holder", this_job()},
          {"processes", processes},
          {"supervisor", value_of(launch::variable::id)},  // not by supervisor(), which is empty in a sweep's trials
          {"slurm_job", value_of("SLURM_JOB_ID")},
          {"slurm_restarts", std::atoi(value_of("SLURM_RESTART_COUNT").c_str())}};
}

/// What .lock or a lease says about a job.
struct Record {
  std::string holder = "a job that has not written its name yet";
  enum class State { ended, running, unknown } state = State::unknown;
  /// True for an earlier start of this job, which `muster run` or Slurm has restarted; its last processes are about to
  /// end.
  bool earlier_start = false;
};

Record read_record(const std::filesystem::path& path) {
  Record record;
  const auto text = read_file(path, longest_record);
  const auto json = json_if_valid(text).value_or(Json());
  try {
    const auto processes = json.at("processes").get<std::vector<std::string>>();
    if (!processes.empty()) record.holder = json.at("holder").get<std::string>();
    const auto job = json.value("slurm_job", ""), supervisor = json.value("supervisor", "");
    if (!job.empty() && job == value_of("SLURM_JOB_ID") &&
        json.value("slurm_restarts", 0) < std::atoi(value_of("SLURM_RESTART_COUNT").c_str())) {
      record.state = Record::State::ended;
      record.earlier_start = true;
      return record;
    }
    record.earlier_start = !supervisor.empty() && supervisor == value_of(launch::variable::id) &&
                           std::ranges::find(processes, RunLock::this_process()) == processes.end();
    const auto own_namespace = this_pid_namespace();
    bool known = true, running = false;
    for (const auto& process : processes) {
      std::istringstream words(process);
      std::string boot, pid_namespace, number, start;
      words >> boot >> pid_namespace >> number >> start;
      if (boot + " " + pid_namespace != own_namespace)
        known = false;
      else if (!start.empty() && start_of(number) == start)
        running = true;
    }
    // A supervisor ends the ranks on all nodes before it restarts them, so processes on other nodes have ended.
    known = known || record.earlier_start;
    record.state = running ? Record::State::running : known ? Record::State::ended : Record::State::unknown;
  } catch (const Json::exception&) {
    if (!text.empty()) record.holder = text;
  }
  return record;
}

[[noreturn]] void refuse(const std::filesystem::path& folder, const Record& record, const std::string& remedy = {}) {
  throw Error(ExitCode::usage, "opening the run " + folder.string(), "another job is using it (" + record.holder + ")",
              "Wait for it, or choose another --name" + remedy);
}

/// Returns the number in a lease's name; 0 for any other file.
int number_of(const std::string& name) {
  return name.starts_with(lease_prefix) ? parse_number<int>(name.substr(lease_prefix.size())).value_or(0) : 0;
}

std::vector<int> leases_in(const std::filesystem::path& folder) {
  std::vector<int> numbers;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (const int number = number_of(entry.path().filename().string()); number > 0) numbers.push_back(number);
  std::ranges::sort(numbers);
  return numbers;
}

std::filesystem::path lease_of(const std::filesystem::path& folder, int number) {
  return folder / str(lease_prefix, number);
}

}  // namespace

std::string RunLock::this_process() {
  const auto number = std::to_string(::getpid());
  return this_pid_namespace() + " " + number + " " + start_of(number);
}

RunLock::RunLock(const std::filesystem::path& folder, bool is_root, std::chrono::milliseconds patience,
                 std::function<void(std::chrono::milliseconds)> on_wait)
    : folder_(folder), patience_(patience), on_wait_(std::move(on_wait)), is_root_(is_root) {
  const auto path = folder_ / ".lock";
  const auto exists = [&] {  // true for a symbolic link, too, even if its target does not exist
    return std::filesystem::exists(std::filesystem::symlink_status(path));
  };
  if (!exists()) {
    try {
      File(path, File::Mode::create).close();
    } catch (const Error&) {
      if (!exists()) throw;  // another job has just created it; the lock decides
    }
  }
  file_.emplace(path, File::Mode::write);
  LockFiles::add(file_->descriptor());
  try {
    is_root_ ? lock_exclusive() : lock_shared();
  } catch (...) {
    LockFiles::remove(file_->descriptor());
    throw;
  }
}

std::pair<std::uint64_t, std::uint64_t> RunLock::identity() const noexcept {
  struct stat status {};
  if (::stat(folder_.c_str(), &status) != 0) return {};
  return {status.st_dev, status.st_ino};
}

bool RunLock::is_gone() const noexcept {
  struct stat there {};
  return ::stat(folder_.c_str(), &there) != 0 && errno == ENOENT && ::stat(folder_.parent_path().c_str(), &there) == 0;
}

bool RunLock::is_replaced() const noexcept {
  const auto now = identity();
  return now != decltype(now){} && now != identity_;
}

bool RunLock::is_lock_replaced() const noexcept {
  struct stat locked {
  }, now{};
  return file_ && ::fstat(file_->descriptor(), &locked) == 0 && ::stat((folder_ / ".lock").c_str(), &now) == 0 &&
         (locked.st_dev != now.st_dev || locked.st_ino != now.st_ino);
}

void RunLock::wait(bool for_earlier_start, const std::string& holder, const std::function<bool()>& done) const {
  const auto ranks = "ranks of the job that had it (" + holder + ")";
  comm::WaitTime time;
  const std::chrono::milliseconds most = for_earlier_start ? patience_ : patience_with_others;
  for (bool logged = false; !done(); logged = true) {
    if (time.until() > most)
      throw Error(for_earlier_start ? ExitCode::retry : ExitCode::usage, "opening the run " + folder_.string(),
                  ranks + " are still there",
                  for_earlier_start ? "They may wait for a device or a file system; end them, then start it again"
                                    : "End them, or choose another --name");
    if (!logged) {
      log::info("waiting for the " + ranks + " to end");
      if (on_wait_) on_wait_(most);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void RunLock::lock_exclusive() {
  const auto path = folder_ / ".lock";
  const auto taken = lock_byte(*file_, F_OFD_SETLK, F_WRLCK, byte_of_root);
  sees_root_lock_ = taken.has_value();
  if (!sees_root_lock_) return static_cast<void>(require_free());
  const auto before = read_record(path);
  if (*taken != F_UNLCK && !before.earlier_start) refuse(folder_, before);
  wait(before.earlier_start, before.holder,
       [&] { return try_lock(*file_, F_WRLCK, byte_of_root) && try_lock(*file_, F_WRLCK, byte_of_ranks); });
  lock_shared();
  const auto text = json_text(record_of_this_job({this_process()})) + "\n";
  File record(path, File::Mode::write);  // closed afterwards, so that NFS shows it to other nodes
  record.truncate(0);
  record.write_at(std::as_bytes(std::span(text)), 0);
  record.close();
}

void RunLock::lock_shared() {
  if (!try_lock(*file_, F_RDLCK, byte_of_ranks))
    throw Error(ExitCode::usage, "opening the run " + folder_.string(), "another job has taken it from this one",
                "Find out why rank 0 has ended");
  if (is_root_) return;
  sees_root_lock_ = lock_byte(*file_, F_OFD_GETLK, F_WRLCK, byte_of_root).value_or(F_UNLCK) != F_UNLCK;
  // Rank 0 may be on another node, where it could not see whether the lease's processes on this node have ended.
  if (const auto leases = leases_in(folder_); !sees_root_lock_ && !leases.empty())
    wait_for_earlier_start(lease_of(folder_, leases.back()));
}

void RunLock::wait_for_earlier_start(const std::filesystem::path& record) const {
  const auto before = read_record(record);
  const auto ended = [&] { return read_record(record).state != Record::State::running; };
  if (before.earlier_start) wait(/*for_earlier_start=*/true, before.holder, ended);
}

std::vector<int> RunLock::require_free() const {
  const auto check = [&](const std::filesystem::path& path) {
    wait_for_earlier_start(path);
    const auto record = read_record(path);
    if (record.state == Record::State::running) refuse(folder_, record);
    if (record.state == Record::State::unknown)
      refuse(folder_, record,
             ". This file system has no locks, so this job cannot see whether that one has ended. If it has, remove " +
                 path.string());
  };
  // Locks may work only within a node. Then a job on another node may have written .lock.
  if (!sees_root_lock_ && file_->size() > 0) check(folder_ / ".lock");
  const auto leases = leases_in(folder_);
  if (!leases.empty()) check(lease_of(folder_, leases.back()));
  return leases;
}

void RunLock::take_lease(const std::vector<std::string>& processes) {
  for (;;) {
    const auto before = require_free();
    const auto next = lease_of(folder_, before.empty() ? 1 : before.back() + 1);
    try {
      File file(next, File::Mode::create);
      lease_ = next;
      file.append(json_text(record_of_this_job(processes)) + "\n");
      file.sync();
      file.close();
    } catch (const Error&) {
      if (!lease_.empty() || !std::filesystem::exists(status_of(next))) throw;
      continue;  // another job has just created it
    }
    for (const int number : before) ::unlink(lease_of(folder_, number).c_str());
    return;
  }
}

RunLock::~RunLock() {
  try {
    // Keep the last lease, emptied, so that its number is never used again.
    if (!lease_.empty()) write_file(lease_, "{\"processes\": []}\n");
    if (is_root_ && file_ && sees_root_lock_) file_->truncate(0);
  } catch (const std::exception& error) {
    log::warn("releasing the run " + folder_.string() + ": " + error.what());
  }
  if (!file_) return;
  for (const off_t byte : {byte_of_root, byte_of_ranks}) lock_byte(*file_, F_OFD_SETLK, F_UNLCK, byte);
  LockFiles::remove(file_->descriptor());
}

}  // namespace muster::detail::run
