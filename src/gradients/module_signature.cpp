#include "gradients/module_signature.hpp"

#include "base/text.hpp"

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

namespace muster::detail::gradients {
namespace {

std::string type_and_shape(const at::Tensor& tensor) {
  auto text = c10::str(tensor.scalar_type(), tensor.sizes());
  if (!tensor.is_contiguous()) text += c10::str(" with strides ", tensor.strides());
  return text;
}

struct Entry {
  std::string name;  ///< "parameter fc.weight"
  std::string text;  ///< "Float[2, 3]"
  bool operator==(const Entry&) const = default;
};
using Entries = std::vector<Entry>;

Entries parse(const std::string& signature) {
  Entries entries;
  std::istringstream lines(signature);
  for (std::string line; std::getline(lines, line);) {
    const auto tab = line.find('\t');
    entries.push_back({line.substr(0, tab), line.substr(tab + 1)});
  }
  return entries;
}

/// Returns a text with the tensor's type and shape on each rank; nothing if all ranks have the same.
std::optional<std::string> disagreement(const std::vector<Entries>& of_rank, const std::string& name) {
  // Each text with the ranks that have it, in the order of ranks.
  std::vector<std::pair<std::string, std::vector<std::size_t>>> opinions;
  for (std::size_t rank = 0; rank < of_rank.size(); ++rank) {
    const auto entry = std::ranges::find(of_rank[rank], name, &Entry::name);
    const std::string text = entry == of_rank[rank].end() ? "missing" : entry->text;
    auto at = std::find_if(opinions.begin(), opinions.end(), [&](const auto& o) { return o.first == text; });
    if (at == opinions.end()) at = opinions.insert(at, {text, {}});
    at->second.push_back(rank);
  }
  if (opinions.size() == 1) return std::nullopt;
  std::string fact = name + " is ";
  for (std::size_t i = 0; i < opinions.size(); ++i) {
    if (i > 0) fact += i + 1 == opinions.size() ? " and " : ", ";
    fact += opinions[i].first + " on " + name_ranks(opinions[i].second);
  }
  return fact;
}

}  // namespace

std::string signature(const torch::nn::Module& module) {
  std::string text;
  std::map<const void*, std::string> seen;
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    const auto [first, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), name);
    text += c10::str(kind, ' ', name, '\t');
    text += is_new ? type_and_shape(tensor) : "the tensor of " + first->second;
    if (*kind == 'p' && !tensor.requires_grad()) text += ", frozen";
    text += '\n';
  };
  for (const auto& parameter : module.named_parameters()) add("parameter", parameter.key(), parameter.value());
  for (const auto& buffer : module.named_buffers()) add("buffer", buffer.key(), buffer.value());
  return text;
}

std::optional<std::string> first_difference(const std::vector<std::string>& signatures) {
  if (std::all_of(signatures.begin(), signatures.end(), [&](const auto& l) { return l == signatures.front(); }))
    return std::nullopt;
  std::vector<Entries> of_rank;
  for (const auto& signature : signatures) of_rank.push_back(parse(signature));
  for (const auto& entries : of_rank)
    for (const auto& entry : entries)
      if (auto fact = disagreement(of_rank, entry.name)) return fact;
  // Here all ranks have the same tensors, so only their order can differ.
  for (std::size_t rank = 1; rank < of_rank.size(); ++rank) {
    const auto [here, there] = std::mismatch(of_rank[0].begin(), of_rank[0].end(), of_rank[rank].begin());
    if (here != of_rank[0].end()) return str(here->name, " comes on rank 0 where rank ", rank, " has ", there->name);
  }
  return std::nullopt;
}

}  // namespace muster::detail::gradients
