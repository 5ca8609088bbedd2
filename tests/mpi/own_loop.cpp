// own_loop CASE: a program that initialises MPI itself, for one thread, and has no Launch. Ends with 0 if all is well.
//   unchanged   muster leaves signals, malloc and the CPUs of this process as they are
//   finalised   what lives longer than MPI neither harms nor hangs
//   threads     the same below and above MPI_THREAD_SINGLE
//   forked      a child of fork() gets an error at once, and does not end the waits of the other ranks
#include "muster/data_parallel.hpp"
#include "muster/error.hpp"
#include "muster/mpi.hpp"

#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::exit(1);
}

/// What this process does at each signal.
using Handlers = std::array<void (*)(int), 64>;
Handlers handlers() {
  Handlers all{};
  for (int signal = 1; signal < 64; ++signal) {
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) == 0) all[static_cast<std::size_t>(signal)] = now.sa_handler;
  }
  return all;
}

Handlers at_start{};
/// The loader calls it before the initialisers of this program's libraries.
void before_everything(int, char**, char**) { at_start = handlers(); }
[[gnu::section(".preinit_array"), gnu::used]] void (*const first)(int, char**, char**) = before_everything;

cpu_set_t cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  require(::sched_getaffinity(0, sizeof set, &set) == 0, "sched_getaffinity");
  return set;
}

/// True if malloc takes large blocks from the kernel, as it does by default, and gives them back.
bool malloc_maps_large_blocks() {
  const auto before = ::mallinfo2().hblks;
  auto* const block = static_cast<volatile char*>(std::malloc(std::size_t{64} << 20));
  block[0] = 1;  // so that it is not left out
  const bool maps = ::mallinfo2().hblks > before;
  std::free(const_cast<char*>(block));
  return maps && ::mallinfo2().hblks == before;
}

at::Tensor loss_of(torch::nn::Linear& net) { return net->forward(torch::ones({4, 8})).square().mean(); }

void train(muster::DataParallel& parallel, torch::nn::Linear& net) {
  auto optimizer =
      parallel.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.fuse = muster::Fuse::always});
  for (int i = 0; i < 5; ++i) {
    optimizer.zero_grad();
    loss_of(net).backward();
    optimizer.step();
  }
}

void unchanged() {
  for (const int signal : {SIGUSR1, SIGUSR2, SIGHUP, SIGTERM, SIGXFSZ})
    require(handlers()[static_cast<std::size_t>(signal)] == at_start[static_cast<std::size_t>(signal)],
            "loading muster changes what happens at signal " + std::to_string(signal));
  MPI_Init(nullptr, nullptr);
  const auto signals = handlers();
  const auto mask = cpus();
  require(malloc_maps_large_blocks(), "malloc is as it is by default");
  const auto same = [&](const std::string& when) {
    require(handlers() == signals, "the signals " + when);
    const auto now = cpus();
    require(CPU_EQUAL(&now, &mask) != 0, "the CPUs " + when);
    require(malloc_maps_large_blocks(), "malloc " + when);
  };
  {
    torch::nn::Linear net(8, 8);
    muster::DataParallel parallel(muster::from_mpi(MPI_COMM_WORLD), net);
    same("while it lives");
    train(parallel, net);
    same("after training");
  }
  same("afterwards");
  MPI_Finalize();
  require(handlers()[SIGUSR1] == at_start[SIGUSR1], "signals after MPI has ended");
}

void init_for_threads() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr,
                  std::getenv("OWN_LOOP_MULTIPLE") != nullptr ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE, &provided);
}

void finalised() {
  init_for_threads();
  int ranks = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  torch::nn::Linear net(8, 8), other(8, 8);
  std::optional<muster::Communicator> world = muster::from_mpi(MPI_COMM_WORLD);
  auto parallel = std::make_unique<muster::DataParallel>(*world, net);
  muster::DataParallel stays(*world, other, {.model = {.progress_thread = true}});
  auto optimizer =
      parallel->prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1), {.fuse = muster::Fuse::always});
  auto waits = stays.prepare_optimizer(torch::optim::SGD(other->parameters(), 0.1), {.fuse = muster::Fuse::always});
  loss_of(net).backward();
  optimizer.step();
  loss_of(other).backward();  // its step never comes
  MPI_Finalize();
  const auto error_or_nothing = [&](const char* what, const std::function<void()>& action) {
    try {
      action();
      require(ranks == 1, std::string("no error: ") + what);
    } catch (const muster::Error& error) {
      require(std::strstr(error.what(), "MPI is finalised already") != nullptr, error.what());
    }
  };
  error_or_nothing("join", [&] { static_cast<void>(parallel->join()); });
  error_or_nothing("buffers", [&] { parallel->average_buffers(); });
  error_or_nothing("save", [&] { parallel->save("saved-too-late", {{"net", net}}); });
  error_or_nothing("prepare", [&] { parallel->prepare_optimizer(torch::optim::SGD(net->parameters(), 0.1)); });
  error_or_nothing("step", [&] {
    net->zero_grad();
    loss_of(net).backward();
    optimizer.step();
  });
  error_or_nothing("another", [&] { muster::DataParallel(*world, torch::nn::Linear(2, 2)); });
  world.reset();
  parallel.reset();
  net->zero_grad();
  loss_of(net).backward();  // an ordinary model
  require(net->weight.grad().defined(), "a gradient");
}  // the rest ends here

void threads() {
  init_for_threads();
  {
    for (const bool with_thread : {false, true})
      for (const std::size_t bytes : {std::size_t{16}, std::size_t{4} << 20}) {
        torch::nn::Linear net(8, 8);
        muster::DataParallel parallel(muster::from_mpi(MPI_COMM_WORLD), net,
                                      {.model = {.bucket_bytes = bytes, .progress_thread = with_thread}});
        train(parallel, net);
      }
  }
  MPI_Finalize();
}

void forked() {
  MPI_Init(nullptr, nullptr);
  const auto world = muster::from_mpi(MPI_COMM_WORLD);
  ::pid_t child = -1;
  try {
    torch::nn::Linear net(8, 8);
    muster::DataParallel parallel(world, net, {.model = {.progress_thread = true}});
    loss_of(net).backward();
    if (world.rank() == world.size() - 1) {
      child = ::fork();
      if (child == 0) {
        ::alarm(30);
        loss_of(net).backward();
      }
      int status = 0;
      require(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 3, "the child");
    }
    for (int i = 0; i < 5; ++i) loss_of(net).backward();
  } catch (const std::runtime_error& error) {
    if (child == 0) ::_exit(std::strstr(error.what(), "child of fork()") != nullptr ? 3 : 4);
    require(false, error.what());
  }
  MPI_Finalize();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  if (which == "unchanged") return unchanged(), 0;
  if (which == "finalised") return finalised(), 0;
  if (which == "threads") return threads(), 0;
  if (which == "forked") return forked(), 0;
  return 2;
}
