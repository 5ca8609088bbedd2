// The only file that includes gloo's headers. These may belong to another release of gloo than torch uses: only
// functions of torch are called here, and gloo's device is only passed on.
#include "group/backends.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

namespace muster::detail::group {
namespace {

using c10d::ProcessGroupGloo;

bool is_loopback(const std::string& numeric) { return numeric.starts_with("127.") || numeric == "::1"; }

std::string numeric_address(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  return ::getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

/// Returns an address of this host that other hosts can reach: that of its name. If the name is unknown or means
/// loopback, as in many hosts' /etc/hosts, returns the IPv4 address of the first interface that is up; if there is none
/// but the loopback, the name.
std::string address_of(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) == 0) {
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> freed(found, ::freeaddrinfo);
    for (const auto* one = found; one != nullptr; one = one->ai_next)
      if (const auto text = numeric_address(one->ai_addr, one->ai_addrlen); !text.empty() && !is_loopback(text))
        return text;
  }
  ifaddrs* interfaces = nullptr;
  if (::getifaddrs(&interfaces) == 0) {
    const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> freed(interfaces, ::freeifaddrs);
    for (const auto* one = interfaces; one != nullptr; one = one->ifa_next)
      if (one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET && (one->ifa_flags & IFF_UP) != 0 &&
          (one->ifa_flags & IFF_LOOPBACK) == 0)
        return numeric_address(one->ifa_addr, sizeof(sockaddr_in));
  }
  return host;
}

std::shared_ptr<gloo::transport::Device> make_device(const Communicator& communicator) {
  const auto& topology = communicator.topology();
  if (topology.num_nodes == 1) return ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  if (const char* interface = std::getenv("GLOO_SOCKET_IFNAME"))
    return ProcessGroupGloo::createDeviceForInterface(interface);
  return ProcessGroupGloo::createDeviceForHostname(
      address_of(topology.hosts[static_cast<std::size_t>(communicator.rank())]));
}

}  // namespace

bool has_gloo() noexcept { return true; }

c10::intrusive_ptr<c10d::Backend> make_gloo(const Communicator& communicator,
                                            const c10::intrusive_ptr<c10d::Store>& store,
                                            std::chrono::milliseconds timeout) {
  auto options = ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(make_device(communicator));
  return c10::make_intrusive<ProcessGroupGloo>(store, communicator.rank(), communicator.size(), std::move(options));
}

}  // namespace muster::detail::group
