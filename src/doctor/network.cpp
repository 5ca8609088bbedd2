#include "base/text.hpp"
#include "doctor/checks.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <array>
#include <future>
#include <memory>
#include <thread>

namespace muster::detail::doctor {
namespace {

constexpr std::chrono::seconds name_timeout{5};

/// Returns whether the name service knows the host; null if it does not answer in time.
Json resolves(const std::string& host) {
  // A name server that does not answer takes longer than the timeout; then the thread is left behind.
  auto answer = std::make_shared<std::promise<bool>>();
  auto known = answer->get_future();
  std::thread([answer, host] {
    addrinfo* found = nullptr;
    const bool is_known = ::getaddrinfo(host.c_str(), nullptr, nullptr, &found) == 0;
    if (found != nullptr) ::freeaddrinfo(found);
    answer->set_value(is_known);
  }).detach();
  if (known.wait_for(name_timeout) != std::future_status::ready) return nullptr;
  return known.get();
}

Json interfaces() {
  Json found = Json::array();
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return nullptr;
  for (const auto* one = all; one != nullptr; one = one->ifa_next) {
    const auto* const address = one->ifa_addr;
    if (address == nullptr || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) continue;
    if ((one->ifa_flags & IFF_UP) == 0 || (one->ifa_flags & IFF_LOOPBACK) != 0) continue;
    std::array<char, NI_MAXHOST> text{};
    const auto size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (::getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0)
      found.push_back({{"name", one->ifa_name}, {"address", text.data()}});
  }
  ::freeifaddrs(all);
  return found;
}

}  // namespace

Json look_at_network() {
  const auto name = host_name();
  return {{"host", name}, {"resolves", resolves(name)}, {"interfaces", interfaces()}};
}

Findings check_network(const Json& facts, int nodes) {
  using enum Finding::Severity;
  Findings findings;
  const auto host = facts.at("host").get<std::string>();
  const auto severity = nodes > 1 ? warning : ok;
  if (facts.at("resolves").is_null())
    findings.push_back(
        {warning, "network",
         str("the name service did not say within ", name_timeout.count(), " s what address ", host, " has"),
         "Add it to /etc/hosts, or have the name service mended"});
  else if (facts.at("resolves") == false)
    findings.push_back({warning, "network", "the host name " + host + " has no address",
                        "Add it to /etc/hosts, or have the name service mended"});
  std::string names;
  for (const auto& one : facts.at("interfaces")) {
    const auto name = one.at("name").get<std::string>();
    // Leave out link-local IPv6 addresses: every interface has one.
    if (one.at("address").get<std::string>().starts_with("fe80")) continue;
    names += (names.empty() ? "" : ", ") + name + " " + one.at("address").get<std::string>();
  }
  if (names.empty() && severity == warning)
    findings.push_back({warning, "network", "no interface is up but the loopback, and the ranks are on several nodes",
                        "Bring an interface up that the other nodes reach"});
  if (findings.empty())
    findings.push_back(
        {ok, "network", host + " has an address; " + (names.empty() ? "only the loopback is up" : "up: " + names)});
  return findings;
}

}  // namespace muster::detail::doctor
