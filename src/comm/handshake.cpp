#include "comm/handshake.hpp"

#include "base/log.hpp"
#include "comm/mpi_call.hpp"
#include "comm/mpi_communicator.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace muster::detail::comm {
namespace {

/// These tags are above the tags of Collectives::all_to_all(), SliceExchange and wait_for_all_ranks().
constexpr int text_tag = 32'702, max_tag = 32'703;

constexpr std::size_t longest = 1024;
using Text = std::array<char, longest>;

Text text_of(const std::string& string) {
  Text text{};
  std::copy_n(string.begin(), std::min(string.size(), longest - 1), text.begin());
  return text;
}

}  // namespace

/// The memory that MPI may still use after a timeout.
struct Handshake::Memory {
  int all = 0;
  Text mine{};
  std::vector<Text> texts;
  std::vector<std::uint64_t> sent, received;
  std::vector<MPI_Request> pending;
};

Handshake::Handshake(MpiCommunicator& over, const char* doing)
    : over_(over), doing_(doing), memory_(std::make_unique<Memory>()) {}

Handshake::~Handshake() {
  if (memory_->pending.empty()) return;
  static_cast<void>(memory_.release());
  over_.mark_unusable();
}

MPI_Request* Handshake::start() { return &memory_->pending.emplace_back(MPI_REQUEST_NULL); }

void Handshake::finish(const std::function<void()>& meanwhile) {
  auto& pending = memory_->pending;
  const auto done = [&] {
    meanwhile();
    return test_all(pending);
  };
  if (!wait_until(done, default_timeout))
    throw Error(ExitCode::retry, doing_, str("not all of its ranks came within ", default_timeout.count() / 1000, " s"),
                "A rank is stuck, lost or in another collective");
  pending.clear();
}

bool Handshake::all_true(bool mine) {
  memory_->all = mine ? 1 : 0;
  check(MPI_Iallreduce(MPI_IN_PLACE, &memory_->all, 1, MPI_INT, MPI_MIN, over_.comm, start()), "MPI_Iallreduce");
  finish();
  return memory_->all == 1;
}

std::vector<std::string> Handshake::all_gather(const std::string& mine) {
  memory_->mine = text_of(mine);
  memory_->texts.resize(static_cast<std::size_t>(size_in(over_.comm)));
  check(MPI_Iallgather(memory_->mine.data(), longest, MPI_CHAR, memory_->texts.data(), longest, MPI_CHAR, over_.comm,
                       start()),
        "MPI_Iallgather");
  finish();
  std::vector<std::string> all;
  for (const auto& text : memory_->texts) all.emplace_back(text.data());
  return all;
}

void Handshake::all_max(const std::vector<int>& ranks, std::span<std::uint64_t> values,
                        const std::function<void()>& meanwhile) {
  const auto size = ranks.size();
  const auto own = static_cast<std::size_t>(std::ranges::find(ranks, rank_in(over_.comm)) - ranks.begin());
  const auto count = static_cast<int>(values.size());
  // A value may reach a rank several times, which does not change a maximum.
  for (std::size_t distance = 1; distance < size; distance *= 2) {
    memory_->sent.assign(values.begin(), values.end());
    memory_->received.resize(values.size());
    check(MPI_Irecv(memory_->received.data(), count, MPI_UINT64_T, ranks[(own + size - distance) % size], max_tag,
                    over_.comm, start()),
          "MPI_Irecv");
    check(MPI_Isend(memory_->sent.data(), count, MPI_UINT64_T, ranks[(own + distance) % size], max_tag, over_.comm,
                    start()),
          "MPI_Isend");
    finish(meanwhile);
    std::ranges::transform(values, memory_->received, values.begin(), [](auto a, auto b) { return std::max(a, b); });
  }
}

std::string Handshake::from_first(const std::vector<int>& ranks, const std::string& mine) {
  memory_->mine = text_of(mine);
  const bool first = rank_in(over_.comm) == ranks.front();
  for (const int r : ranks)
    if (first && r != ranks.front())
      check(MPI_Isend(memory_->mine.data(), longest, MPI_CHAR, r, text_tag, over_.comm, start()), "MPI_Isend");
  if (!first)
    check(MPI_Irecv(memory_->mine.data(), longest, MPI_CHAR, ranks.front(), text_tag, over_.comm, start()),
          "MPI_Irecv");
  finish();
  return memory_->mine.data();
}

std::shared_ptr<node::SharedSegment> map_node_segment(MpiCommunicator& over, const std::vector<int>& node,
                                                      std::size_t bytes, std::size_t first, std::size_t reserved,
                                                      const char* until_then) {
  Handshake handshake(over, "sharing memory on a node");
  const int rank = rank_in(over.comm);
  const bool here = rank == node.front();
  auto segment = std::make_shared<node::SharedSegment>();
  std::string problem;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const Error& error) {
      problem = error.what();
    }
  };
  if (here) attempt([&] { *segment = node::SharedSegment::create(bytes); });
  // The lowest rank of the node sends the name to the others; an empty name means that it could not create one.
  const auto name = handshake.from_first(node, segment->name());
  if (!here && !name.empty()) attempt([&] { *segment = node::SharedSegment::open(name, bytes); });
  // Remove the name as soon as all ranks have opened the segment, before reserve(), which takes long.
  bool everywhere = handshake.all_true(segment->data() != nullptr);
  segment->unlink();
  if (everywhere) {
    attempt([&] { segment->reserve(first, reserved); });
    everywhere = handshake.all_true(problem.empty());
  }
  if (everywhere) return segment;

  static std::atomic<bool> warned{false};
  const auto problems = handshake.all_gather(problem);
  const auto lowest = std::ranges::find_if_not(problems, &std::string::empty);
  if (lowest != problems.end() && !warned.exchange(true) && rank == 0)
    log::warn(str("rank ", lowest - problems.begin(), ": ", *lowest, ". Until then ", until_then, "."));
  return nullptr;
}

}  // namespace muster::detail::comm
