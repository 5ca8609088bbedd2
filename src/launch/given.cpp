#include "launch/given.hpp"

#include "muster/error.hpp"

#include <stdlib.h>
#include <CLI/CLI.hpp>

#include <cstdlib>
#include <string_view>

namespace muster::detail::launch {
namespace {

constexpr std::string_view prefix = "MUSTER_";

bool has_variable(const CLI::Option& option) { return option.get_envname().starts_with(prefix); }

bool alike(const CLI::Option& option) {
  const auto name = option.get_name();
  return name == "--set" || (has_variable(option) && name != "--threads" && name != "--log-level");
}

/// Empty where it is not set.
std::string variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

/// Where the last one counts, that one.
std::vector<std::string> values_of(const CLI::Option& option) {
  const auto& all = option.results();
  if (option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast && !all.empty()) return {all.back()};
  return all;
}

std::string text_of(const Values& given, const std::string& name) {
  const auto found = given.find(name);
  if (found == given.end()) return "not given";
  std::string text;
  for (const auto& value : found->second) text += (text.empty() ? "" : " ") + value;
  return text;
}

}  // namespace

std::string pack(const Values& values) {
  std::string packed;
  for (const auto& [name, all] : values)
    for (const auto& value : all) packed.append(name).append(1, '\0').append(value).append(1, '\0');
  return packed;
}

Values unpack(const std::string& packed) {
  Values values;
  for (std::size_t at = 0; at < packed.size();) {
    const auto name = packed.find('\0', at), end = packed.find('\0', name + 1);
    values[packed.substr(at, name - at)].push_back(packed.substr(name + 1, end - name - 1));
    at = end + 1;
  }
  return values;
}

Values environment_of(const CLI::App& app) {
  Values set;
  for (const auto* option : app.get_options())
    if (has_variable(*option))
      if (auto value = variable(option->get_envname()); !value.empty()) set[option->get_envname()] = {std::move(value)};
  return set;
}

void carry(const CLI::App& app, const Values& first) {
  const auto here = environment_of(app);
  for (const auto& [name, values] : first)
    if (!here.contains(name)) ::setenv(name.c_str(), values.front().c_str(), 1);
}

Values given_to(const CLI::App& app) {
  Values given;
  for (const auto* option : app.get_options()) {
    if (has_variable(*option) && option->count() == 0 && !variable(option->get_envname()).empty())
      throw Error(
          ExitCode::usage, "reading the environment",
          option->get_envname() + "=" + variable(option->get_envname()) + " is nothing for " + option->get_name(),
          "Unset it, or give it a value as --help says");
    if (alike(*option) && option->count() > 0) given[option->get_name()] = values_of(*option);
  }
  return given;
}

void complete(CLI::App& app, const Values& first) {
  for (auto* option : app.get_options()) {
    const auto found = first.find(option->get_name());
    if (!alike(*option) || option->count() > 0 || found == first.end()) continue;
    option->add_result(found->second);
    option->run_callback();
  }
}

void require_alike(const std::vector<Values>& given, const std::vector<std::string>& hosts) {
  const auto on = [&](std::size_t rank) { return " on rank " + std::to_string(rank) + " (" + hosts[rank] + ")"; };
  for (std::size_t rank = 1; rank < given.size(); ++rank)
    for (const auto& [name, values] : given[rank]) {
      const auto found = given[0].find(name);
      if (found != given[0].end() && found->second == values) continue;
      throw Error(ExitCode::usage, "comparing what the ranks were given",
                  name + " is " + text_of(given[rank], name) + on(rank) + " and " + text_of(given[0], name) + on(0),
                  "Give all ranks the same, by the command line or in the environment of every host");
    }
}

}  // namespace muster::detail::launch
