// The extension module muster_torch._C: what the Python package needs of muster's library.
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/progress.hpp"
#include "comm/subset.hpp"
#include "comm/timeout.hpp"
#include "group/mpi_store.hpp"
#include "group/torch_backend.hpp"
#include "launch/launcher.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"

#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using muster::Communicator;
using muster::detail::group::MpiStore;
using std::chrono::milliseconds;
namespace comm = muster::detail::comm;
namespace group = muster::detail::group;
namespace launch = muster::detail::launch;

/// The ranks of a default group, and the store in which torch lets them find each other (null until mpi_store()).
struct World {
  Communicator ranks;
  c10::intrusive_ptr<MpiStore> store = {};
};

/// What this process must end or keep alive until its exit.
struct Process {
  pid_t id = ::getpid();
  bool owns_mpi = false;
  bool on_one_node = true;
  std::vector<std::shared_ptr<World>> worlds;
  std::vector<c10::intrusive_ptr<c10d::Store>> kept;
};

/// Never destroyed: the destructors of a child of fork() would wait for threads that it does not have.
Process& process() {
  static auto& one = *new Process;
  return one;
}

/// Ends the stores. With `all_come`, rank 0 first waits until all ranks have come here, since it answers their
/// requests until then.
void end_stores(bool all_come) noexcept try {
  for (const auto& world : std::exchange(process().worlds, {})) {
    if (!world->store) continue;
    if (all_come) {
      world->store->add("left", 1);
      while (world->ranks.rank() == 0 && world->store->add("left", 0) < world->ranks.size())
        std::this_thread::sleep_for(milliseconds(1));
    }
    world->store->close();
  }
} catch (const muster::Error&) {  // MPI has failed, and the process ends in any case
}

/// Runs when Python has gone. A process that fails does not finalise MPI, which would wait for the other ranks; so the
/// launcher notices the failure and ends them. A child of fork() leaves MPI alone.
void end(int exit_code, void*) noexcept {
  if (process().id != ::getpid() || comm::mpi_is_finalised()) return;
  end_stores(exit_code == 0);
  if (exit_code == 0) comm::finalise_mpi(process().on_one_node);
}

/// Initialises MPI unless that is done already. Returns what is wrong with the launcher, and the remedy; empty if
/// nothing is wrong.
std::string start() {
  if (comm::mpi_is_initialised()) return "";
  launch::forget_other_launchers(comm::mpi_library());
  auto wrong = launch::srun_without_pmix(::getenv, comm::mpi_library());
  if (!wrong) {
    comm::initialise_mpi();
    process().owns_mpi = true;
    ::on_exit(end, nullptr);
    const auto [rank, size] = comm::rank_and_size();
    wrong = launch::separate_worlds(::getenv, size, comm::mpi_library());
    if (rank == 0) launch::tell_supervisor(launch::message_up, std::to_string(size));
  }
  return wrong ? wrong->fact + ". " + wrong->remedy : "";
}

std::shared_ptr<World> make_world(Communicator ranks, milliseconds timeout) {
  comm::set_timeout(ranks, timeout);
  process().on_one_node = process().on_one_node && ranks.topology().num_nodes == 1;
  auto world = std::make_shared<World>(std::move(ranks));
  process().worlds.push_back(world);
  return world;
}

c10::intrusive_ptr<c10d::Store> mpi_store(World& world, milliseconds timeout) {
  if (world.store) return world.store;
  static std::once_flag once;
  std::call_once(once, [] { comm::call_before_finalize([] { end_stores(true); }); });
  return world.store = c10::make_intrusive<MpiStore>(world.ranks.duplicate(), timeout);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;  // for functions that wait for other ranks
  py::class_<World, std::shared_ptr<World>>(module, "World")
      .def_property_readonly("rank", [](const World& world) { return world.ranks.rank(); })
      .def_property_readonly("size", [](const World& world) { return world.ranks.size(); })
      .def_property_readonly("num_nodes", [](const World& world) { return world.ranks.topology().num_nodes; })
      .def(
          "broadcast", [](const World& world, std::string text) { return world.ranks.broadcast(std::move(text)); },
          Unlocked())
      .def("mpi_store", mpi_store, Unlocked())
      .def(
          "make_backend",
          [](const World& world, const std::vector<int>& members, milliseconds timeout) {
            return group::make_torch_backend(comm::make_subset(world.ranks, members), timeout);
          },
          Unlocked());
  module.def("is_launched", [] { return launch::started_by(::getenv).has_value(); });
  module.def("start", start, Unlocked());
  module.def("is_mpi_initialised", comm::mpi_is_initialised);
  module.def("rank_and_size", comm::rank_and_size);
  module.def("owns_mpi", [] { return process().owns_mpi; });
  module.def("threads_may_call_mpi", comm::threads_may_call_mpi);
  module.def(
      "world_of_mpi", [](milliseconds timeout) { return make_world(comm::world_of_mpi(), timeout); }, Unlocked());
  module.def(
      "from_fortran_handle",
      [](int handle, milliseconds timeout) { return make_world(comm::from_fortran_handle(handle), timeout); },
      Unlocked());
  module.def("make_group", group::make_torch_group, Unlocked());
  module.def("keep", [](c10::intrusive_ptr<c10d::Store> store) { process().kept.push_back(std::move(store)); });
  module.def("end_progress", comm::end_progress, Unlocked());
}
