#include "state/collect.hpp"
#include "base/json.hpp"

#include "base/text.hpp"
#include "muster/error.hpp"
#include "optim/weight_averages.hpp"
#include "state/copy.hpp"
#include "state/stateful.hpp"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <utility>

namespace muster::detail::state {
namespace {

std::string join(const std::string& name, const std::string& path) { return path.empty() ? name : name + "/" + path; }

/// True for the names under which muster saves its own data beside the entries.
bool is_own(const std::string& name) { return name == "random" || name == gradients_name || name == weights_name; }

void check_names(const StateEntries& entries) {
  std::set<std::string> seen;
  for (const auto& [name, entry] : entries) {
    const char* fact = name.empty()                           ? "an entry has no name"
                       : name.find('/') != std::string::npos  ? "a name may not hold \"/\""
                       : name == "." || name == ".."          ? "that name means a folder"
                       : is_own(name)                         ? "muster uses that name itself"
                       : name.find('\0') != std::string::npos ? "a name may not hold a zero byte"
                       : !seen.insert(name).second            ? "two entries have that name"
                                                              : nullptr;
    if (fact != nullptr)
      throw Error(ExitCode::usage, "taking \"" + name + "\" into the state", fact, "Give each entry a name of its own");
  }
}

/// Returns the entry's part of `state`, with paths relative to the entry; none if `state` does not have the entry.
std::optional<StateDict> part_of(const StateDict& state, const std::string& name) {
  StateDict part{.values = state.values.value(name, Json::object())};
  for (const auto& [path, tensor] : select_entry(state, name).tensors)
    part.tensors.emplace(path == name ? "" : path.substr(name.size() + 1), tensor);
  if (part.tensors.empty() && !state.values.contains(name)) return {};
  return part;
}

/// Returns the number of ranks that have saved the state of a per-rank entry; 0 if `all` is not the state of a per-rank
/// entry.
std::size_t ranks_in(const StateDict& all) {
  const auto ranks = all.values.is_array() ? all.values.size() : 0;
  for (const auto& [path, tensor] : all.tensors)
    if (tensor.dim() == 0 || static_cast<std::size_t>(tensor.size(0)) != ranks) return 0;
  return ranks;
}

/// Returns the part of rank `here` of a per-rank entry. If there is no such part, adds the reason to `differences` and
/// returns nothing; if the reason is a different number of ranks, sets `needed` to the number of ranks that have saved
/// the entry.
std::optional<StateDict> local_part(const StateDict& all, const Stateful& object, RankInGroup here,
                                    Differences& differences, std::size_t& needed) {
  const auto ranks = ranks_in(all), size = static_cast<std::size_t>(here.size);
  const auto refuse = [&](const std::string& fact) -> std::optional<StateDict> {
    return differences.push_back({"", fact}), std::nullopt;
  };
  const auto count = [](std::size_t of) { return counted(of, "rank"); };
  if (ranks == 0) return refuse("each rank's own here, one for all in the checkpoint");
  if (size == 0)
    return refuse("each of " + count(ranks) +
                  " had its own, and a checkpoint opened by its path does not know which rank this is: use "
                  "State::restore(), Session::get_checkpoint(), or the rows of to_dict()");
  if (ranks != size) {
    auto part = object.redistribute(all, here);
    if (part) return part;
    needed = ranks;
    return refuse("each of " + count(ranks) + " had its own, and here it is " + count(size));
  }
  StateDict part{.values = all.values.at(static_cast<std::size_t>(here.rank))};
  for (const auto& [path, tensor] : all.tensors) part.tensors.emplace(path, tensor.select(0, here.rank));
  return part;
}

/// True if a scope of EMA::apply() has put averages in place of the entry's parameters. Loading would then overwrite
/// the averages and not the parameters.
bool in_scope_of_average(const StateEntry& entry) {
  const auto parameters = entry.object()->parameters();
  return std::ranges::any_of(parameters, [](const auto& item) { return optim::is_average(item.second); });
}

std::string text_of(const std::vector<std::string>& lines) {
  constexpr std::size_t most = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(lines.size(), most); ++i) text += (text.empty() ? ": " : "; ") + lines[i];
  return str("it does not fit", lines.size() == 1 ? "" : str(" in ", lines.size(), " places"),
             lines.size() > most ? "; the first are" : "", text);
}

}  // namespace

void compare_tensor(const std::string& path, const at::Tensor& saved, at::IntArrayRef shape, at::ScalarType type,
                    Differences& differences) {
  if (saved.sizes() != shape)
    differences.push_back({path, c10::str("shape ", saved.sizes(), " in the checkpoint, ", shape, " here")});
  if (saved.scalar_type() != type)
    differences.push_back({path, c10::str("type ", saved.scalar_type(), " in the checkpoint, ", type, " here")});
}

void compare_values(const std::string& path, const at::Tensor& saved, const at::Tensor& here, at::ScalarType type,
                    Differences& differences) {
  compare_tensor(path, saved, here.sizes(), type, differences);
  if (!can_copy(here, saved))
    differences.push_back({path, "expanded here, with other values in each repetition in the checkpoint"});
}

WrongNumberOfRanks::WrongNumberOfRanks(std::size_t needed, const std::string& fact)
    : Error(ExitCode::data, "restoring the state", fact,
            "Nothing was changed; start the program on " + counted(needed, "rank")),
      needed_(needed) {}

