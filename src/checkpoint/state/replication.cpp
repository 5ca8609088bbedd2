#include "checkpoint/state/replication.hpp"

#include "base/log.hpp"
#include "checkpoint/state/bytes.hpp"
#include "checkpoint/state/checksum.hpp"
#include "checkpoint/state/collect.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/item.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>
#include <vector>

namespace muster::detail::checkpoint {
namespace {

/// As many are named in one message.
constexpr std::size_t most_named = 4;

Replication kind_of(const EntryReplication& replication, const std::string& entry) {
  const auto at = replication.find(entry);
  return at == replication.end() ? Replication::equal : at->second;
}

std::string text_of(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string pack(const Json& json) {
  const auto bytes = Json::to_cbor(json);
  return {bytes.begin(), bytes.end()};
}

/// Type and shape.
std::string form_of(const at::Tensor& tensor) {
  std::string text = std::string(c10::toString(tensor.scalar_type())) + " [";
  for (std::int64_t d = 0; d < tensor.dim(); ++d) text += (d > 0 ? ", " : "") + std::to_string(tensor.size(d));
  return text + "]";
}

/// "rank 1", "ranks 1, 2 and 5".
std::string name_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

/// Something of which some ranks hold other bits than rank 0.
struct Disagreement {
  std::string what;
  Replication kind = Replication::equal;
  bool is_tensor = false;
  std::vector<int> ranks = {};
};

std::string name_all(const std::vector<Disagreement>& differences) {
  std::string text;
  for (std::size_t i = 0; i < std::min(differences.size(), most_named); ++i)
    text += (i == 0 ? "" : ", ") + differences[i].what;
  if (differences.size() > most_named) text += " and " + std::to_string(differences.size() - most_named) + " more";
  return text;
}

std::vector<int> ranks_of(const std::vector<Disagreement>& differences) {
  std::set<int> ranks;
  for (const auto& difference : differences) ranks.insert(difference.ranks.begin(), difference.ranks.end());
  return {ranks.begin(), ranks.end()};
}

/// What a rank says of its state when fingerprints differ: tensors by type, shape and bytes, wherever they lie, and
/// values by entry; of what is per rank the form only.
Json describe(const StateDict& state, const EntryReplication& replication) {
  Json tensors = Json::object(), values = Json::object(), per_rank = Json::object();
  for (const auto& [entry, value] : state.values.items())
    (kind_of(replication, entry) == Replication::per_rank ? per_rank[entry] = "JSON" : values[entry] = value);
  for (const auto& [name, tensor] : state.tensors)
    if (kind_of(replication, entry_of(name)) == Replication::per_rank)
      per_rank[name] = form_of(tensor);
    else
      tensors[name] = {form_of(tensor), checksum(tensor)};
  return {{"tensors", std::move(tensors)}, {"values", std::move(values)}, {"per_rank", std::move(per_rank)}};
}

/// What is per rank must be there on all of them, in one form.
void check_per_rank(const std::vector<Json>& ranks) {
  const auto fail = [](const std::string& what, const std::string& fact) {
    throw Error(ExitCode::user_error, "saving " + what, fact,
                "What muster::per_rank takes must be given on every rank, in the same shape and type");
  };
  for (std::size_t r = 1; r < ranks.size(); ++r)
    for (const auto& [from, to] : {std::pair{std::size_t{0}, r}, std::pair{r, std::size_t{0}}}) {
      const auto& there = ranks[to].at("per_rank");
      const auto here = " on rank " + std::to_string(from), other = " on rank " + std::to_string(to);
      for (const auto& [what, form] : ranks[from].at("per_rank").items()) {
        if (!there.contains(what)) fail(what, "it is each rank's own" + here + ", and not" + other);
        if (there.at(what) != form)
          fail(what, "it is " + form.get<std::string>() + here + " and " + there.at(what).get<std::string>() + other);
      }
    }
}

/// "best (0.5 on rank 0, 0.7 on rank 2)", or the first place inside.
std::string first_difference(const std::string& entry, const Json& first, const Json& other, int rank) {
  const auto patch = Json::diff(first, other);
  const auto path = patch.empty() ? std::string() : patch.front().at("path").get<std::string>();
  const Json::json_pointer at(path);
  const auto shown = [&](const Json& json) {
    if (!json.contains(at)) return std::string("nothing");
    auto text = text_of(json.at(at));
    return text.size() <= 40 ? text : text.substr(0, 37) + "...";
  };
  return entry + path + " (" + shown(first) + " on rank 0, " + shown(other) + " on rank " + std::to_string(rank) + ")";
}

/// Values, and tensors that rank 0 and others have in one form. Where names or forms differ, laying out says so.
std::vector<Disagreement> disagreements_of(const std::vector<Json>& ranks, const EntryReplication& replication) {
  std::vector<Disagreement> differences;
  const auto compare = [&](const std::string& name, bool is_tensor, auto&& differ) {
    Disagreement difference{name, kind_of(replication, entry_of(name)), is_tensor};
    for (std::size_t r = 1; r < ranks.size(); ++r)
      if (differ(ranks[r], difference)) difference.ranks.push_back(static_cast<int>(r));
    if (!difference.ranks.empty()) differences.push_back(std::move(difference));
  };
  for (const auto& [name, tensor] : ranks.front().at("tensors").items())
    compare(name, true, [&](const Json& rank, const Disagreement&) {
      const auto other = rank.at("tensors").find(name);
      return other != rank.at("tensors").end() && other->at(0) == tensor.at(0) && other->at(1) != tensor.at(1);
    });
  std::set<std::string> entries;
  for (const auto& rank : ranks)
    for (const auto& [entry, value] : rank.at("values").items()) entries.insert(entry);
  for (const auto& entry : entries) {
    const auto first = ranks.front().at("values").value(entry, Json());
    compare(entry, false, [&](const Json& rank, Disagreement& difference) {
      const auto other = rank.at("values").value(entry, Json());
      if (text_of(other) == text_of(first)) return false;
      const auto number = static_cast<int>(&rank - ranks.data());
      if (difference.ranks.empty()) difference.what = first_difference(entry, first, other, number);
      return true;
    });
  }
  return differences;
}

/// The largest absolute difference of any rank's copy from rank 0's; infinite where one is NaN. Collective.
double largest_difference(const Communicator& communicator, const at::Tensor& tensor) {
  const Bytes mine(tensor);
  const auto bytes = mine.all();
  auto theirs = communicator.broadcast(communicator.rank() == 0
                                           ? std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size())
                                           : std::string());
  double largest = 0;
  if (communicator.rank() != 0 && mine.tensor().numel() > 0) {
    const auto first = at::from_blob(theirs.data(), mine.tensor().sizes(), mine.tensor().options());
    const auto wide = tensor.is_complex() ? at::kComplexDouble : at::kDouble;
    // Where both are equal, infinities among them, there is none.
    const auto apart = mine.tensor().to(wide).sub(first.to(wide)).abs().masked_fill(mine.tensor().eq(first), 0);
    largest = apart.max().item<double>();
    if (std::isnan(largest)) largest = std::numeric_limits<double>::infinity();
  }
  return communicator.all_reduce(largest, ReduceOp::max);
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

}  // namespace

EntryReplication replication_of(const StateEntries& entries) {
  EntryReplication replication;
  for (const auto& [name, entry] : entries) replication[name] = replication_of(entry);
  return replication;
}

std::uint64_t fingerprint(const StateDict& state, const EntryReplication& replication) {
  std::vector<at::Tensor> alike;
  std::string text;
  const auto add = [&](const std::string& part) { text.append(part).push_back('\0'); };
  for (const auto& [name, tensor] : state.tensors) {
    add(name);
    add(form_of(tensor));
    if (kind_of(replication, entry_of(name)) != Replication::per_rank) alike.push_back(tensor);
  }
  for (const auto sum : checksums_in_place(alike)) add(std::to_string(sum));
  for (const auto& [entry, value] : state.values.items()) {
    const auto kind = kind_of(replication, entry);
    add(entry);
    add(kind == Replication::per_rank ? "each rank's own" : text_of(value));
  }
  return checksum(text);
}

std::set<std::string> find_drift(const Communicator& communicator, const StateDict& state,
                                 const EntryReplication& replication) {
  std::vector<Json> ranks;
  for (const auto& rank : comm::on_all(communicator, [&] { return pack(describe(state, replication)); }))
    ranks.push_back(Json::from_cbor(rank));
  check_per_rank(ranks);

  auto drifted = disagreements_of(ranks, replication);
  const auto users = std::ranges::stable_partition(
      drifted, [](const Disagreement& difference) { return difference.kind != Replication::equal; });
  if (const std::vector<Disagreement> unequal(users.begin(), users.end()); !unequal.empty())
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
  if (communicator.rank() == 0 && !drifted.empty())
    log::warn("saving: not the same on all ranks, and rank 0's are kept: " + name_all(drifted) + "; other on " +
              name_ranks(ranks_of(drifted)) +
              (tensors.empty() ? ""
                               : ", by up to " + number_text(largest) + " in " + std::to_string(tensors.size()) +
                                     (tensors.size() == 1 ? " tensor" : " tensors")));
  return tensors;
}

StateDict gather_per_rank(const Communicator* communicator, StateDict state, const EntryReplication& replication) {
  const auto of_all = [&](const std::string& mine) {
    return communicator == nullptr ? std::vector{mine} : communicator->all_gather(mine);
  };
  for (auto& [name, tensor] : state.tensors) {
    if (kind_of(replication, entry_of(name)) != Replication::per_rank) continue;
    const auto mine = Bytes(tensor);
    const auto ranks = of_all({reinterpret_cast<const char*>(mine.all().data()), mine.all().size()});
    auto sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), static_cast<std::int64_t>(ranks.size()));
    tensor = at::empty(sizes, at::TensorOptions(tensor.scalar_type()));
    auto* to = static_cast<char*>(tensor.mutable_data_ptr());
    for (const auto& rank : ranks) to = std::copy(rank.begin(), rank.end(), to);
  }
  Json own = Json::object();
  for (const auto& [entry, value] : state.values.items())
    if (kind_of(replication, entry) == Replication::per_rank) own[entry] = value;
  if (own.empty()) return state;
  std::vector<Json> ranks;
  for (const auto& rank : of_all(pack(own))) ranks.push_back(Json::from_cbor(rank));
  for (const auto& [entry, value] : own.items()) {
    auto list = Json::array();
    for (const auto& rank : ranks) list.push_back(rank.at(entry));
    state.values[entry] = std::move(list);
  }
  return state;
}

}  // namespace muster::detail::checkpoint
