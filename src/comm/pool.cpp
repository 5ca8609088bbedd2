#include "comm/pool.hpp"

#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <iterator>
#include <span>

namespace muster::detail::comm {
namespace {

/// How many idle communicators the ranks compare at most.
constexpr std::size_t most_offered = 50;

std::atomic<std::int64_t> num_made{0};

/// Makes an MPI communicator over `ranks` of `over`, in that order. Collective over these ranks.
MPI_Comm make(MPI_Comm over, const std::vector<int>& ranks) {
  ++num_made;
  if (ranks == ranks_in(over)) return duplicate(over);
  MPI_Group group = MPI_GROUP_NULL, part = MPI_GROUP_NULL;
  MPI_Comm made = MPI_COMM_NULL;
  check(MPI_Comm_group(over, &group), "MPI_Comm_group");
  check(MPI_Group_incl(group, static_cast<int>(ranks.size()), ranks.data(), &part), "MPI_Group_incl");
  check(MPI_Comm_create_group(over, part, 0, &made), "MPI_Comm_create_group");
  check(MPI_Group_free(&part), "MPI_Group_free");
  check(MPI_Group_free(&group), "MPI_Group_free");
  check(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return made;
}

}  // namespace

std::int64_t num_mpi_communicators() noexcept { return num_made; }

PooledCommunicator::~PooledCommunicator() {
  if (communicator_) pool_->give_back(std::move(communicator_));
}

void Pool::give_back(std::unique_ptr<MpiCommunicator> communicator) noexcept {
  communicator->free_memory();
  if (!communicator->is_usable()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(communicator));
}

/// Takes this rank's idle communicators of `members` out of the pool, at most most_offered, the newest first: another
/// rank may keep an old one in use for long.
std::vector<std::unique_ptr<MpiCommunicator>> Pool::claim(const std::vector<int>& members) {
  const std::lock_guard lock(mutex_);
  const auto others = std::ranges::partition(idle_, [&](const auto& one) { return one->members == members; });
  std::vector<std::unique_ptr<MpiCommunicator>> claimed(std::make_move_iterator(idle_.begin()),
                                                        std::make_move_iterator(others.begin()));
  idle_.erase(idle_.begin(), others.begin());
  std::ranges::sort(claimed, std::ranges::greater(), &MpiCommunicator::id);
  for (; claimed.size() > most_offered; claimed.pop_back()) idle_.push_back(std::move(claimed.back()));
  return claimed;
}

std::vector<PooledCommunicator> Pool::take(std::size_t count, const std::vector<int>& members, MpiCommunicator& over,
                                           const std::vector<int>& ranks, const char* doing) {
  auto offered = claim(members);
  Handshake handshake(over, doing);
  const auto find = [&](std::uint64_t id) { return std::ranges::find(offered, id, [](auto& one) { return one->id; }); };
  // All ranks choose the same communicators in the same order, from those that the first rank has.
  std::array<std::uint64_t, most_offered> ids{}, lacks{};
  if (rank_in(over.comm) == ranks.front())
    std::ranges::transform(offered, ids.begin(), [](const auto& one) { return one->id; });
  handshake.all_max(ranks, ids);
  std::ranges::transform(ids, lacks.begin(), [&](auto id) { return find(id) == offered.end(); });
  handshake.all_max(ranks, lacks);
  std::vector<std::unique_ptr<MpiCommunicator>> chosen;
  for (std::size_t i = 0; i < ids.size() && chosen.size() < count; ++i) {
    if (lacks[i] != 0) continue;
    const auto one = find(ids[i]);
    chosen.push_back(std::move(*one));
    offered.erase(one);
  }
  for (auto& one : offered) give_back(std::move(one));
  for (const auto& one : chosen) one->cancel_receives();
  std::uint64_t none = 0;
  handshake.all_max(ranks, std::span(&none, 1));  // all have cancelled

  const auto all_max = [&](std::span<std::uint64_t> values, const std::function<void()>& meanwhile) {
    handshake.all_max(ranks, values, meanwhile);
  };
  std::vector<PooledCommunicator> taken;
  for (auto& one : chosen)
    if (one->clean(doing, all_max)) taken.emplace_back(std::move(one), shared_from_this());
  while (taken.size() < count) {
    const auto made = make(over.comm, ranks);
    taken.emplace_back(std::make_unique<MpiCommunicator>(made, members, new_id(made, members.front())),
                       shared_from_this());
  }
  return taken;
}

}  // namespace muster::detail::comm
