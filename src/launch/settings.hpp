// A program's configuration: its own defaults, overridden by the files of --config and then by --set.
#pragma once

#include "base/export.hpp"
#include "muster/config.hpp"

#include <chrono>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::launch {

/// Returns the candidate with the fewest edits (characters added, removed, replaced or swapped with the next). Empty if
/// that takes more than one edit per three characters of `word`, or more than one edit of a shorter word.
MUSTER_INTERNAL_API std::string nearest_match(std::string_view word, const std::vector<std::string>& candidates);

/// Reads a file of settings, which may have comments. Errors in its content have ExitCode::data.
MUSTER_INTERNAL_API Json read_config(const std::filesystem::path& file);

/// Returns `defaults`, overridden by the values of each file in turn and then by those of `set` ("key.path=VALUE",
/// where VALUE is JSON or else text). Throws an Error for a key that the defaults do not have, which names the nearest
/// known key or up to 30 known keys; for a value of another kind (a number instead of text); and for a value that JSON
/// does not keep, such as NaN. A default of null accepts any value, and a key whose default is {} any object. Errors in
/// a file's content have ExitCode::data, the others ExitCode::usage.
MUSTER_INTERNAL_API Config resolve(Config defaults, const std::vector<std::filesystem::path>& files,
                                   const std::vector<std::string>& set);

/// Returns `defaults` overridden by `values`, by the rules by which resolve() applies a file. Returns `values` as they
/// are if there are no defaults. Errors have ExitCode::usage, and their text begins with `doing`.
MUSTER_INTERNAL_API Config override_defaults(Config defaults, const Config& values, const std::string& doing);

/// Parses "90", "45s", "30m", "1h30m", and Slurm's "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS". Throws an
/// Error (ExitCode::usage) for any other text, and for times above longest_time.
std::chrono::seconds parse_duration(std::string_view text);

}  // namespace muster::detail::launch
