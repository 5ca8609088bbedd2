// A program's configuration: its own defaults, then a file, then --set.
#pragma once

#include "muster/config.hpp"

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::detail::launch {

/// The candidate with the fewest edits (characters added, left out, replaced or exchanged with the next); empty if it
/// takes more than one for three characters of `word`.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

/// `defaults` with the file's values, then those of `set` ("key.path=VALUE", the value as JSON, else as text) laid over
/// it. A key that the defaults do not have is an Error that names the nearest known one, or all of them; so is a value
/// of another kind (a number where text is). Anything may stand where a default is null. The file's errors are
/// ExitCode::data, those of `set` ExitCode::usage.
Config resolve(Config defaults, const std::optional<std::filesystem::path>& file, const std::vector<std::string>& set);

/// `values` laid over `defaults`, as a file's are; where there are no defaults, whatever the values are.
/// ExitCode::usage; the errors begin with `doing`.
Config overlaid(Config defaults, const Config& values, const std::string& doing);

/// "90", "45s", "30m", "1h30m", and Slurm's "MM:SS", "HH:MM:SS", "D-HH", "D-HH:MM", "D-HH:MM:SS". ExitCode::usage if it
/// is none of them.
std::chrono::seconds parse_duration(std::string_view text);

}  // namespace muster::detail::launch
