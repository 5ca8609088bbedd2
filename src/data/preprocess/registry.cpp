#include "data/preprocess/registry.hpp"

#include <algorithm>
#include <map>
#include <vector>

namespace muster::detail::data {
namespace {

using Make = PreprocessorPtr (*)(std::vector<std::string>);

/// How to make each kind of preprocessor that has columns.
const std::map<std::string, Make>& kinds() {
  static const std::map<std::string, Make> all{
      {"standard_scaler", standard_scaler},
      {"min_max_scaler", min_max_scaler},
      {"label_encoder", [](std::vector<std::string> columns) { return label_encoder(columns.front()); }},
      {"one_hot_encoder", one_hot_encoder}};
  return all;
}

std::string kind_of(const Json& state) {
  const auto kind = state.is_object() ? state.find("kind") : state.end();
  return state.is_object() && kind != state.end() && kind->is_string() ? kind->get<std::string>() : "";
}

bool is_chain(const Json& state) {
  return kind_of(state) == "chain" && state.contains("steps") && state.at("steps").is_array();
}

}  // namespace

bool is_muster_preprocessor(const Json& state) {
  if (is_chain(state)) return std::ranges::all_of(state.at("steps"), is_muster_preprocessor);
  return kinds().contains(kind_of(state)) && state.contains("columns") && state.at("columns").is_object();
}

std::set<std::string> fitted_columns(const Json& state) {
  std::set<std::string> columns;
  if (is_chain(state)) {
    for (const auto& step : state.at("steps")) columns.merge(fitted_columns(step));
  } else {
    for (const auto& [name, learned] : state.at("columns").items()) columns.insert(name);
  }
  return columns;
}

PreprocessorPtr restore_preprocessor(const Json& state, const std::function<bool(const std::string&)>& wanted) {
  if (is_chain(state)) {
    std::vector<PreprocessorPtr> steps;
    for (const auto& step : state.at("steps"))
      if (auto made = restore_preprocessor(step, wanted)) steps.push_back(std::move(made));
    return steps.empty() ? nullptr : chain(std::move(steps));
  }
  std::vector<std::string> columns;
  std::ranges::copy_if(fitted_columns(state), std::back_inserter(columns), wanted);
  if (columns.empty()) return nullptr;
  auto made = kinds().at(kind_of(state))(std::move(columns));
  made->load_state(state);
  return made;
}

}  // namespace muster::detail::data