ParameterPaths parameter_paths(const StateEntries& entries) {
  ParameterPaths paths;
  for (const auto& [name, entry] : entries)
    for (const auto& [path, tensor] : entry.object()->parameters()) {
      auto full = join(name, path);
      const auto [at, inserted] = paths.try_emplace(tensor.unsafeGetTensorImpl(), full);
      if (!inserted && full < at->second) at->second = std::move(full);
    }
  return paths;
}

void require_own_weights(const StateEntries& entries) {
  for (const auto& [name, entry] : entries)
    for (const auto& [path, parameter] : entry.object()->parameters())
      if (optim::is_average(parameter))
        throw Error(ExitCode::user_error, "saving " + join(name, path),
                    "it has the average of an EMA instead of its own value",
                    "End the scope of EMA::apply() before the report");
}

void gather(const StateEntries& entries) {
  for (const auto& [name, entry] : entries) entry.object()->gather();
}

StateDict collect(const StateEntries& entries) {
  check_names(entries);
  const auto parameters = parameter_paths(entries);
  StateDict state;
  for (const auto& [name, entry] : entries) {
    auto part = entry.object()->save(parameters);
    for (auto& [path, tensor] : part.tensors) {
      if (!tensor.defined())
        throw Error(ExitCode::usage, "saving " + join(name, path), "the tensor is undefined",
                    "Give it a value before it is saved");
      state.tensors.emplace(join(name, path), tensor.detach());
    }
    require_json_lossless(part.values, name, "Keep it in a double that is an entry of its own, or as null");
    state.values[name] = std::move(part.values);
  }
  return state;
}

namespace {

using Parts = std::vector<std::pair<Stateful*, StateDict>>;

/// Returns each entry's object with its part of `saved`. Throws the Errors of require_fit().
Parts fitting_parts(const StateEntries& entries, const StateDict& saved, const ParameterPaths& parameters,
                    RankInGroup here, const std::map<std::string, bool>& per_rank) {
  check_names(entries);
  std::vector<std::string> lines;
  std::set<std::string> left_over;
  std::size_t needed = 0;
  for (const auto& [path, tensor] : saved.tensors) left_over.insert(entry_name_of(path));
  for (const auto& [name, value] : saved.values.items()) left_over.insert(name);

  Parts parts;
  for (const auto& [name, entry] : entries) {
    left_over.erase(name);
    auto part = part_of(saved, name);
    if (!part) {
      lines.push_back(name + ": not in the checkpoint");
      continue;
    }
    Differences differences;
    const bool has_own = replication_of(entry) == Replication::per_rank;
    if (const auto known = per_rank.find(name); known != per_rank.end() && known->second != has_own) {
      lines.push_back(name + (has_own ? ": each rank's own here, one for all in the checkpoint"
                                      : ": one for all here, each rank's own in the checkpoint"));
      continue;
    }
    if (has_own) part = local_part(*part, *entry.object(), here, differences, needed);
    if (in_scope_of_average(entry)) differences.push_back({"", "a scope of EMA::apply() is alive"});
    if (part) entry.object()->compare(*part, parameters, differences);
    for (const auto& [path, text] : differences) lines.push_back(join(name, path) + ": " + text);
    if (part) parts.emplace_back(entry.object().get(), std::move(*part));
  }
  for (const auto& name : left_over) lines.push_back(name + ": in the checkpoint, not here");
  if (needed > 0) throw WrongNumberOfRanks(needed, text_of(lines));
  if (!lines.empty())
    throw Error(ExitCode::data, "restoring the state", text_of(lines),
                "Nothing was changed; use the program and the options that wrote the checkpoint");
  return parts;
}

}  // namespace

void require_fit(const StateEntries& entries, const StateDict& saved, RankInGroup here,
                 const std::map<std::string, bool>& per_rank) {
  fitting_parts(entries, saved, parameter_paths(entries), here, per_rank);
}

void restore(const StateEntries& entries, const StateDict& saved, RankInGroup here,
             const std::map<std::string, bool>& per_rank) {
  const auto parameters = parameter_paths(entries);
  auto parts = fitting_parts(entries, saved, parameters, here, per_rank);
  std::ranges::stable_partition(parts, [](const auto& part) { return part.first->may_throw(); });
  for (const auto& [object, part] : parts) object->load(part, parameters);
}

std::string entry_name_of(const std::string& path) { return path.substr(0, path.find('/')); }

StateDict select_entry(const StateDict& state, const std::string& name) {
  StateDict part;
  if (state.values.contains(name)) part.values[name] = state.values.at(name);
  for (const auto& [path, tensor] : state.tensors)
    if (entry_name_of(path) == name) part.tensors.emplace(path, tensor);
  return part;
}

std::string gradient_path(const std::string& parameter) { return join(gradients_name, parameter); }
std::string weights_path(const std::string& parameter) { return join(weights_name, parameter); }

SavedGradients take_gradients(StateDict& state, int workers) {
  SavedGradients saved{.workers = workers};
  for (const auto& [name, into] : {std::pair(gradients_name, &saved.gradients), {weights_name, &saved.weights}}) {
    if (state.values.contains(name)) continue;  // in a checkpoint of an earlier version, this is an entry of the user
    const auto whole = str(name, "/");
    for (auto at = state.tensors.lower_bound(whole); at != state.tensors.end() && at->first.starts_with(whole);) {
      into->emplace(at->first.substr(whole.size()), std::move(at->second));
      at = state.tensors.erase(at);
    }
  }
  return saved;
}

}  // namespace muster::detail::state
