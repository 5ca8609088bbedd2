#include "comm/mpi_communicator.hpp"

#include "base/text.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <atomic>
#include <functional>
#include <utility>

namespace muster::detail::comm {
namespace {

/// The tag of the last message to a rank. Other messages may have the same tag.
constexpr int last_tag = 0;

/// How many bytes the missed collectives may move in all: a rank allocates memory for all of them at once.
constexpr std::size_t most_missed_bytes = std::size_t{256} << 20;

void wait_for_all_ranks(const char* doing, const std::function<bool()>& ready) {
  if (!wait_until(ready, default_timeout))
    throw Error(ExitCode::retry, doing, str("not all of its ranks came within ", default_timeout.count() / 1000, " s"),
                "A rank is stuck, lost or in another collective");
}

std::size_t bytes_of(const node::Call& call) { return call.count * node::size_of(call.type); }

/// True if the request has finished, also with an error.
bool is_over(MPI_Request& request) {
  bool completed = false;
  return test(request, completed) != MPI_SUCCESS || completed;
}

}  // namespace

std::uint64_t new_id(MPI_Comm comm, int first) {
  static std::atomic<std::uint32_t> given{0};
  std::uint64_t id = (static_cast<std::uint64_t>(first) + 1) << 32 | ++given;
  check(MPI_Bcast(&id, 1, MPI_UINT64_T, 0, comm), "MPI_Bcast");
  return id;
}

MpiCommunicator::MpiCommunicator(MPI_Comm its_comm, std::vector<int> its_members, std::uint64_t its_id)
    : comm(its_comm),
      members(std::move(its_members)),
      id(its_id),
      has_sent_to_(std::make_unique<std::atomic<bool>[]>(members.size())) {}

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
  } else if (call.kind == Kind::all_reduce) {  // the standard requires the same result on all ranks, to the bit
    check(MPI_Iallreduce(MPI_IN_PLACE, data, count, type, mpi_op(call.op, call.type), comm, &request),
          "MPI_Iallreduce");
  } else {
    const bool is_root = rank_in(comm) == call.root;
    check(MPI_Ireduce(is_root ? MPI_IN_PLACE : data, is_root ? data : nullptr, count, type, mpi_op(call.op, call.type),
                      call.root, comm, &request),
          "MPI_Ireduce");
  }
  calls_[begun_++ % kept_calls] = call.encode();
  return request;
}

MPI_Request MpiCommunicator::send(const void* data, int count, MPI_Datatype type, int to, int tag) {
  has_sent_to_[static_cast<std::size_t>(to)] = true;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Isend(data, count, type, to, tag, comm, &request), "MPI_Isend");
  return request;
}

void MpiCommunicator::post(std::string bytes, int to, int tag) {
  auto kept = std::make_shared<std::string>(std::move(bytes));
  const std::lock_guard lock(mutex_);
  while (!posted_.empty() && is_over(posted_.front().request)) posted_.pop_front();
  const auto request = send(kept->data(), static_cast<int>(kept->size()), MPI_BYTE, to, tag);
  posted_.push_back({request, std::move(kept)});
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
  for (auto& [request, bytes] : std::exchange(posted_, {})) {
    pending_.push_back(request);
    memory_.push_back(bytes);
  }
  if (receives_.empty() && pending_.empty()) freed.swap(memory_);
}

void MpiCommunicator::cancel_receives() {
  for (auto& receive : receives_) {
    check(MPI_Cancel(&receive), "MPI_Cancel");
    pending_.push_back(receive);  // a cancelled receive still completes, perhaps with a message that came before
  }
  receives_.clear();
}

bool MpiCommunicator::clean(const char* doing, const AllMax& all_max) {
  is_usable_ = false;  // stays so unless this function succeeds
  drop_messages(doing, all_max);
  if (!catch_up(all_max)) return false;
  wait_for_all_ranks(doing, [&] { return all_finished(); });
  memory_.clear();
  begun_ = 0;
  calls_ = {};
  for (std::size_t rank = 0; rank < members.size(); ++rank) has_sent_to_[rank] = false;
  return is_usable_ = true;
}

