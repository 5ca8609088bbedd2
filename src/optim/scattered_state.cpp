#include "optim/scattered_state.hpp"

#include "comm/hierarchy.hpp"
#include "comm/on_ranks.hpp"
#include "comm/wait.hpp"

#include <deque>
#include <string>
#include <utility>

namespace muster::detail::optim {

ScatteredState::ScatteredState(Communicator communicator, std::shared_ptr<node::SharedSegment> segment,
                               std::vector<Chunk> chunks)
    : communicator_(std::move(communicator)), segment_(std::move(segment)), chunks_(std::move(chunks)) {}

void ScatteredState::reserve_shares() const {
  for (const auto& chunk : chunks_) {
    const auto share = comm::leaders_of(communicator_).own_share(chunk.count, chunk.type);
    const auto element = node::size_of(chunk.type);
    segment_->reserve(chunk.offset + share.first * element, share.count * element);
  }
}

void ScatteredState::gather() {
  if (whole_) return;
  comm::run_on_all(communicator_, [&] {
    for (const auto& chunk : chunks_) segment_->reserve(chunk.offset, chunk.count * node::size_of(chunk.type));
  });
  constexpr std::size_t most_under_way = 8;
  constexpr unsigned half = comm::SliceExchange::numbers / 2;  // the others are for all-reduces of the communicator
  std::deque<comm::SliceExchange> under_way;
  std::size_t begun = 0;
  const auto advance = [&] {
    for (; begun < chunks_.size() && under_way.size() < most_under_way; ++begun) {
      const auto& [offset, count, type] = chunks_[begun];
      auto* const data = segment_->data() + offset;
      under_way.emplace_back(comm::leaders_of(communicator_), half + static_cast<unsigned>(begun % half),
                             comm::SliceExchange::Slice{data, data, count, type}, nullptr, segment_,
                             comm::SliceExchange::Halves::gather);
    }
    while (!under_way.empty() && under_way.front().advance()) under_way.pop_front();
    return begun == chunks_.size() && under_way.empty();
  };
  comm::wait_on(communicator_, advance, [] { return std::string("gathering the state of an optimizer"); });
  communicator_.barrier();
  whole_ = is_gathered_ = true;
}

void ScatteredState::note_step() noexcept {
  is_gathered_ = false;
  if (!std::exchange(whole_, false)) return;
  const auto discard = [&](std::size_t begin, std::size_t end) {
    begin = node::whole_pages(begin);
    end = end / page_size() * page_size();
    if (begin < end) segment_->discard(begin, end - begin);
  };
  for (const auto& chunk : chunks_) {
    const auto share = comm::leaders_of(communicator_).own_share(chunk.count, chunk.type);
    const auto element = node::size_of(chunk.type);
    discard(chunk.offset, chunk.offset + share.first * element);
    discard(chunk.offset + (share.first + share.count) * element, chunk.offset + chunk.count * element);
  }
}

}  // namespace muster::detail::optim
