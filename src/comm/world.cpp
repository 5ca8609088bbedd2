#include "comm/world.hpp"

#include "base/log.hpp"
#include "base/supervisor_message.hpp"
#include "comm/channel.hpp"
#include "comm/handshake.hpp"
#include "comm/mpi_call.hpp"
#include "muster/mpi.hpp"
#include "node/shared_segment.hpp"

#include <sched.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

namespace muster {
namespace detail::comm {
namespace {

/// Open MPI first looks for fast networks, which takes longer than the rest of the start. If mpirun's variables say
/// that the whole job is on one node, this skips the search, unless the user has chosen OMPI_MCA_pml.
void start_quickly_on_one_node() {
  const char* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
  const char* const here = std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (ranks != nullptr && here != nullptr && std::strcmp(ranks, here) == 0) ::setenv("OMPI_MCA_pml", "ob1", 0);
}

/// Open MPI copies large messages between processes by a system call that containers may forbid; it then prints a
/// complaint for each message. If the call is refused even for this process's own memory, this makes messages go
/// through shared memory from the start, unless the user has chosen the mechanism.
void copy_twice_where_once_is_forbidden() {
  const char from = 1;
  char to = 0;
  const iovec local{&to, 1}, remote{const_cast<char*>(&from), 1};
  if (::process_vm_readv(::getpid(), &local, 1, &remote, 1, 0) < 0)
    ::setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
}

std::string host_name() {
  std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
  int length = 0;
  check(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name");
  return name.data();
}

/// Returns a text that is equal for two processes exactly if they can share memory: the kernel's boot id, which differs
/// between machines, and the device number of /dev/shm, which may differ between containers.
std::string memory_name() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat memory {};
  return ::stat("/dev/shm", &memory) == 0 ? boot + ' ' + std::to_string(memory.st_dev) : boot;
}

/// The CPUs that this process may run on, a '1' for each ([cpu]); empty if the machine has more than a cpu_set_t holds.
std::string own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  std::string numbers;
  if (::sched_getaffinity(0, sizeof cpus, &cpus) != 0) return numbers;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) numbers += CPU_ISSET(cpu, &cpus) ? '1' : '0';
  return numbers.erase(numbers.find_last_of('1') + 1);
}

/// Finds the node of each rank. MPI_Comm_split_type is not used because it compares host names: if all containers are
/// called "localhost", its communicators contradict each other and the ranks hang. Collective.
Placement find_placement(MpiCommunicator& over) {
  Handshake handshake(over, "finding the ranks of each node");
  Placement placement{.node_of_rank = {}, .hosts = handshake.all_gather(host_name())};
  const auto memories = handshake.all_gather(memory_name());
  const auto cpus = handshake.all_gather(own_cpus());
  std::map<std::pair<std::string, std::string>, int> first_rank;
  for (std::size_t r = 0; r < memories.size(); ++r)
    placement.node_of_rank.push_back(
        first_rank.try_emplace({placement.hosts[r], memories[r]}, static_cast<int>(r)).first->second);

  // Compares the CPUs of this node with its ranks; the node's first rank removes leftover shared memory.
  const auto rank = rank_in(over.comm);
  const auto node = placement.node_of_rank[static_cast<std::size_t>(rank)];
  std::set<std::size_t> cores;
  std::size_t ranks = 0;
  bool known = true;
  for (std::size_t r = 0; r < cpus.size(); ++r) {
    if (placement.node_of_rank[r] != node) continue;
    ++ranks;
    known = known && !cpus[r].empty();
    for (std::size_t cpu = 0; cpu < cpus[r].size(); ++cpu)
      if (cpus[r][cpu] == '1') cores.insert(cpu);
  }
  has_core_per_rank = !known || cores.size() >= ranks;
  if (rank == node) node::SharedSegment::remove_leftovers();
  return placement;
}

/// The ranks of `comm` as MPI_COMM_WORLD numbers them; MPI_UNDEFINED for a rank outside of MPI_COMM_WORLD. Local.
std::vector<int> world_ranks_of(MPI_Comm comm) {
  const auto ranks = ranks_in(comm);
  std::vector<int> world_ranks(ranks.size());
  MPI_Group own = MPI_GROUP_NULL, all = MPI_GROUP_NULL;
  check(MPI_Comm_group(comm, &own), "MPI_Comm_group");
  check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
  check(MPI_Group_translate_ranks(own, static_cast<int>(ranks.size()), ranks.data(), all, world_ranks.data()),
        "MPI_Group_translate_ranks");
  check(MPI_Group_free(&own), "MPI_Group_free");
  check(MPI_Group_free(&all), "MPI_Group_free");
  return world_ranks;
}

/// The pool of the ranks of MPI_COMM_WORLD. It is never destroyed: its communicators live as long as MPI.
const std::shared_ptr<Pool>& pool_of_mpi() {
  static const auto& pool = *new std::shared_ptr<Pool>(new Pool);
  return pool;
}

/// Makes a world of all ranks of `over`; `members` are their numbers in the pool. Collective.
Communicator make_world(const std::shared_ptr<Pool>& pool, const std::vector<int>& members, MpiCommunicator& over,
                        Placement placement) {
  constexpr auto doing = "making a world";
  const auto ranks = ranks_in(over.comm);
  auto for_world = pool->take(3, members, over, ranks, doing), for_channel = pool->take(2, members, over, ranks, doing);
  const auto world = std::make_shared<World>(pool, members, std::move(for_world), std::move(placement));
  return Channel::open(std::move(for_channel), world, ranks);
}

}  // namespace

