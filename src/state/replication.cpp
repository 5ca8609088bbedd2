#include "state/replication.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "state/collect.hpp"
#include "state/fingerprint.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/item.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace muster::detail::state {
namespace {

Replication kind_of(const EntryReplication& replication, const std::string& entry) {
  const auto at = replication.find(entry);
  return at == replication.end() ? Replication::equal : at->second;
}

/// True if an entry is per-rank. `path`: the name of the entry, or the path of one of its tensors.
bool is_per_rank(const EntryReplication& replication, const std::string& path) {
  return kind_of(replication, entry_name_of(path)) == Replication::per_rank;
}

std::string text_of(const Json& json) { return json_text_lossy(json); }

std::string form_of(const at::Tensor& tensor) { return c10::str(tensor.scalar_type(), " ", tensor.sizes()); }

/// A tensor or value that differs in its bits between rank 0 and other ranks.
struct Disagreement {
  std::string what;
  Replication kind = Replication::equal;
  bool is_tensor = false;
  std::vector<std::size_t> ranks = {};  ///< the ranks that differ from rank 0
};

std::string name_all(const std::vector<Disagreement>& differences) {
  return listed(differences, 4, &Disagreement::what);
}

std::vector<std::size_t> ranks_of(const std::vector<Disagreement>& differences) {
  std::set<std::size_t> ranks;
  for (const auto& difference : differences) ranks.insert(difference.ranks.begin(), difference.ranks.end());
  return {ranks.begin(), ranks.end()};
}

/// Describes this rank's state: for tensors their form (type and shape) and fingerprint, for values the values, and for
/// per-rank data only the form.
Json describe(const StateDict& state, const EntryReplication& replication) {
  Json tensors = Json::object(), values = Json::object(), per_rank = Json::object();
  for (const auto& [entry, value] : state.values.items())
    (is_per_rank(replication, entry) ? per_rank[entry] = "JSON" : values[entry] = value);
  for (const auto& [name, tensor] : state.tensors)
    if (is_per_rank(replication, name))
      per_rank[name] = form_of(tensor);
    else
      tensors[name] = {form_of(tensor), fingerprint(tensor)};
  return {{"tensors", std::move(tensors)}, {"values", std::move(values)}, {"per_rank", std::move(per_rank)}};
}

/// The names of the entries that a rank has described.
std::set<std::string> entries_of(const Json& rank) {
  std::set<std::string> entries;
  for (const auto* const part : {"tensors", "values", "per_rank"})
    for (const auto& [path, value] : rank.at(part).items()) entries.insert(entry_name_of(path));
  return entries;
}

/// Checks that all ranks have entries of the same names.
void check_entries(const std::vector<Json>& ranks) {
  const auto first = entries_of(ranks.front());
  const auto check = [](const auto& have, std::size_t rank, const auto& want, std::size_t other) {
    for (const auto& entry : want)
      if (!have.contains(entry))
        throw Error(ExitCode::user_error, "saving " + entry,
                    str("rank ", rank, " has no such entry in its state, and rank ", other, " has one"),
                    "Give entries of the same names on every rank");
  };
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const auto mine = entries_of(ranks[r]);
    check(mine, r, first, 0);
    check(first, 0, mine, r);
  }
}

/// Checks that all ranks have the same per-rank entries, in the same form.
void check_per_rank(const std::vector<Json>& ranks) {
  const auto check = [&](std::size_t from, std::size_t to) {
    const auto& there = ranks[to].at("per_rank");
    const auto here = str(" on rank ", from), other = str(" on rank ", to);
    for (const auto& [what, form] : ranks[from].at("per_rank").items())
      if (const std::string mine = form, its = there.value(what, ""); its != mine)
        throw Error(ExitCode::user_error, "saving " + what,
                    its.empty() ? "it is per rank" + here + ", and not" + other
                                : "it is " + mine + here + " and " + its + other,
                    "What muster::per_rank takes must be given on every rank, in the same shape and type");
  };
  for (std::size_t r = 1; r < ranks.size(); ++r) check(0, r), check(r, 0);
}

