// The control groups of this process, which limit its CPUs and its memory.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace muster::detail {

/// Calls action(folder) for this process's control group and then for each of its parents: in cgroups version 2, and in
/// version 1 for `controller` ("cpu", "memory"). Systems mount the groups at different paths; the usual ones are tried,
/// so a folder need not exist. `root` is the folder in which proc and sys are; tests have their own.
void for_each_control_group(const std::string& controller, const std::filesystem::path& root,
                            const std::function<void(const std::filesystem::path& folder)>& action);

}  // namespace muster::detail
