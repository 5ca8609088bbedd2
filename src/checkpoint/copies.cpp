#include "checkpoint/copies.hpp"

#include "base/log.hpp"
#include "checkpoint/bytes.hpp"
#include "checkpoint/checksum.hpp"
#include "checkpoint/components.hpp"
#include "comm/together.hpp"
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

Copies kind_of(const EntryCopies& copies, const std::string& entry) {
  const auto at = copies.find(entry);
  return at == copies.end() ? Copies::equal : at->second;
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

/// Something of which some ranks have another copy than rank 0.
struct Disagreement {
  std::string what;
  std::vector<int> ranks;
  Copies kind = Copies::equal;
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

/// What a rank says of its state when fingerprints differ. By bytes, wherever the tensors lie.
Json describe(const StateDict& state, const EntryCopies& copies) {
  Json tensors = Json::object(), values = Json::object(), own = Json::array();
  for (const auto& [name, tensor] : state.tensors) {
    const bool alike = kind_of(copies, entry_of(name)) != Copies::own;
    tensors[name] = {{"form", form_of(tensor)}, {"sum", alike ? checksum(tensor) : 0}};
  }
  for (const auto& [entry, value] : state.values.items())
    if (kind_of(copies, entry) == Copies::own)
      own.push_back(entry);
    else
      values[entry] = value;
  return {{"tensors", std::move(tensors)}, {"values", std::move(values)}, {"own", std::move(own)}};
}

/// What each rank has of its own must be there on all, in one shape.
void check_own(const std::vector<Json>& ranks, const EntryCopies& copies) {
  const auto fail = [](const std::string& what, const std::string& fact) {
    throw Error(ExitCode::user_error, "saving " + what, fact,
                "What muster::per_rank takes must be given on every rank, in the same shape and type");
  };
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const auto rank = std::to_string(r);
    for (const auto& [from, to] : {std::pair{std::size_t{0}, r}, std::pair{r, std::size_t{0}}}) {
      const auto& there = ranks[to].at("own");
      for (const auto& entry : ranks[from].at("own"))
        if (std::find(there.begin(), there.end(), entry) == there.end())
          fail(entry.get<std::string>(),
               "it is each rank's own on rank " + std::to_string(from) + ", and not on rank " + std::to_string(to));
      for (const auto& [name, tensor] : ranks[from].at("tensors").items()) {
        if (kind_of(copies, entry_of(name)) != Copies::own) continue;
        const auto& others = ranks[to].at("tensors");
        if (!others.contains(name))
          fail(name, "rank " + std::to_string(from) + " has it, rank " + std::to_string(to) + " does not");
        if (others.at(name).at("form") != tensor.at("form"))
          fail(name, "it is " + tensor.at("form").get<std::string>() + " on rank " + std::to_string(from) + " and " +
                         others.at(name).at("form").get<std::string>() + " on rank " + std::to_string(to));
      }
    }
  }
}

/// Tensors that rank 0 and others have in one shape with other bits. Where names or shapes differ, laying out says so.
std::vector<Disagreement> compare_tensors(const std::vector<Json>& ranks, const EntryCopies& copies) {
  std::vector<Disagreement> differences;
  for (const auto& [name, tensor] : ranks.front().at("tensors").items()) {
    Disagreement difference{name, {}, kind_of(copies, entry_of(name))};
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      const auto& others = ranks[r].at("tensors");
      const auto other = others.find(name);
      if (other != others.end() && other->at("form") == tensor.at("form") && other->at("sum") != tensor.at("sum"))
        difference.ranks.push_back(static_cast<int>(r));
    }
    if (!difference.ranks.empty()) differences.push_back(std::move(difference));
  }
  return differences;
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

std::vector<Disagreement> compare_values(const std::vector<Json>& ranks, const EntryCopies& copies) {
  std::set<std::string> entries;
  for (const auto& rank : ranks)
    for (const auto& [entry, value] : rank.at("values").items()) entries.insert(entry);
  const auto value_of = [](const Json& rank, const std::string& entry) {
    return rank.at("values").value(entry, Json());
  };
  std::vector<Disagreement> differences;
  for (const auto& entry : entries) {
    const auto first = value_of(ranks.front(), entry);
    Disagreement difference{{}, {}, kind_of(copies, entry)};
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      const auto other = value_of(ranks[r], entry);
      if (text_of(other) == text_of(first)) continue;
      if (difference.ranks.empty()) difference.what = first_difference(entry, first, other, static_cast<int>(r));
      difference.ranks.push_back(static_cast<int>(r));
    }
    if (!difference.ranks.empty()) differences.push_back(std::move(difference));
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

EntryCopies copies_of(const StateEntries& entries) {
  EntryCopies copies;
  for (const auto& [name, entry] : entries) copies[name] = entry.object()->copies();
  return copies;
}

std::uint64_t fingerprint(const StateDict& state, const EntryCopies& copies) {
  std::vector<at::Tensor> alike;
  std::string text;
  const auto add = [&](const std::string& part) { text.append(part).push_back('\0'); };
  for (const auto& [name, tensor] : state.tensors) {
    add(name);
    add(form_of(tensor));
    if (kind_of(copies, entry_of(name)) != Copies::own) alike.push_back(tensor);
  }
  for (const auto sum : checksums_in_place(alike)) add(std::to_string(sum));
  for (const auto& [entry, value] : state.values.items()) {
    const auto kind = kind_of(copies, entry);
    add(entry);
    add(kind == Copies::own ? "each rank's own" : text_of(value));
  }
  return checksum(text);
}

std::set<std::string> settle(const Communicator& communicator, const StateDict& state, const EntryCopies& copies) {
  std::vector<Json> ranks;
  for (const auto& rank : comm::on_all(communicator, [&] { return pack(describe(state, copies)); }))
    ranks.push_back(Json::from_cbor(rank));
  check_own(ranks, copies);

  auto tensors = compare_tensors(ranks, copies), values = compare_values(ranks, copies);
  std::vector<Disagreement> users;
  for (auto* differences : {&tensors, &values}) {
    std::copy_if(differences->begin(), differences->end(), std::back_inserter(users),
                 [](const Disagreement& difference) { return difference.kind == Copies::equal; });
    std::erase_if(*differences, [](const Disagreement& difference) { return difference.kind == Copies::equal; });
  }
  if (!users.empty())
    throw Error(ExitCode::user_error, "saving " + name_all(users),
                "not the same on all ranks: " + name_ranks(ranks_of(users)) +
                    (ranks_of(users).size() == 1 ? " has" : " have") + " other values than rank 0",
                "Make it the same everywhere before the report, or give it as muster::per_rank(…) where each rank is "
                "to keep its own");

  std::set<std::string> kept;
  double largest = 0;
  for (const auto& difference : tensors) {
    kept.insert(difference.what);
    largest = std::max(largest, largest_difference(communicator, state.tensors.at(difference.what)));
  }
  auto all = tensors;
  all.insert(all.end(), values.begin(), values.end());
  if (communicator.rank() == 0 && !all.empty())
    log::warn("saving: not the same on all ranks, and rank 0's are kept: " + name_all(all) + "; other on " +
              name_ranks(ranks_of(all)) +
              (tensors.empty() ? ""
                               : ", by up to " + number_text(largest) + " in " + std::to_string(tensors.size()) +
                                     (tensors.size() == 1 ? " tensor" : " tensors")));
  return kept;
}

StateDict put_together(const Communicator* communicator, StateDict state, const EntryCopies& copies) {
  const auto of_all = [&](const std::string& mine) {
    return communicator == nullptr ? std::vector{mine} : communicator->all_gather(mine);
  };
  for (auto& [name, tensor] : state.tensors) {
    if (kind_of(copies, entry_of(name)) != Copies::own) continue;
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
    if (kind_of(copies, entry) == Copies::own) own[entry] = value;
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
