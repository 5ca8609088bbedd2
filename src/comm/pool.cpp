#include "comm/pool.hpp"

#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace muster::detail::comm {
namespace {

/// So many ids, of 17 characters each, fit into one text of a handshake.
constexpr std::size_t most_offered = 50;

std::atomic<std::int64_t> num_made{0};

using Ids = std::set<std::uint64_t>;

std::string text_of(const std::vector<std::unique_ptr<MpiCommunicator>>& communicators) {
  std::ostringstream text;
  text << std::hex;
  for (const auto& one : communicators) text << one->id << ' ';
  return text.str();
}

Ids ids_in(const std::string& text) {
  std::istringstream in(text);
  in >> std::hex;
  Ids ids;
  for (std::uint64_t id = 0; in >> id;) ids.insert(id);
  return ids;
}

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

/// Takes this rank's idle communicators of `members` out of the pool, the newest first: another rank may keep an old
/// one in use for long.
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
  const auto texts = handshake.all_gather(text_of(offered));
  std::vector<Ids> idle_on_rank;
  for (const int r : ranks) idle_on_rank.push_back(ids_in(texts[static_cast<std::size_t>(r)]));

  // All ranks choose the same communicators in the same order.
  std::vector<std::unique_ptr<MpiCommunicator>> chosen;
  for (auto& one : offered) {
    const bool everywhere = std::ranges::all_of(idle_on_rank, [&](const Ids& ids) { return ids.contains(one->id); });
    if (everywhere && chosen.size() < count)
      chosen.push_back(std::move(one));
    else
      give_back(std::move(one));
  }
  for (const auto& one : chosen) one->cancel_receives();
  handshake.all_true(true);

  std::vector<PooledCommunicator> taken;
  for (auto& one : chosen)
    if (one->clean(doing)) taken.emplace_back(std::move(one), shared_from_this());
  while (taken.size() < count) {
    const auto made = make(over.comm, ranks);
    taken.emplace_back(std::make_unique<MpiCommunicator>(made, members, new_id(made, members.front())),
                       shared_from_this());
  }
  return taken;
}

}  // namespace muster::detail::comm
