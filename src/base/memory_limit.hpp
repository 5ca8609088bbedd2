// How much memory this process may use.
#pragma once

#include <filesystem>

namespace muster::detail {

/// The memory in bytes that this process may use, including the page cache: the machine's memory, or the limit of this
/// process's control group or of one of its parents, whichever is smallest. Infinity if the kernel does not tell.
/// `root` is the folder in which proc and sys are.
double memory_limit(const std::filesystem::path& root = "/");

/// For tests: memory_limit() returns this from then on; 0 restores the kernel's limit.
void set_memory_limit(double bytes) noexcept;

}  // namespace muster::detail