/// Each rank sends a last message, synchronously, to every rank to which it has sent messages. MPI delivers the
/// messages of a rank in order, so once all last messages have been received, no message of the old use is under way
/// (Hoefler et al., Scalable communication protocols for dynamic sparse data exchange, 2010). No rank returns from the
/// all_max() that follows in catch_up() before all ranks have left this function, so no message of the next use is
/// dropped.
void MpiCommunicator::drop_messages(const char* doing, const AllMax& all_max) {
  std::vector<MPI_Request> last;
  for (std::size_t rank = 0; rank < members.size(); ++rank)
    if (has_sent_to_[rank])
      check(MPI_Issend(nullptr, 0, MPI_BYTE, static_cast<int>(rank), last_tag, comm,
                       &last.emplace_back(MPI_REQUEST_NULL)),
            "MPI_Issend");
  wait_for_all_ranks(doing, [&] {
    receive_all();
    return test_all(last);
  });
  std::uint64_t none = 0;
  all_max(std::span(&none, 1), [this] { receive_all(); });
}

/// Receives the messages that have come, and advances the abandoned requests.
void MpiCommunicator::receive_all() {
  for (;;) {
    int flag = 0;
    MPI_Status status;
    check(MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &flag, &status), "MPI_Iprobe");
    if (!flag) break;
    MPI_Count bytes = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    // In pages, so that the count of every message fits into an int.
    constexpr MPI_Count page = 4096;
    const auto count = bytes / page + 1;
    const auto dropped = std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(count * page));
    memory_.push_back(dropped);
    MPI_Datatype type = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(page, MPI_BYTE, &type), "MPI_Type_contiguous");
    check(MPI_Type_commit(&type), "MPI_Type_commit");
    check(MPI_Irecv(dropped.get(), static_cast<int>(count), type, status.MPI_SOURCE, status.MPI_TAG, comm,
                    &pending_.emplace_back(MPI_REQUEST_NULL)),
          "MPI_Irecv");
    check(MPI_Type_free(&type), "MPI_Type_free");  // MPI keeps it until the message is here
  }
  all_finished();
}

/// Starts the collectives that other ranks have begun and this rank has not, so that they end on the other ranks.
/// False, on all ranks, if the ranks were in different collectives, or if a rank has missed too many or too large ones.
bool MpiCommunicator::catch_up(const AllMax& all_max) {
  std::array<std::uint64_t, 2> bounds{begun_, ~begun_};
  all_max(bounds, [] {});
  const auto most = bounds[0], least = ~bounds[1];
  if (most - least > kept_calls) return false;
  const auto oldest = most - std::min<std::uint64_t>(most, kept_calls);
  // If all ranks have begun the same call, the maximum of its word and the maximum of the complement are complements.
  std::vector<std::uint64_t> words(2 * static_cast<std::size_t>(most - oldest));
  const auto word = [&](std::uint64_t number) {
    return words.begin() + 2 * static_cast<std::ptrdiff_t>(number - oldest);
  };
  for (auto number = oldest; number < begun_; ++number) {
    word(number)[0] = calls_[number % kept_calls];
    word(number)[1] = ~calls_[number % kept_calls];
  }
  all_max(words, [] {});
  for (auto number = oldest; number < most; ++number)
    if (word(number)[0] != ~word(number)[1]) return false;
  std::size_t missed_bytes = 0;
  for (auto number = least; number < most; ++number) missed_bytes += bytes_of(node::Call::decode(*word(number)));
  if (missed_bytes > most_missed_bytes) return false;
  while (begun_ < most) {
    const auto call = node::Call::decode(*word(begun_));
    const auto unused = std::make_shared<std::byte[]>(std::max<std::size_t>(1, bytes_of(call)));
    memory_.push_back(unused);
    pending_.push_back(start(call, unused.get()));
  }
  return true;
}

/// True if all abandoned requests have finished.
bool MpiCommunicator::all_finished() {
  std::erase_if(pending_, is_over);
  return pending_.empty();
}

}  // namespace muster::detail::comm
