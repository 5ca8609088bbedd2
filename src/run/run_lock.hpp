// The lock of a run's folder: only one job uses the folder at a time.
//
// Rank 0 holds an exclusive lock on one byte of STORAGE/NAME/.lock, and every rank holds a shared lock on another byte.
// So if rank 0 was killed, its job keeps the folder until the last rank that may still write has ended. The locks
// belong to open file descriptions: the kernel releases them when a process ends, however it ends. On NFS and on Lustre
// (mounted with -o flock) they work between nodes. The file's contents tell which job holds the folder. A child of
// fork() does not hold its parent's locks.
//
// If the file system has no locks, or only within a node, a lease replaces them: the file .lease.N lists all processes
// of the job. The next job creates .lease.N+1 when all these processes have ended. A job can only check processes on
// its own host. Processes on other hosts count as ended if Slurm or the same `muster run` has restarted the job, or if
// somebody has removed the file. A lease is created but never replaced, so if two jobs want to create the next one,
// only one succeeds.
#pragma once

#include "base/export.hpp"
#include "base/file.hpp"

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace muster::detail::run {

class RunLock {
 public:
  static constexpr std::chrono::milliseconds default_patience = std::chrono::minutes(5);

  /// Takes the lock: on rank 0 first, before anything is written, then on every other rank. If another job has the
  /// folder, throws an Error (ExitCode::usage) that names that job; if that job's rank 0 has already ended, first waits
  /// some seconds for its other ranks. If it was an earlier start of this job (by `muster run` or Slurm), waits up to
  /// `patience` for its ranks, since a file server may keep the lock of a lost node and a process may wait for a
  /// device; then throws an Error (ExitCode::retry). Calls `on_wait` before it waits, with the longest time that this
  /// may take.
  RunLock(const std::filesystem::path& folder, bool is_root, std::chrono::milliseconds patience = default_patience,
          std::function<void(std::chrono::milliseconds)> on_wait = {});
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;
  MUSTER_INTERNAL_API ~RunLock();

  /// True if this rank sees rank 0's lock. False if the file system has no locks, or none between the nodes of the two.
  bool sees_root_lock() const noexcept { return sees_root_lock_; }
  /// True if the folder was removed or renamed, and nothing is at its path now.
  bool is_gone() const noexcept;
  /// True if another folder is at the locked folder's path now.
  bool is_replaced() const noexcept;
  /// True if the folder has another .lock than the locked one: somebody has removed the locked one, and another job may
  /// have taken the folder. False if there is no .lock.
  bool is_lock_replaced() const noexcept;
  /// Takes the lease for these processes; throws the Errors of the constructor. Call it on rank 0 if sees_root_lock()
  /// is false on any rank.
  void take_lease(const std::vector<std::string>& processes);
  /// Returns the name of this process in a lease: kernel boot, process namespace, process number and start time.
  static std::string this_process();

 private:
  void lock_exclusive();
  void lock_shared();
  /// Polls `done` until it returns true. Throws the Errors of the constructor if that takes too long.
  void wait(bool for_earlier_start, const std::string& holder, const std::function<bool()>& done) const;
  /// If an earlier start of this `muster run` wrote `record`, waits until the processes in it that run on this node
  /// have ended. Does not wait for a job that Slurm has started again, since Slurm has ended its processes before.
  void wait_for_earlier_start(const std::filesystem::path& record) const;
  /// Returns the numbers of all leases in the folder. Throws an Error if the job of the last lease may still be
  /// running, or, on a file system without locks, the job that wrote .lock. First waits if that is an earlier start of
  /// this job.
  std::vector<int> require_free() const;

  /// Returns the device and inode number of the folder; zeros if there is none.
  std::pair<std::uint64_t, std::uint64_t> identity() const noexcept;

  std::filesystem::path folder_, lease_ = {};
  std::pair<std::uint64_t, std::uint64_t> identity_ = identity();
  std::chrono::milliseconds patience_;
  std::function<void(std::chrono::milliseconds)> on_wait_;
  bool is_root_, sees_root_lock_ = false;
  std::optional<File> file_ = {};
};

}  // namespace muster::detail::run
