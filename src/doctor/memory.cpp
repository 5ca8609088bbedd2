#include "base/readable.hpp"
#include "base/text.hpp"
#include "doctor/checks.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

namespace muster::detail::doctor {
namespace {

constexpr double mb = 1e6;
/// What Open MPI needs in /dev/shm for its own messages. With less room, it complains and may not start.
constexpr double mpi_bytes_per_rank = 4.2 * mb;
/// What Open MPI needs, plus the buffers of muster's collectives and some small gradients.
constexpr double wanted_bytes_per_rank = 32 * mb;

/// Returns the choice in brackets: "madvise" in "always [madvise] never"; null if the kernel has no such file.
Json chosen_in(const std::filesystem::path& file) {
  const auto line = first_line(file);
  const auto begin = line.find('['), end = line.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return nullptr;
  return line.substr(begin + 1, end - begin - 1);
}

/// Returns why no segment of shared memory can be made in this folder; empty if one can, or if only space is missing.
std::string try_segment(const std::filesystem::path& folder) {
  auto name = (folder / "muster-doctor-XXXXXX").string();
  const int file = ::mkostemp(name.data(), O_CLOEXEC);
  if (file < 0) return std::strerror(errno);
  ::unlink(name.c_str());
  const int error = ::posix_fallocate(file, 0, 4096);
  ::close(file);
  // A full file system is no problem here: "free_bytes" shows it.
  return error == 0 || error == ENOSPC ? "" : std::strerror(error);
}

bool may_copy_between_processes() {
  const char from = 1;
  char to = 0;
  const iovec local{&to, 1}, remote{const_cast<char*>(&from), 1};
  return ::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) == 1;
}

Json number_in(const std::filesystem::path& file) {
  std::ifstream text(file);
  int number = 0;
  return text >> number ? Json(number) : Json();
}

/// Returns the machine's memory in bytes, from a line such as "MemTotal: 16384 kB"; null if the kernel does not tell.
Json total_memory(const std::filesystem::path& root) {
  std::ifstream text(root / "proc/meminfo");
  std::string word;
  std::int64_t kb = 0;
  while (text >> word)
    if (word == "MemTotal:" && text >> kb) return kb * 1024;
  return nullptr;
}

}  // namespace

Json look_at_memory(const std::filesystem::path& root) {
  Json facts{{"problem", try_segment(root / "dev/shm")},
             {"free_bytes", nullptr},
             {"size_bytes", nullptr},
             {"huge_pages", chosen_in(root / "sys/kernel/mm/transparent_hugepage/enabled")},
             {"shm_huge_pages", chosen_in(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")},
             {"pagemap", ::access((root / "proc/self/pagemap").c_str(), R_OK) == 0},
             {"single_copy", may_copy_between_processes()},
             {"ptrace_scope", number_in(root / "proc/sys/kernel/yama/ptrace_scope")},
             {"memory_bytes", total_memory(root)}};
  struct statvfs there {};
  if (::statvfs((root / "dev/shm").c_str(), &there) == 0) {
    facts["free_bytes"] = there.f_bavail * there.f_frsize;
    facts["size_bytes"] = there.f_blocks * there.f_frsize;
  }
  return facts;
}

Findings check_memory(const Json& facts, int ranks) {
  using enum Finding::Severity;
  Findings findings;
  const auto problem = facts.at("problem").get<std::string>();
  const auto free = facts.at("free_bytes").is_null() ? 0.0 : facts.at("free_bytes").get<double>();
  const auto size = facts.at("size_bytes").is_null() ? 0.0 : facts.at("size_bytes").get<double>();
  const double wanted = wanted_bytes_per_rank * ranks;
  const auto of_ranks = counted(ranks, "rank") + (ranks == 1 ? " needs" : " need");
  const std::string fact = bytes_text(free) + " of " + bytes_text(size) + " are free, and " + of_ranks;
  const std::string remedy = size < wanted ? "Make it larger (--shm-size of a container, or mount -o remount,size=…)"
                                           : "Remove old files there; they may be of jobs that were killed";
  if (!problem.empty())
    findings.push_back({warning, "/dev/shm", problem + "; ranks then exchange gradients through MPI, which is slower",
                        "Mount a tmpfs there that this user may write to"});
  else if (const auto least = mpi_bytes_per_rank * ranks; free < least)
    findings.push_back(
        {size < least ? to_mend : may_pass, "/dev/shm", fact + " " + bytes_text(least) + " for MPI alone", remedy});
  else if (free < wanted)
    findings.push_back({warning, "/dev/shm",
                        fact + " about " + bytes_text(wanted) +
                            " and room for their gradients; without it they go through MPI, which is slower",
                        remedy});
  else
    findings.push_back(
        {ok, "/dev/shm",
         bytes_text(free) + " free; gradients of the " + counted(ranks, "rank") + " of a node lie there"});

  const auto scope = facts.at("ptrace_scope").is_number() ? facts.at("ptrace_scope").get<int>() : 0;
  if (facts.at("single_copy") == false || scope > 1)
    findings.push_back({warning, "copies between processes",
                        facts.at("single_copy") == false ? "the kernel forbids process_vm_readv()"
                                                         : str("kernel.yama.ptrace_scope is ", scope),
                        "Large messages of MPI inside a node are slower; a container may need --cap-add SYS_PTRACE"});
  if (facts.at("huge_pages") == "never")
    findings.push_back({warning, "huge pages", "transparent huge pages are off, so that large tensors are slower",
                        "Set /sys/kernel/mm/transparent_hugepage/enabled to madvise"});
  return findings;
}

}  // namespace muster::detail::doctor