/// Returns text such as "best (0.5 on rank 0, 0.7 on rank 2)", with the path of the first difference inside the value.
std::string first_difference(const std::string& entry, const Json& first, const Json& other, std::size_t rank) {
  const auto patch = Json::diff(first, other);
  const auto path = patch.empty() ? std::string() : patch.front().at("path").get<std::string>();
  const Json::json_pointer at(path);
  const auto shown = [&](const Json& json) {
    if (!json.contains(at)) return std::string("nothing");
    auto text = text_of(json.at(at));
    return text.size() <= 40 ? text : text.substr(0, 37) + "...";
  };
  return str(entry, path, " (", shown(first), " on rank 0, ", shown(other), " on rank ", rank, ")");
}

/// Returns the values that differ, and the tensors that have the same form but differ in their bits. Tensors that
/// differ in names or forms are found later, by checkpoint::check_layout().
std::vector<Disagreement> disagreements_of(const std::vector<Json>& ranks, const EntryReplication& replication) {
  std::vector<Disagreement> differences;
  const auto compare = [&](const std::string& name, bool is_tensor, auto&& differ) {
    Disagreement difference{name, kind_of(replication, entry_name_of(name)), is_tensor};
    for (std::size_t r = 1; r < ranks.size(); ++r)
      if (differ(r, difference)) difference.ranks.push_back(r);
    if (!difference.ranks.empty()) differences.push_back(std::move(difference));
  };
  for (const auto& [name, tensor] : ranks.front().at("tensors").items())
    compare(name, true, [&](std::size_t rank, const Disagreement&) {
      const auto other = ranks[rank].at("tensors").value(name, tensor);
      return other[0] == tensor[0] && other[1] != tensor[1];
    });
  std::set<std::string> entries;
  for (const auto& rank : ranks)
    for (const auto& [entry, value] : rank.at("values").items()) entries.insert(entry);
  for (const auto& entry : entries)
    compare(entry, false, [&](std::size_t rank, Disagreement& difference) {
      const auto first = ranks.front().at("values").value(entry, Json());
      const auto other = ranks[rank].at("values").value(entry, Json());
      if (text_of(other) == text_of(first)) return false;
      if (difference.ranks.empty()) difference.what = first_difference(entry, first, other, rank);
      return true;
    });
  return differences;
}

/// Returns the largest absolute difference of any rank's copy from rank 0's; infinite if one is NaN. Collective.
double largest_difference(const Communicator& communicator, const at::Tensor& tensor) {
  const Bytes mine(tensor);
  auto theirs = communicator.broadcast(communicator.rank() == 0 ? std::string(mine.all()) : std::string());
  double largest = 0;
  if (communicator.rank() != 0 && mine.tensor().numel() > 0) {
    const auto first = at::from_blob(theirs.data(), mine.tensor().sizes(), mine.tensor().options());
    const auto wide = tensor.is_complex() ? at::kComplexDouble : at::kDouble;
    // Equal values, also infinities, differ by 0.
    const auto difference = mine.tensor().to(wide).sub(first.to(wide)).abs().masked_fill(mine.tensor().eq(first), 0);
    largest = difference.max().item<double>();
    if (std::isnan(largest)) largest = std::numeric_limits<double>::infinity();
  }
  return communicator.all_reduce(largest, ReduceOp::max);
}

}  // namespace

EntryReplication replication_of(const StateEntries& entries) {
  EntryReplication replication;
  for (const auto& [name, entry] : entries) replication[name] = replication_of(entry);
  return replication;
}

