// The system calls that change something in a folder, and the filter with which a process stops at each of them for its
// tracer.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <vector>

namespace muster::test {

/// What a call works on, by the numbers of its arguments: a descriptor, a path (relative to the descriptor if it has
/// both), and the flags of an open that may only read.
struct Call {
  const char* name;
  int descriptor = -1, path = -1, flags = -1, second_descriptor = -1, second_path = -1;
};

inline const std::map<long, Call> changing_calls{
    {SYS_openat, {"openat", 0, 1, 2}},
    {SYS_write, {"write", 0}},
    {SYS_pwrite64, {"pwrite64", 0}},
    {SYS_writev, {"writev", 0}},
    {SYS_pwritev, {"pwritev", 0}},
    {SYS_pwritev2, {"pwritev2", 0}},
    {SYS_copy_file_range, {"copy_file_range", 2}},
    {SYS_sendfile, {"sendfile", 0}},
    {SYS_io_uring_enter, {"io_uring_enter"}},
    {SYS_ftruncate, {"ftruncate", 0}},
    {SYS_fallocate, {"fallocate", 0}},
    {SYS_fsync, {"fsync", 0}},
    {SYS_fdatasync, {"fdatasync", 0}},
    {SYS_sync_file_range, {"sync_file_range", 0}},
    {SYS_fchmod, {"fchmod", 0}},
    {SYS_mkdirat, {"mkdirat", 0, 1}},
    {SYS_unlinkat, {"unlinkat", 0, 1}},
    {SYS_fchmodat, {"fchmodat", 0, 1}},
    {SYS_linkat, {"linkat", 2, 3}},
    {SYS_symlinkat, {"symlinkat", 1, 2}},
    {SYS_renameat2, {"renameat2", 0, 1, -1, 2, 3}},
#ifdef SYS_renameat
    {SYS_renameat, {"renameat", 0, 1, -1, 2, 3}},
#endif
#ifdef SYS_open  // x86-64 has these calls, and aarch64 does not
    {SYS_open, {"open", -1, 0, 1}},
    {SYS_mkdir, {"mkdir", -1, 0}},
    {SYS_rename, {"rename", -1, 0, -1, -1, 1}},
    {SYS_rmdir, {"rmdir", -1, 0}},
    {SYS_unlink, {"unlink", -1, 0}},
    {SYS_chmod, {"chmod", -1, 0}},
    {SYS_link, {"link", -1, 1}},
    {SYS_symlink, {"symlink", -1, 1}},
#endif
};

/// Waits until another process says, by a byte on this socket, that it traces this one; from then on this process stops
/// at each of the calls. Returns false if the system does not allow it.
inline bool stop_at_changing_calls(int socket) {
  std::vector<sock_filter> filter{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const auto& [number, call] : changing_calls) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(number), 0, 1));
    filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  char byte = 0;
  return ::write(socket, &byte, 1) == 1 && ::read(socket, &byte, 1) == 1 &&
         ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace muster::test
