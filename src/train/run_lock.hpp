// One job has a run's folder.
//
// Rank 0 locks a byte of STORAGE/NAME/.lock for itself, and every rank shares another: a job whose rank 0 was killed
// has the folder until the last rank that may still write has ended. The locks are those of open files. The kernel
// gives them up when a process ends, however it ends; over NFS and Lustre (mounted with -o flock) they hold between
// nodes. The file says who has the folder.
//
// Where the file system keeps no locks, or only within a node, a lease stands in: .lease.N names every process of the
// job. The next job makes .lease.N+1, once all of those are seen to have ended. They are seen on their own host; those
// of others have ended where Slurm or the same `muster run` has started the job again, or where a person has removed
// the file. Nobody replaces a lease, so of two jobs that want the next one gets it.
#pragma once

#include "base/file.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::train {

class RunLock {
 public:
  /// Rank 0 first, before anything is written: an Error (ExitCode::usage) that names the holder if another job has the
  /// folder. What is left of a job without its rank 0 is waited for, some seconds. Then every other rank.
  /// Ranks of an earlier start of this same job, by `muster run` or by Slurm, are waited for as long as `patience`: a
  /// file server may keep the lock of a node that is lost, a process may wait for a device. After that it is an Error
  /// (ExitCode::retry).
  RunLock(const std::filesystem::path& folder, bool is_root,
          std::chrono::milliseconds patience = std::chrono::minutes(5));
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  ~RunLock();

  /// Whether rank 0's lock is seen from here.
  bool holds() const noexcept { return holds_; }
  /// True if another folder than the locked one is at its path now. False if there is none; whoever writes there says
  /// so.
  bool is_replaced() const noexcept;
  /// True if another .lock than the locked one is in the folder now: somebody has removed it, and another job may have
  /// taken the folder. False if there is none.
  bool is_lock_replaced() const noexcept;
  /// By rank 0, where the lock does not hold for all: takes the lease for those processes, or an Error as above.
  void take_lease(const std::vector<std::string>& processes);
  /// What this process is called in a lease.
  static std::string this_process();

 private:
  void own();
  void share();
  /// Returns when `done` is true, which it asks again and again, or throws the Errors of the constructor.
  void wait(bool for_earlier_start, const std::string& holder, const std::function<bool()>& done) const;
  /// Until the processes of this node have ended that a record names, if it is of an earlier start of this job.
  void wait_for_earlier_start(const std::filesystem::path& record) const;
  /// The numbers of the leases that there are; an Error if the last one's job may be running.
  std::vector<int> require_free() const;

  /// The folder's device and inode; zeros where there is none.
  std::pair<std::uint64_t, std::uint64_t> identity() const noexcept;

  std::filesystem::path folder_, lease_ = {};
  std::pair<std::uint64_t, std::uint64_t> identity_ = identity();
  std::chrono::milliseconds patience_;
  bool is_root_, holds_ = false;
  std::optional<File> file_ = {};
};

}  // namespace muster::detail::train
