// How many messages a rank sends in each operation, on 64 ranks. MPI's functions are replaced by ones that count.
#include "comm/agreement.hpp"
#include "comm/collectives.hpp"
#include "comm/make_world.hpp"
#include "comm/on_ranks.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

/// What this rank has started. A collective of MPI counts once; MPI sends its messages itself.
std::atomic<std::int64_t> messages{0}, bytes{0}, collectives{0};

void count_message(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  ++messages;
  bytes += static_cast<std::int64_t>(count) * size;
}

void count_collective(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  ++collectives;
  bytes += static_cast<std::int64_t>(count) * size;
}

}  // namespace

extern "C" {
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  count_message(count, type);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
int MPI_Issend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  count_message(count, type);
  return PMPI_Issend(data, count, type, to, tag, comm, request);
}
int MPI_Iallreduce(const void* from, void* to, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request* request) {
  count_collective(count, type);
  return PMPI_Iallreduce(from, to, count, type, op, comm, request);
}
int MPI_Iallgather(const void* from, int count, MPI_Datatype type, void* to, int each, MPI_Datatype to_type,
                   MPI_Comm comm, MPI_Request* request) {
  count_collective(count, type);
  return PMPI_Iallgather(from, count, type, to, each, to_type, comm, request);
}
int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request* request) {
  count_collective(count, type);
  return PMPI_Ibcast(data, count, type, root, comm, request);
}
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  count_collective(0, MPI_BYTE);
  return PMPI_Ibarrier(comm, request);
}
int MPI_Comm_dup(MPI_Comm comm, MPI_Comm* made) {
  count_collective(0, MPI_BYTE);
  return PMPI_Comm_dup(comm, made);
}
}

namespace muster::detail::comm::messages_test {
namespace {

using test::world;

/// The most that any rank has sent.
struct Sent {
  std::int64_t messages = 0, bytes = 0, collectives = 0;
};

Sent most_sent(const std::function<void()>& operation) {
  world().barrier();
  const std::array before{messages.load(), bytes.load(), collectives.load()};
  operation();
  std::array<std::int64_t, 3> sent{messages - before[0], bytes - before[1], collectives - before[2]};
  world().all_reduce(std::span(sent), ReduceOp::max);
  return {sent[0], sent[1], sent[2]};
}

/// Calls check(operation, most that a rank has sent) for each operation, in a world of nodes with that many ranks.
void measure(int ranks_per_node, const std::function<void(const std::string&, const Sent&)>& check) {
  Placement placement;
  for (int rank = 0; rank < world().size(); ++rank) {
    placement.node_of_rank.push_back(rank / ranks_per_node);
    placement.hosts.push_back(std::to_string(rank / ranks_per_node));
  }
  std::optional<Communicator> ranks;
  const auto operation = [&](const std::string& name, const std::function<void()>& work) {
    SCOPED_TRACE(name + " on nodes of " + std::to_string(ranks_per_node));
    check(name, most_sent(work));
  };
  operation("make_world", [&] { ranks = make_world(world(), placement); });
  operation("agree", [&] { agree(*ranks, {}, std::chrono::minutes(1)); });
  operation("run_on_all", [&] { run_on_all(*ranks, [] {}); });
  operation("all_gather", [&] { ranks->all_gather("text"); });
  operation("broadcast", [&] { ranks->broadcast("text"); });
  operation("barrier", [&] { ranks->barrier(); });
  operation("all_reduce", [&] { ranks->all_reduce(1.0); });
  operation("duplicate", [&] { ranks->duplicate(); });
  operation("duplicate again", [&] { ranks->duplicate(); });  // over pooled communicators
  operation("split", [&] { ranks->split(world().rank() % 2); });
}

TEST(Messages, OfARankAreFewInEachOperation) {
  ASSERT_EQ(world().size(), 64);
  // A rank sends log₂ 64 messages to agree. A reduction between nodes takes as many rounds as log₂ of their number; up
  // to 8 nodes send to each other. all_gather() is two reductions, and so is run_on_all().
  const std::map<int, int> in_a_reduction{{1, 6}, {4, 4}, {8, 7}};
  for (const auto& [ranks_per_node, of_reduction] : in_a_reduction)
    measure(ranks_per_node, [&](const std::string& operation, const Sent& sent) {
      if (operation == "agree") {
        EXPECT_EQ(sent.messages, 6);
        EXPECT_EQ(sent.bytes, 63 * 9) << "each outcome once to each rank, 4 of the 9 bytes for its length";
      } else if (operation == "all_reduce") {
        EXPECT_EQ(sent.messages, of_reduction);
        EXPECT_LE(sent.bytes, 63 * 8);
      } else if (operation == "run_on_all" || operation == "all_gather") {
        EXPECT_EQ(sent.messages, 2 * of_reduction);
        EXPECT_LE(sent.bytes, 63 * 64 * 12) << "the length and text of each rank, from each node to each";
      } else if (operation == "broadcast" || operation == "barrier") {
        EXPECT_EQ(sent.messages, 0) << "MPI sends them";
        EXPECT_LE(sent.collectives, 2);
        EXPECT_LE(sent.bytes, 12);
      } else {
        // Rank 0 lets all others go on. Up to five communicators are made, or cleaned in 4 maxima of 6 messages each.
        EXPECT_LE(sent.messages, 63 + 29 * 6) << operation;
        EXPECT_LE(sent.collectives, 8) << operation;
        EXPECT_LE(sent.bytes, 64 * 1024) << operation;
      }
    });
}

}  // namespace
}  // namespace muster::detail::comm::messages_test
