#include "base/control_groups.hpp"

#include <array>
#include <fstream>

namespace muster::detail {

namespace fs = std::filesystem;

void for_each_control_group(const std::string& controller, const fs::path& root,
                            const std::function<void(const fs::path& folder)>& action) {
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_second_version = controllers == ",,";
    if (!is_second_version && controllers.find("," + controller + ",") == std::string::npos) continue;
    const auto own = line.substr(first + 1, second - first - 1);
    const auto mounts =
        is_second_version ? std::array<fs::path, 2>{"", "unified"} : std::array<fs::path, 2>{controller, own};
    for (fs::path group = line.substr(second + 1);; group = group.parent_path()) {
      for (const auto& mount : mounts) action(root / "sys/fs/cgroup" / mount / group.relative_path());
      if (!group.has_relative_path()) break;
    }
  }
}

}  // namespace muster::detail
