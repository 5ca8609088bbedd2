// The control groups of this process, which limit its CPUs and its memory.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace muster::detail {

/// Calls action(folder) for the group of this process and then for those around it, of version 2 and, for `controller`
/// ("cpu", "memory"), of version 1. Where systems mount the groups differs, so a folder need not exist. `root` is the
/// folder in which proc and sys are.
void for_each_control_group(const std::string& controller, const std::filesystem::path& root,
                            const std::function<void(const std::filesystem::path& folder)>& action);

}  // namespace muster::detail
