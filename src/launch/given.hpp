// What the ranks were given, by flag or by environment, is the same on all of them: launchers carry the command line to
// other hosts, but not always the environment.
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

/// The variables that are set of those, called MUSTER_…, that options of `app` may be given by.
Values environment_of(const CLI::App& app);
/// Sets those of `first`'s that are not set here.
void carry(const CLI::App& app, const Values& first);

/// What was given for the options that all ranks have alike: --set, and those that have such a variable, except
/// --threads and --log-level. After app.parse(); an Error (ExitCode::usage) for a variable that was not taken.
Values given_to(const CLI::App& app);
/// Gives the options what they lack of `first`'s. After app.parse().
void complete(CLI::App& app, const Values& first);

/// An Error (ExitCode::usage) that names the first option of which some rank has been given another value than rank 0,
/// or was given one that rank 0 was not. `given` and `hosts` are by rank.
void require_alike(const std::vector<Values>& given, const std::vector<std::string>& hosts);

}  // namespace muster::detail::launch
