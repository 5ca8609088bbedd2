#include "base/readable.hpp"
#include "base/text.hpp"
#include "doctor/checks.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

namespace muster::detail::doctor {
namespace {

std::string named(const std::vector<std::string>& hosts) {
  return listed(hosts, 2, [](const auto& host) { return host; });
}

/// Returns "4.1 on n1, n2; 5.0 on n3".
std::string by_value(const std::map<std::string, std::vector<std::string>>& hosts) {
  std::string text;
  for (const auto& [value, names] : hosts) text += (text.empty() ? "" : "; ") + value + " on " + named(names);
  return text;
}

std::string without_numbers(std::string text) {
  std::erase_if(text, [](char c) { return (c >= '0' && c <= '9') || c == '.'; });
  return text;
}

struct ComparedFact {
  const char *key, *name, *remedy;
  Finding::Severity severity;
};

}  // namespace

Findings check_differences(const std::vector<Json>& nodes) {
  using enum Finding::Severity;
  static constexpr ComparedFact compared[] = {
      {"muster", "muster", "Install the same muster on all nodes, best on a shared file system", to_mend},
      {"libtorch", "libtorch", "Install the same libtorch on all nodes: others give other numbers, or fail", to_mend},
      {"mpi", "MPI", "Install the same MPI on all nodes", to_mend},
      {"hdf5", "HDF5", "Install the same HDF5 on all nodes", warning},
      {"cpu", "CPU",
       "The slowest nodes set the pace, and the same run may give other last digits; choose nodes of one kind (sbatch "
       "--constraint)",
       warning},
      {"huge_pages", "transparent huge pages", "Set them alike, best to madvise", warning}};
  Findings findings;
  for (const auto& [key, name, remedy, severity] : compared) {
    std::map<std::string, std::vector<std::string>> hosts;
    for (const auto& node : nodes)
      if (node.at(key).is_string()) hosts[node.at(key)].push_back(node.at("host"));
    if (hosts.size() > 1)
      findings.push_back({severity, "differences", str(name, " differs: ", by_value(hosts)), remedy});
  }

  const auto range = [&](const char* key) {
    const Json *least = nullptr, *most = nullptr;
    for (const auto& node : nodes) {
      if (!node.at(key).is_number()) continue;
      if (least == nullptr || node.at(key) < least->at(key)) least = &node;
      if (most == nullptr || node.at(key) > most->at(key)) most = &node;
    }
    return std::tuple(least, most);
  };
  constexpr double memory_factor = 1.05, clock_limit_s = 1;
  if (const auto [least, most] = range("memory_bytes");
      least != nullptr && most->at("memory_bytes") > memory_factor * least->at("memory_bytes").get<double>())
    findings.push_back({warning, "differences",
                        "the memory differs: " + bytes_text(least->at("memory_bytes")) + " on " +
                            least->at("host").get<std::string>() + ", " + bytes_text(most->at("memory_bytes")) +
                            " on " + most->at("host").get<std::string>(),
                        "What fits the smallest node decides"});
  if (const auto [least, most] = range("clock_s");
      least != nullptr && most->at("clock_s").get<double>() - least->at("clock_s").get<double>() > clock_limit_s)
    findings.push_back({warning, "differences",
                        str("the clock of ", most->at("host").get<std::string>(), " is ",
                            std::lround(most->at("clock_s").get<double>() - least->at("clock_s").get<double>()),
                            " s ahead of that of ", least->at("host").get<std::string>()),
                        "Have the clocks set by NTP"});
  return findings;
}

Findings merged(Findings findings) {
  struct Joined {
    Finding finding;
    bool varies = false;
  };
  std::vector<Joined> joined;
  for (auto& finding : findings) {
    const auto same = std::ranges::find_if(joined, [&](const Joined& other) {
      return other.finding.severity == finding.severity && other.finding.subject == finding.subject &&
             other.finding.remedy == finding.remedy &&
             (finding.severity == Finding::Severity::ok ||
              without_numbers(other.finding.fact) == without_numbers(finding.fact));
    });
    if (same == joined.end()) {
      joined.push_back({std::move(finding)});
      continue;
    }
    auto& hosts = same->finding.hosts;
    for (auto& host : finding.hosts)
      if (std::ranges::find(hosts, host) == hosts.end()) hosts.push_back(std::move(host));
    same->varies = same->varies || same->finding.fact != finding.fact;
  }
  Findings result;
  for (auto& [finding, varies] : joined) {
    if (varies && finding.hosts.size() > 1) finding.fact = "on " + finding.hosts.front() + " " + finding.fact;
    result.push_back(std::move(finding));
  }
  std::ranges::stable_sort(result, {}, &Finding::severity);
  return result;
}

}  // namespace muster::detail::doctor
