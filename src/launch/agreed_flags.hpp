// Flags have the same value on all ranks, whether they come from the command line or from the environment: launchers
// carry the command line to other hosts, but not always the environment.
#pragma once

#include <map>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace muster::detail::launch {

/// By name: the values of options, or of variables of the environment.
using Values = std::map<std::string, std::vector<std::string>>;

std::string pack(const Values& values);
Values unpack(const std::string& packed);

/// The variables MUSTER_… of `app`'s options that are set on this rank.
Values environment_of(const CLI::App& app);
/// Sets the variables of rank 0 that are not set on this rank.
void set_missing_variables(const CLI::App& app, const Values& of_rank_0);

/// This rank's values of the options that are equal on all ranks: --set, and those that have a variable MUSTER_…,
/// except
/// --threads and --log-level. After app.parse(); an Error (ExitCode::usage) for a variable that was not taken.
Values shared_values(const CLI::App& app);
/// Gives the options that have no value on this rank those of rank 0. After app.parse().
void fill_in(CLI::App& app, const Values& of_rank_0);

/// An Error (ExitCode::usage) that names the first option of which some rank has another value than rank 0, or has one
/// where rank 0 has none. `values` and `hosts` are by rank.
void require_equal(const std::vector<Values>& values, const std::vector<std::string>& hosts);

}  // namespace muster::detail::launch
