#include "checkpoint/merge.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "comm/on_ranks.hpp"
#include "state/collect.hpp"
#include "state/fingerprint.hpp"

#include <ATen/ops/empty.h>

#include <cstring>
#include <map>
#include <string>

namespace muster::detail::checkpoint {
namespace {

/// Returns the names, types and shapes of an entry's tensors, and its JSON value.
Json outline_of(const StateDict& entry) {
  auto tensors = Json::array();
  for (const auto& [name, tensor] : entry.tensors)
    tensors.push_back(TensorEntry{.name = name, .type = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  return {{"values", entry.values}, {"tensors", std::move(tensors)}};
}

/// True if from_dict() made this checkpoint and got the entry by per_rank(), so that it holds one rank's row.
bool is_own_row(const Manifest& manifest, const std::string& name) {
  const auto at = manifest.per_rank.find(name);
  return manifest.world_size == 1 && at != manifest.per_rank.end() && at->second;
}

/// Returns the entry with the rows of all ranks. `mine`: the entry with this rank's row. Collective.
StateDict with_rows_of_all(const Communicator& communicator, const StateDict& mine) {
  StateDict all{.tensors = {}, .values = mine.values};
  for (auto& [name, list] : all.values.items()) {
    const auto own = list;
    list = Json::array();
    for (const auto& rank : communicator.all_gather(json_to_cbor(own))) list.push_back(json_from_cbor(rank).at(0));
  }
  for (const auto& [name, row] : mine.tensors) {
    std::string bytes;
    for (const auto& rank : communicator.all_gather(std::string(state::Bytes(row).all()))) bytes += rank;
    auto shape = row.sizes().vec();
    shape.at(0) = communicator.size();
    auto rows = at::empty(shape, row.options());
    if (!bytes.empty()) std::memcpy(rows.mutable_data_ptr(), bytes.data(), bytes.size());
    all.tensors.emplace(name, std::move(rows));
  }
  return all;
}

std::string fingerprint(const StateDict& entry) {
  auto text = json_text(outline_of(entry));
  for (const auto& [name, tensor] : entry.tensors) text += str("/", state::fingerprint(tensor));
  return text;
}

}  // namespace

StateDict broadcast(const Communicator& communicator, const StateDict& mine, int root) {
  const bool is_root = communicator.rank() == root;
  const auto outline = json_from_text(communicator.broadcast(is_root ? json_text(outline_of(mine)) : "", root));
  StateDict entry{.tensors = {}, .values = outline.at("values")};
  for (const auto& json : outline.at("tensors")) {
    const TensorEntry shape = json;
    auto tensor = is_root ? mine.tensors.at(shape.name) : at::empty(shape.shape, at::TensorOptions(shape.type));
    const auto bytes = communicator.broadcast(is_root ? std::string(state::Bytes(tensor).all()) : "", root);
    if (!is_root && !bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
    entry.tensors.emplace(shape.name, std::move(tensor));
  }
  return entry;
}

StateDict merge_entries(const Communicator& communicator, const std::optional<Checkpoint>& given) {
  StateDict mine;
  const auto of_rank = comm::run_on_all(communicator, [&] {
    Manifest manifest;
    if (given && is_checkpoint(given->path())) {
      mine = given->to_dict();
      manifest = read_manifest(given->path());
    }
    auto fingerprints = Json::object();
    for (const auto& [name, value] : mine.values.items()) {
      const auto entry = state::select_entry(mine, name);
      // All ranks' rows must have the same names, types and shapes, but not the same values.
      if (is_own_row(manifest, name))
        fingerprints[name] = {{"row of", outline_of(entry).at("tensors")}};
      else
        fingerprints[name] = fingerprint(entry);
    }
    return fingerprints;
  });
  std::map<std::string, int> owner;  // for each entry, the lowest rank that has it
  for (std::size_t rank = 0; rank < of_rank.size(); ++rank)
    for (const auto& [name, unused] : of_rank[rank].items()) owner.try_emplace(name, static_cast<int>(rank));
  StateDict merged;
  for (const auto& [name, root] : owner) {
    const auto& kept = of_rank[static_cast<std::size_t>(root)].at(name);
    bool everywhere = true;
    for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
      const auto its = of_rank[rank].value(name, Json());
      everywhere = everywhere && its == kept;
      if (!its.is_null() && its != kept && communicator.rank() == 0)
        log::warn(str("the entry ", name, " of the checkpoint that rank ", rank, " gives differs from that of rank ",
                      root, ", which is kept"));
    }
    auto entry = state::select_entry(mine, name);
    if (!everywhere)
      entry = broadcast(communicator, entry, root);
    else if (kept.is_object())
      entry = with_rows_of_all(communicator, entry);
    merged.tensors.merge(entry.tensors);
    merged.values.update(entry.values);
  }
  return merged;
}

}  // namespace muster::detail::checkpoint
