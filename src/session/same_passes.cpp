#include "session/same_passes.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "muster/error.hpp"
#include "watch/record.hpp"

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace muster::detail::session {
namespace {

/// Throws an Error if two ranks have made the pass `name` with different options.
void require_same(const std::string& name, const Json& first, std::size_t first_rank, const Json& other,
                  std::size_t rank) {
  for (const auto& [option, value] : first.items())
    if (value != other.at(option))
      throw Error(ExitCode::usage, "comparing the passes over \"" + name + "\" on all ranks",
                  str(option, " is ", value.get<std::string>(), " on rank ", first_rank, " and ",
                      other.at(option).get<std::string>(), " on rank ", rank),
                  "Give the same options on every rank; weights that are computed on one rank must be broadcast");
}

}  // namespace

void SamePasses::note(const step::OpenPass& pass) {
  if (pass.options.empty()) return;
  noted_[pass.name] = pass.options;
  is_due_ = true;
}

void SamePasses::compare(const Communicator& control) {
  if (!std::exchange(is_due_, false)) return;
  const watch::ScopedCallName call("comparing the options of a pass");
  std::vector<Json> of_ranks;
  for (const auto& text : control.all_gather(json_text_lossy(noted_))) of_ranks.push_back(json_from_text(text));
  require_same_passes(of_ranks);
  forget();
}

void SamePasses::warn_of_different_steps(const std::vector<std::int64_t>& steps, bool is_first) {
  const auto other = std::ranges::find_if(steps, [&](auto count) { return count != steps.front(); });
  if (other == steps.end() || std::exchange(has_warned_of_steps_, true) || !is_first) return;
  log::warn(str(
      "reporting: rank 0 has taken ", steps.front(), " training steps and rank ", other - steps.begin(), " ", *other,
      ". Unless ranks leave their loops early on purpose, make the same training passes on all ranks: without "
      ".training = false or torch::NoGradGuard on some of them"));
}

void require_same_passes(const std::vector<Json>& of_ranks) {
  for (std::size_t first = 0; first < of_ranks.size(); ++first)
    for (const auto& [name, options] : of_ranks[first].items())
      for (auto rank = first + 1; rank < of_ranks.size(); ++rank)
        if (const auto found = of_ranks[rank].find(name); found != of_ranks[rank].end())
          require_same(name, options, first, *found, rank);
}

}  // namespace muster::detail::session