std::uint64_t structure_fingerprint(const StateDict& state, const EntryReplication& replication) {
  std::string text;
  const auto add = [&](const std::string& part) { text.append(part).push_back('\0'); };
  for (const auto& [name, tensor] : state.tensors) {
    add(name);
    add(form_of(tensor));
    add(is_per_rank(replication, name) ? "each rank's own" : "");
  }
  for (const auto& [entry, value] : state.values.items()) {
    add(entry);
    add(is_per_rank(replication, entry) ? "each rank's own" : text_of(value));
  }
  return fingerprint(text);
}

std::vector<at::Tensor> replicated_tensors(const StateDict& state, const EntryReplication& replication) {
  std::vector<at::Tensor> alike;
  for (const auto& [name, tensor] : state.tensors)
    if (!is_per_rank(replication, name)) alike.push_back(tensor);
  return alike;
}

std::set<std::string> find_drift(const Communicator& communicator, const StateDict& state,
                                 const EntryReplication& replication) {
  const auto ranks = comm::run_on_all(communicator, [&] { return describe(state, replication); });
  check_entries(ranks);
  check_per_rank(ranks);

  std::vector<Disagreement> drifted, unequal;
  for (auto& difference : disagreements_of(ranks, replication))
    (difference.kind == Replication::equal ? unequal : drifted).push_back(std::move(difference));
  if (!unequal.empty())
    throw Error(ExitCode::user_error, "saving " + name_all(unequal),
                "not the same on all ranks: " + name_ranks(ranks_of(unequal)) +
                    (ranks_of(unequal).size() == 1 ? " has" : " have") + " other values than rank 0",
                "Make it the same everywhere before the report, or give it as muster::per_rank(…) where each rank is "
                "to keep its own");

  std::set<std::string> tensors;
  double largest = 0;
  for (const auto& difference : drifted) {
    if (!difference.is_tensor) continue;
    tensors.insert(difference.what);
    largest = std::max(largest, largest_difference(communicator, state.tensors.at(difference.what)));
  }
  if (communicator.rank() != 0 || drifted.empty()) return tensors;
  const auto by = tensors.empty() ? "" : formatted(", by up to %.3g in ", largest) + counted(tensors.size(), "tensor");
  const bool statistics = std::ranges::any_of(drifted, [](const Disagreement& difference) {
    return difference.what.ends_with("running_mean") || difference.what.ends_with("running_var");
  });
  log::warn("saving: not the same on all ranks, so rank 0's are kept: " + name_all(drifted) + "; other on " +
            name_ranks(ranks_of(drifted)) + by +
            (statistics
                 ? ". Batch-norm's running statistics are each rank's own until they are averaged, which reports "
                   "and session.evaluation(model) do for a model that session.prepare_model() has prepared"
                 : ""));
  return tensors;
}

std::set<std::string> per_rank_tensors(const StateDict& state, const EntryReplication& replication) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : state.tensors)
    if (is_per_rank(replication, name)) names.insert(name);
  return names;
}

std::map<std::string, bool> per_rank_entries(const Json& values, const EntryReplication& replication) {
  std::map<std::string, bool> entries;
  for (const auto& [name, kind] : replication)
    if (values.contains(name)) entries.emplace(name, kind == Replication::per_rank);
  return entries;
}

Json gather_values(const Communicator* communicator, const StateDict& state, const EntryReplication& replication) {
  auto values = state.values;
  Json own = Json::object();
  for (const auto& [entry, value] : values.items())
    if (is_per_rank(replication, entry)) own[entry] = value;
  if (own.empty()) return values;
  const auto mine = json_to_cbor(own);
  std::vector<Json> ranks;
  for (const auto& rank : communicator == nullptr ? std::vector{mine} : communicator->all_gather(mine))
    ranks.push_back(json_from_cbor(rank));
  for (const auto& [entry, value] : own.items()) {
    auto list = Json::array();
    for (const auto& rank : ranks) list.push_back(rank.at(entry));
    values[entry] = std::move(list);
  }
  return values;
}

}  // namespace muster::detail::state
