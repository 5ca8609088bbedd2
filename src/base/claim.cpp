#include "base/claim.hpp"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

namespace muster::detail {
namespace {

/// The socket address that stands for a name.
struct Address {
  /// Cuts a name that does not fit into a socket address.
  explicit Address(const std::string& name) {
    const std::string whole = "muster/" + name;
    socket.sun_family = AF_UNIX;
    const auto length = std::min(whole.size(), sizeof socket.sun_path - 1);
    std::copy_n(whole.begin(), length, socket.sun_path + 1);  // behind a 0, which makes it abstract
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket); }
  sockaddr_un socket{};
  socklen_t size = 0;
};

int new_socket() { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

}  // namespace

Claim::Claim(const std::string& name) : socket_(new_socket()) {
  const Address address(name);
  // The socket listens, although it accepts no connections, because the kernel then tells other processes the id of
  // this one. If the kernel has no abstract sockets, nothing is claimed.
  if (::bind(socket_, address.get(), address.size) == 0 && ::listen(socket_, SOMAXCONN) == 0) return;
  if (errno == EADDRINUSE) other_ = holder_of(name).value_or(0);
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
}

Claim::Claim(Claim&& other) noexcept : socket_(std::exchange(other.socket_, -1)), other_(other.other_) {}

Claim& Claim::operator=(Claim&& other) noexcept {
  std::swap(socket_, other.socket_);
  std::swap(other_, other.other_);
  return *this;
}

Claim::~Claim() {
  if (socket_ >= 0) ::close(socket_);
}

std::optional<pid_t> holder_of(const std::string& name) {
  const int caller = new_socket();
  const Address address(name);
  std::optional<pid_t> holder;
  // EAGAIN: a process holds the name, but its socket's queue is full, since it never accepts a connection.
  if (::connect(caller, address.get(), address.size) == 0 || errno == EAGAIN) {
    ucred of_listener{};
    socklen_t size = sizeof of_listener;
    holder = ::getsockopt(caller, SOL_SOCKET, SO_PEERCRED, &of_listener, &size) == 0 ? std::max(0, of_listener.pid) : 0;
  }
  if (caller >= 0) ::close(caller);
  return holder;
}

}  // namespace muster::detail