MpiScope::MpiScope() {
  int initialised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  if (!initialised) {
    start_quickly_on_one_node();
    copy_twice_where_once_is_forbidden();
    int provided = 0;
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "MPI_Init_thread");
    initialised_here_ = true;
  }
  world_.emplace(from_mpi(MPI_COMM_WORLD));
}

void MpiScope::wait_for_all() const noexcept { MPI_Barrier(MPI_COMM_WORLD); }

MpiScope::~MpiScope() {
  world_.reset();
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (initialised_here_ && !finalised) MPI_Finalize();
}

void require_mpi(const char* doing) {
  int initialised = 0, finalised = 0;
  check(MPI_Initialized(&initialised), "MPI_Initialized");
  check(MPI_Finalized(&finalised), "MPI_Finalized");
  if (!initialised || finalised)
    throw Error(ExitCode::usage, doing, finalised ? "MPI is finalised already" : "MPI is not initialised yet",
                "Do it between MPI_Init_thread and MPI_Finalize");
  int level = MPI_THREAD_SINGLE, is_main = 0;
  check(MPI_Query_thread(&level), "MPI_Query_thread");
  check(MPI_Is_thread_main(&is_main), "MPI_Is_thread_main");
  if (level < MPI_THREAD_SERIALIZED && !is_main)
    throw Error(ExitCode::usage, doing, "MPI was initialised for its main thread alone, and this is another",
                "Do it on the main thread, or ask for MPI_THREAD_MULTIPLE in MPI_Init_thread");
}

bool threads_may_call_mpi() noexcept {
  int provided = MPI_THREAD_SINGLE;
  return MPI_Query_thread(&provided) == MPI_SUCCESS && provided == MPI_THREAD_MULTIPLE;
}

Communicator make_world(const Communicator& ranks, Placement placement) {
  const auto& channel = *Channel::of(ranks);
  return make_world(channel.world->pool, channel.members(channel.all_ranks()), *channel.transport->collective,
                    std::move(placement));
}

Communicator make_separate_world(const Communicator& ranks) {
  wait_for_all_ranks(ranks, "making a separate world");
  const auto apart = make_world(ranks, {ranks.topology().node_of_rank, ranks.topology().hosts});
  set_time_limit(apart, time_limit(ranks));
  set_final_grace(apart, final_grace(ranks));
  return apart;
}

void set_time_limit(const Communicator& communicator, std::chrono::milliseconds limit) {
  Channel::of(communicator)->world->wait_limit = limit;
}

std::chrono::milliseconds time_limit(const Communicator& communicator) {
  return Channel::of(communicator)->world->wait_limit;
}

void set_final_grace(const Communicator& communicator, std::chrono::milliseconds grace) {
  Channel::of(communicator)->world->final_grace = grace;
}

std::chrono::milliseconds final_grace(const Communicator& communicator) {
  return Channel::of(communicator)->world->final_grace;
}

void abort(int code) noexcept {
  MPI_Abort(MPI_COMM_WORLD, code);
  std::_Exit(code);
}

void give_up(const Communicator& communicator, const Error& error) noexcept {
  const auto& channel = *Channel::of(communicator);
  const auto rank = channel.world_ranks[static_cast<std::size_t>(channel.rank)];
  // Not left to rank 0, which may be the rank that does not answer.
  std::fprintf(stderr, "muster: error: rank %d (%s): %s\n", rank,
               channel.world->placement.hosts[static_cast<std::size_t>(rank)].c_str(), error.what());
  tell(message_leaving, std::to_string(static_cast<int>(error.code())));
  log::flush();
  abort(static_cast<int>(error.code()));
}

}  // namespace detail::comm

Communicator from_mpi(MPI_Comm comm) {
  using namespace detail::comm;
  constexpr auto doing = "taking up an MPI communicator";
  require_mpi(doing);
  auto members = world_ranks_of(comm);
  auto pool = pool_of_mpi();
  // Ranks of another MPI_COMM_WORLD, for example after MPI_Comm_spawn, have no numbers in that pool.
  if (std::ranges::count(members, MPI_UNDEFINED) > 0) {
    members = ranks_in(comm);
    pool = std::make_shared<Pool>();
  }
  MpiCommunicator given(comm, members, 0);  // belongs to the caller, so it is not in the pool
  // The calls that follow have no timeout, so first all ranks must have come.
  Handshake(given, doing).all_true(true);
  return make_world(pool, members, given, find_placement(given));
}

}  // namespace muster
