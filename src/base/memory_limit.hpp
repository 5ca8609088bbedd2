// How much memory this process may use.
#pragma once

#include <filesystem>

namespace muster::detail {

/// The memory of the machine in bytes, or the smallest limit of the control group of this process and those around it.
/// The page cache counts to it. Infinity if the kernel does not tell. `root` is the folder in which proc and sys are.
double memory_limit(const std::filesystem::path& root = "/");

/// For tests: memory_limit() returns this from then on; 0 for the kernel's.
void set_memory_limit(double bytes) noexcept;

}  // namespace muster::detail
