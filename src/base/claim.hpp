// Claims of processes on what they should not share, such as cores and GPUs. A claim is a name that at most one process
// of the machine holds: the name of a socket in the kernel's abstract namespace. It leaves no file, processes of other
// users see it, and it ends with the process, even after SIGKILL. Processes in different network namespaces (containers
// with a network of their own) do not see each other's claims.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace muster::detail {

/// Holds a name, or none if the claim failed. Move-only; the destructor gives the name up.
class Claim {
 public:
  /// Claims `name`, such as "cpu/3", unless another claim has it or the kernel has no abstract sockets.
  explicit Claim(const std::string& name);
  Claim(Claim&& other) noexcept;
  Claim& operator=(Claim&& other) noexcept;
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  ~Claim();

  /// The process that already held the name; 0 if the kernel does not tell its id; empty if no process held it.
  std::optional<pid_t> other() const noexcept { return other_; }

 private:
  int socket_ = -1;
  std::optional<pid_t> other_;
};

/// The process that holds the name; 0 if the kernel does not tell its id; empty if no process holds it.
std::optional<pid_t> holder_of(const std::string& name);

}  // namespace muster::detail
