// kill -9 in the middle of saving and pruning, over and over: the newest checkpoint is always whole, and it is never
// older than the last one whose commit() had returned, or of one behind training, whose finish() had. With a fast tier
// commit() has returned when the checkpoint is there.
//
//   checkpoint_kill [behind|fast]
//
// The parent knows neither MPI nor torch's state. Each child opens the run, checks what it finds, then commits for as
// long as it lives, and says so through a pipe after each.
#include "checkpoint/store.hpp"
#include "comm/mpi_scope.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <thread>

namespace {

namespace fs = std::filesystem;
using muster::detail::checkpoint::CheckpointStore;

constexpr int rounds = 25;
constexpr std::size_t kept = 2;

at::Tensor values_of(std::int64_t number) { return at::arange(200'000, at::kDouble).add(number); }

[[noreturn]] void wrong(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::_Exit(2);
}

/// The number of the newest checkpoint, or −1; ends the process if any check fails.
std::int64_t check(const fs::path& run, CheckpointStore& store, std::int64_t committed) {
  for (const auto& entry : fs::directory_iterator(run)) {
    const auto name = entry.path().filename().string();
    if (!name.starts_with("checkpoint_") && name != "fast_tier.json") wrong(name + " is left behind");
    if (name.find("damaged") != std::string::npos) wrong(name + " was published");
  }
  const auto newest = store.newest();
  if (!newest) {
    if (committed >= 0) wrong("nothing is left");
    return -1;
  }
  const auto restored = store.read(*newest);
  const auto number = restored.position_json.at("number").get<std::int64_t>();
  if (number < committed) wrong("number " + std::to_string(committed) + " is lost");
  if (!at::equal(restored.state.tensors.at("w"), values_of(number))) wrong("the values are wrong");
  return number;
}

void live(const fs::path& run, const fs::path& fast, bool behind, std::int64_t committed, int out) {
  const muster::detail::comm::MpiScope environment;
  CheckpointStore store(environment.world(), run,
                        {.num_to_keep = static_cast<int>(kept), .async_save = behind, .fast_tier = fast});
  auto number = check(run, store, committed);
  const auto tell = [&] {
    if (::write(out, &number, sizeof number) != sizeof number) wrong("the parent is gone");
  };
  const auto finish = [&] {
    if (const auto error = store.finish()) wrong(error->what());
  };
  for (;;) {
    tell();
    finish();
    ++number;
    muster::detail::checkpoint::CheckpointContents contents;
    contents.state.tensors.emplace("w", values_of(number));
    contents.position_json = {{"number", number}};
    store.commit(contents, behind ? CheckpointStore::Mode::async : CheckpointStore::Mode::sync);
    if (!fast.empty()) continue;
    finish();
    // Each kill between publishing and pruning leaves one more; the next complete commit prunes them all.
    const auto there = muster::list_checkpoints(run).size();
    if (there > kept) wrong(std::to_string(there) + " checkpoints are there after a commit");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const muster::test::Folder folder, fast;
  const std::string way = argc > 1 ? argv[1] : "";
  std::mt19937 random(1);
  std::int64_t committed = -1;
  for (int round = 0; round < rounds; ++round) {
    int ends[2];
    if (::pipe(ends) != 0) return 1;
    const pid_t child = ::fork();
    if (child < 0) return 1;
    if (child == 0) {
      ::close(ends[0]);
      try {
        live(folder.path(), way == "fast" ? fast.path() : fs::path(), way == "behind", committed, ends[1]);
      } catch (const std::exception& error) {
        wrong(error.what());
      }
    }
    ::close(ends[1]);
    // From its first word on it is saving. It lives for a few commits more, and a part of one.
    std::int64_t number = 0;
    bool spoke = false;
    for (auto words = 1 + random() % 3; words > 0; --words)
      if (::read(ends[0], &number, sizeof number) == sizeof number) spoke = true;
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 30'000));
    ::kill(child, SIGKILL);
    do {
      if (spoke) committed = number;
    } while (::read(ends[0], &number, sizeof number) == sizeof number);
    ::close(ends[0]);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (!spoke || !WIFSIGNALED(status)) {
      std::fprintf(stderr, "round %d: the child ended by itself, status %d\n", round, status);
      return 1;
    }
  }
  std::printf("%d kills, %lld checkpoints committed\n", rounds, static_cast<long long>(committed + 1));
  return committed > 0 ? 0 : 1;
}
