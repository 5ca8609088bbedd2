#include "comm/mpi_communicator.hpp"

#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <utility>

namespace muster::detail::comm {
namespace {

/// The tag of markers, above those of all_to_all(), SliceExchange, wait_for_all_ranks() and Handshake.
constexpr int marker_tag = 16'387;

/// The most bytes that missed collectives may move: a rank allocates memory for all of them at once.
constexpr std::size_t most_missed_bytes = std::size_t{256} << 20;

void wait_for_all_ranks(const char* doing, const std::function<bool()>& ready) {
  if (!wait_until(ready, default_limit))
    throw Error(ExitCode::retry, doing,
                "not all of its ranks came within " + std::to_string(default_limit.count() / 1000) + " s",
                "A rank is stuck, lost or in another collective");
}

std::size_t bytes_of(const node::Call& call) { return call.count * node::size_of(call.type); }

}  // namespace

std::uint64_t new_id(MPI_Comm comm, int first) {
  static std::atomic<std::uint32_t> given{0};
  std::uint64_t id = (static_cast<std::uint64_t>(first) + 1) << 32 | ++given;
  check(MPI_Bcast(&id, 1, MPI_UINT64_T, 0, comm), "MPI_Bcast");
  return id;
}

MpiCommunicator::MpiCommunicator(MPI_Comm its_comm, std::vector<int> its_members, std::uint64_t its_id)
    : comm(its_comm), members(std::move(its_members)), id(its_id), mine_{.id = its_id} {}

MpiCommunicator::~MpiCommunicator() {
  // MPI may still read or write this memory, so it is never freed.
  if (!receives_.empty() || !pending_.empty()) new std::vector<std::shared_ptr<void>>(std::move(memory_));
}

MPI_Request MpiCommunicator::start(const node::Call& call, void* data) {
  using Kind = node::Call::Kind;
  const auto type = mpi_type(call.type);
  const int count = static_cast<int>(call.count);
  MPI_Request request = MPI_REQUEST_NULL;
  if (call.kind == Kind::barrier) {
    check(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
  } else if (call.kind == Kind::broadcast) {
    check(MPI_Ibcast(data, count, type, call.root, comm, &request), "MPI_Ibcast");
  } else if (call.kind == Kind::all_reduce) {
    check(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, mpi_op(call.op, call.type), comm, &request),
          "MPI_Iallreduce");
  } else {
    const bool is_root = rank_in(comm) == call.root;
    check(MPI_Ireduce(is_root ? MPI_IN_PLACE : data, is_root ? data : nullptr, count, type, mpi_op(call.op, call.type),
                      call.root, comm, &request),
          "MPI_Ireduce");
  }
  mine_.calls[mine_.begun++ % kept_calls] = call.encode();
  return request;
}

void MpiCommunicator::abandon(std::vector<MPI_Request> receives, const std::vector<MPI_Request>& others,
                              std::shared_ptr<void> memory) {
  const std::lock_guard lock(mutex_);
  std::erase(receives, MPI_REQUEST_NULL);
  receives_.insert(receives_.end(), receives.begin(), receives.end());
  pending_.insert(pending_.end(), others.begin(), others.end());
  std::erase(pending_, MPI_REQUEST_NULL);
  if (memory) memory_.push_back(std::move(memory));
}

void MpiCommunicator::free_memory() noexcept {
  std::vector<std::shared_ptr<void>> freed;  // its destructors run without the lock
  const std::lock_guard lock(mutex_);
  if (receives_.empty() && pending_.empty()) freed.swap(memory_);
}

void MpiCommunicator::cancel_receives() {
  for (auto& receive : receives_) {
    check(MPI_Cancel(&receive), "MPI_Cancel");
    pending_.push_back(receive);  // it still ends, perhaps with a message that has come before
  }
  receives_.clear();
}

bool MpiCommunicator::clean(const char* doing) {
  is_usable_ = false;  // until the end
  if (!catch_up(exchange_markers(doing))) return false;
  wait_for_all_ranks(doing, [&] { return all_finished(); });
  memory_.clear();
  mine_ = {.id = id};
  return is_usable_ = true;
}

/// Returns the markers of all ranks. MPI delivers the messages of a rank in order, so everything that comes before its
/// marker belongs to the old use and is dropped.
std::vector<MpiCommunicator::Marker> MpiCommunicator::exchange_markers(const char* doing) {
  const auto mine = std::make_shared<Marker>(mine_);
  memory_.push_back(mine);
  for (std::size_t r = 0; r < members.size(); ++r)
    check(MPI_Isend(mine.get(), sizeof *mine, MPI_BYTE, static_cast<int>(r), marker_tag, comm,
                    &pending_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Isend");
  std::vector<std::optional<Marker>> received(members.size());
  wait_for_all_ranks(doing, [&] {
    bool all = true;
    for (std::size_t r = 0; r < members.size(); ++r) all = receive_marker(static_cast<int>(r), received[r]) && all;
    all_finished();  // makes progress
    return all;
  });
  std::vector<Marker> markers;
  for (const auto& marker : received) markers.push_back(*marker);
  return markers;
}

/// Receives the messages of that rank up to its marker. True once the marker has come.
bool MpiCommunicator::receive_marker(int rank, std::optional<Marker>& marker) {
  while (!marker) {
    int flag = 0;
    MPI_Status status;
    check(MPI_Iprobe(rank, MPI_ANY_TAG, comm, &flag, &status), "MPI_Iprobe");
    if (!flag) return false;
    MPI_Count bytes = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    if (status.MPI_TAG == marker_tag && bytes == sizeof(Marker)) {
      Marker heard;
      check(MPI_Recv(&heard, sizeof heard, MPI_BYTE, rank, marker_tag, comm, MPI_STATUS_IGNORE), "MPI_Recv");
      if (heard.id == id) marker = heard;  // users may send with this tag too
      continue;
    }
    // Received in units of the largest MPI type, so that the count of every message fits into an int.
    constexpr MPI_Count unit = 16;
    const auto count = bytes / unit + 1;
    const auto dropped = std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(count * unit));
    memory_.push_back(dropped);
    check(MPI_Irecv(dropped.get(), static_cast<int>(count), MPI_C_DOUBLE_COMPLEX, rank, status.MPI_TAG, comm,
                    &pending_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Irecv");
  }
  return true;
}

/// Starts the collectives that other ranks have begun and this one has not, so that those of the others end. False, on
/// all ranks alike, if the ranks were in different collectives, or if a rank misses too many.
bool MpiCommunicator::catch_up(const std::vector<Marker>& markers) {
  const auto [least, most] = std::ranges::minmax_element(markers, {}, &Marker::begun);
  if (most->begun - least->begun > kept_calls) return false;
  const auto word = [](const Marker& marker, std::uint64_t number) { return marker.calls[number % kept_calls]; };
  const auto oldest = most->begun - std::min<std::uint64_t>(most->begun, kept_calls);
  for (const auto& marker : markers)
    for (auto number = oldest; number < marker.begun; ++number)
      if (word(marker, number) != word(*most, number)) return false;
  std::size_t missed_bytes = 0;
  for (auto number = least->begun; number < most->begun; ++number)
    missed_bytes += bytes_of(node::Call::decode(word(*most, number)));
  if (missed_bytes > most_missed_bytes) return false;
  while (mine_.begun < most->begun) {
    const auto call = node::Call::decode(word(*most, mine_.begun));
    const auto unused = std::make_shared<std::byte[]>(std::max<std::size_t>(1, bytes_of(call)));
    memory_.push_back(unused);
    pending_.push_back(start(call, unused.get()));
  }
  return true;
}

/// True if no abandoned request is unfinished. A request that ended with an error counts as finished.
bool MpiCommunicator::all_finished() {
  std::erase_if(pending_, [](MPI_Request& request) {
    int flag = 0;
    return MPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS || flag != 0;
  });
  return pending_.empty();
}

}  // namespace muster::detail::comm
