#include "launch/agreed_flags.hpp"

#include "muster/error.hpp"
#include "muster/json.hpp"

#include <stdlib.h>
#include <CLI/CLI.hpp>

#include <cstdlib>
#include <string_view>

namespace muster::detail::launch {
namespace {

constexpr std::string_view prefix = "MUSTER_";

bool has_variable(const CLI::Option& option) { return option.get_envname().starts_with(prefix); }

bool is_shared(const CLI::Option& option) {
  const auto name = option.get_name();
  return name == "--set" || (has_variable(option) && name != "--threads" && name != "--log-level");
}

/// Empty where it is not set.
std::string variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

/// Only the last one of an option that takes the last.
std::vector<std::string> values_of(const CLI::Option& option) {
  const auto& all = option.results();
  if (option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast && !all.empty()) return {all.back()};
  return all;
}

std::string text_of(const Values& values, const std::string& name) {
  const auto found = values.find(name);
  if (found == values.end()) return "not given";
  std::string text;
  for (const auto& value : found->second) text += (text.empty() ? "" : " ") + value;
  return text;
}

}  // namespace

std::string pack(const Values& values) {
  const auto bytes = Json::to_cbor(values);
  return {bytes.begin(), bytes.end()};
}

Values unpack(const std::string& packed) { return Json::from_cbor(packed).get<Values>(); }

Values environment_of(const CLI::App& app) {
  Values set;
  for (const auto* option : app.get_options())
    if (has_variable(*option))
      if (auto value = variable(option->get_envname()); !value.empty()) set[option->get_envname()] = {std::move(value)};
  return set;
}

void set_missing_variables(const CLI::App& app, const Values& of_rank_0) {
  const auto here = environment_of(app);
  for (const auto& [name, values] : of_rank_0)
    if (!here.contains(name)) ::setenv(name.c_str(), values.front().c_str(), 1);
}

Values shared_values(const CLI::App& app) {
  Values shared;
  for (const auto* option : app.get_options()) {
    if (has_variable(*option) && option->count() == 0 && !variable(option->get_envname()).empty())
      throw Error(
          ExitCode::usage, "reading the environment",
          option->get_envname() + "=" + variable(option->get_envname()) + " is nothing for " + option->get_name(),
          "Unset it, or give it a value as --help says");
    if (is_shared(*option) && option->count() > 0) shared[option->get_name()] = values_of(*option);
  }
  return shared;
}

void fill_in(CLI::App& app, const Values& of_rank_0) {
  for (auto* option : app.get_options()) {
    const auto found = of_rank_0.find(option->get_name());
    if (!is_shared(*option) || option->count() > 0 || found == of_rank_0.end()) continue;
    option->add_result(found->second);
    option->run_callback();
  }
}

void require_equal(const std::vector<Values>& values, const std::vector<std::string>& hosts) {
  const auto on = [&](std::size_t rank) { return " on rank " + std::to_string(rank) + " (" + hosts[rank] + ")"; };
  for (std::size_t rank = 1; rank < values.size(); ++rank)
    for (const auto& [name, value] : values[rank]) {
      const auto found = values[0].find(name);
      if (found != values[0].end() && found->second == value) continue;
      throw Error(ExitCode::usage, "comparing what the ranks were given",
                  name + " is " + text_of(values[rank], name) + on(rank) + " and " + text_of(values[0], name) + on(0),
                  "Give all ranks the same, by the command line or in the environment of every host");
    }
}

}  // namespace muster::detail::launch
