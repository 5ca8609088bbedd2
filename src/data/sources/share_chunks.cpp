#include "data/sources/share_chunks.hpp"

#include "base/json.hpp"
#include "comm/shared_memory.hpp"
#include "data/sources/node_chunks.hpp"
#include "data/sources/source.hpp"
#include "muster/json.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace muster::detail::data {
namespace {

/// A rank's offer to share the chunks of one dataset.
struct Offer {
  std::size_t bytes = 0;  ///< of a shared segment for them; 0 if the chunks cannot be shared, or are shared already
  std::uint64_t origin = 0;

  static Offer of(const NodeChunks* chunks) {
    if (chunks == nullptr || chunks->slots() != nullptr) return {};
    return {node::SharedSlots::memory_bytes(chunks->arrays()), chunks->origin()};
  }
};

/// A rank's offers for all datasets; none if it has no data.
struct Offers {
  std::size_t room = 0;  ///< bytes of shared memory on its node
  std::vector<Offer> datasets;

  std::string text() const {
    Json all = Json::array({room});
    for (const auto& offer : datasets) all.push_back({offer.bytes, offer.origin});
    return json_text(all);
  }
  static Offers from(const std::string& text) {
    const auto all = json_from_text(text);
    Offers offers{.room = all.front(), .datasets = {}};
    for (std::size_t i = 1; i < all.size(); ++i) offers.datasets.push_back({all[i][0], all[i][1]});
    return offers;
  }
};

/// The chunks of each dataset. A dataset and its subsets share theirs, which are listed once.
std::vector<NodeChunks*> chunks_of(std::span<const std::shared_ptr<Source>> sources) {
  std::vector<NodeChunks*> all;
  for (const auto& source : sources) {
    auto* const chunks = source->node_chunks();
    if (chunks == nullptr || std::ranges::find(all, chunks) == all.end()) all.push_back(chunks);
  }
  return all;
}

/// Decides, alike on all ranks, which datasets are shared.
class Agreement {
 public:
  Agreement(const Communicator& communicator, const Offers& mine) : topology_(communicator.topology()) {
    for (const auto& text : communicator.all_gather(mine.text())) of_rank_.push_back(Offers::from(text));
    for (const auto& offers : of_rank_) {
      room_ = std::min(room_, offers.room);
      if (!offers.datasets.empty() && first_ == nullptr) first_ = &offers;
    }
  }

  std::size_t num_datasets() const noexcept { return first_ == nullptr ? 0 : first_->datasets.size(); }

  /// The size of the segment for dataset `d`, which counts as used from then on; 0 if it is not shared.
  std::size_t take_bytes(std::size_t d) {
    const auto bytes = first_->datasets[d].bytes;
    if (bytes > room_ || !agree_on(d)) return 0;
    room_ -= bytes;
    return bytes;
  }

  /// True if this rank's node has other ranks with data.
  bool has_company() const {
    int ranks = 0;
    for (std::size_t r = 0; r < of_rank_.size(); ++r)
      if (topology_.node_of_rank[r] == topology_.node_rank && !of_rank_[r].datasets.empty()) ++ranks;
    return ranks > 1;
  }

 private:
  bool agree_on(std::size_t d) const {
    std::vector<const Offer*> of_node(of_rank_.size());  // the first one of each node
    for (std::size_t r = 0; r < of_rank_.size(); ++r) {
      const auto& datasets = of_rank_[r].datasets;
      if (datasets.empty()) continue;
      if (datasets.size() != num_datasets() || datasets[d].bytes != first_->datasets[d].bytes) return false;
      auto& first = of_node[static_cast<std::size_t>(topology_.node_of_rank[r])];
      if (first == nullptr) first = &datasets[d];
      if (datasets[d].origin != first->origin) return false;
    }
    return true;
  }

  const Topology& topology_;
  std::vector<Offers> of_rank_;
  const Offers* first_ = nullptr;  ///< offers of the first rank with data
  std::size_t room_ = std::numeric_limits<std::size_t>::max();
};

}  // namespace

void share_chunks(const Communicator& communicator, std::span<const std::shared_ptr<Source>> sources) {
  if (communicator.topology().num_nodes == communicator.size()) return;
  const auto mine = chunks_of(sources);
  Offers offers{.room = node::spare_shared_memory(), .datasets = {}};
  for (const auto* chunks : mine) offers.datasets.push_back(Offer::of(chunks));
  Agreement agreement(communicator, offers);
  for (std::size_t d = 0; d < agreement.num_datasets(); ++d) {
    const auto bytes = agreement.take_bytes(d);
    if (bytes == 0) continue;
    const auto reserved = mine.empty() ? 0 : node::SharedSlots::reserved_bytes(mine[d]->arrays());
    auto segment =
        comm::map_segment(communicator, bytes, reserved, "each rank keeps decoded chunks of datasets by itself");
    if (segment && !mine.empty() && agreement.has_company())
      mine[d]->attach(std::make_unique<const node::SharedSlots>(std::move(segment), mine[d]->arrays()));
  }
}

}  // namespace muster::detail::data
