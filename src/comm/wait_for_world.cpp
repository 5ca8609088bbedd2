#include "comm/wait_for_world.hpp"

#include "base/supervisor_message.hpp"
#include "base/text.hpp"
#include "comm/mpi_call.hpp"
#include "comm/wait.hpp"
#include "muster/error.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace muster::detail::comm {
namespace {

using namespace std::chrono_literals;

/// A tag that programs hardly use, in MPI_COMM_WORLD: all ranks would have to come to make another communicator. Every
/// MPI has tags up to 32'767.
constexpr int roll_call_tag = 32'749;
/// How long ranks wait before they ask who has come, and then for answers. A rank that has come answers at once.
constexpr std::chrono::milliseconds before_roll_call = 10s, answers_to_roll_call = 1s;
/// The lowest rank that has come ends the job. The other ranks give it this much time.
constexpr auto time_for_lowest = 2s;

/// Finds out which ranks of MPI_COMM_WORLD have come. A rank asks by telling every other rank that it has come. Each of
/// these answers in the same way, once.
class RollCall {
 public:
  RollCall()
      : rank_(static_cast<std::size_t>(rank_in(MPI_COMM_WORLD))),
        has_come_(static_cast<std::size_t>(size_in(MPI_COMM_WORLD))),
        was_told_(has_come_.size()) {
    has_come_[rank_] = was_told_[rank_] = true;
  }

  void ask() {
    has_asked_ = true;
    for (std::size_t rank = 0; rank < was_told_.size(); ++rank) tell(rank);
  }

  void listen() {
    while (const auto letter = receive_letter(MPI_COMM_WORLD, MPI_ANY_SOURCE, roll_call_tag)) {
      const auto from = static_cast<std::size_t>(letter->from);
      has_come_[from] = true;
      tell(from);
    }
  }

  /// Receives the messages that are under way, so that the program never gets them. Collective.
  void finish() {
    int asked = has_asked_;
    check(MPI_Allreduce(MPI_IN_PLACE, &asked, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD), "MPI_Allreduce");
    if (!asked) return;
    ask();
    wait_until(
        [this] {
          listen();
          return count() == std::ssize(has_come_);
        },
        default_timeout);
  }

  std::ptrdiff_t count() const { return std::ranges::count(has_come_, true); }
  bool is_lowest() const {
    return std::ranges::find(has_come_, true) == has_come_.begin() + static_cast<std::ptrdiff_t>(rank_);
  }

 private:
  void tell(std::size_t rank) {
    if (was_told_[rank]) return;
    was_told_[rank] = true;
    MPI_Request request = MPI_REQUEST_NULL;
    check(MPI_Isend(nullptr, 0, MPI_BYTE, static_cast<int>(rank), roll_call_tag, MPI_COMM_WORLD, &request),
          "MPI_Isend");
    check(MPI_Request_free(&request), "MPI_Request_free");  // no wait needed: the message has no buffer
  }

  const std::size_t rank_;
  std::vector<bool> has_come_, was_told_;
  bool has_asked_ = false;
};

[[noreturn]] void end_job(const Error& error, const RollCall& roll_call) {
  if (!roll_call.is_lowest()) std::this_thread::sleep_for(time_for_lowest);
  std::fprintf(stderr, "muster: error: %s\n", error.what());
  tell(message_leaving, std::to_string(static_cast<int>(error.code())));
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(error.code()));
  std::_Exit(static_cast<int>(error.code()));
}

/// True if the launcher or MPI says that there are several programs. MPI numbers the programs from 0, but does not say
/// how many there are.
bool has_other_programs() {
  if (mpirun_has_several_programs()) return true;
  int* number = nullptr;
  int found = 0;
  check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &number, &found), "MPI_Comm_get_attr");
  return found && *number > 0;
}

/// "2 of the 3 ranks of MPI_COMM_WORLD have made a Launch within 10 s"
std::string come_within(std::chrono::milliseconds time, const RollCall& roll_call) {
  const auto seconds = formatted("%g s", static_cast<double>(time.count()) / 1000);
  return str(roll_call.count(), " of the ", size_in(MPI_COMM_WORLD),
             " ranks of MPI_COMM_WORLD have made a Launch within ", seconds);
}

}  // namespace

bool mpirun_has_several_programs() noexcept {
  const char* const programs = std::getenv("OMPI_NUM_APP_CTX");
  return programs != nullptr && std::atoi(programs) > 1;
}

void wait_for_world(std::chrono::milliseconds timeout) {
  constexpr auto doing = "starting";
  RollCall roll_call;
  MPI_Request barrier = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(MPI_COMM_WORLD, &barrier), "MPI_Ibarrier");
  const auto all_come_within = [&](std::chrono::milliseconds time) {
    const auto completed = [&] {
      bool all = false;
      check(test(barrier, all), "MPI_Test");
      return all;
    };
    return wait_until(completed, time, [&] { roll_call.listen(); });
  };
  const auto first = std::min(before_roll_call, timeout);
  if (all_come_within(first)) return roll_call.finish();
  roll_call.ask();
  if (all_come_within(answers_to_roll_call)) return roll_call.finish();
  if (has_other_programs())
    end_job(
        Error(ExitCode::usage, doing, come_within(first, roll_call) + ", and the launcher has started several programs",
              "Split MPI_COMM_WORLD in each of them, and give Launch the ranks of its program, by from_mpi()"),
        roll_call);
  const auto rest = timeout - first - answers_to_roll_call;
  if (rest > 0ms) {
    if (roll_call.is_lowest())
      std::fprintf(stderr,
                   "muster: warning: %s; the others are busy or stuck, or run another program, which must be a part of "
                   "MPI_COMM_WORLD then, as this one; --timeout sets how long to wait\n",
                   come_within(first, roll_call).c_str());
    if (all_come_within(rest)) return roll_call.finish();
  }
  end_job(Error(ExitCode::retry, doing, come_within(timeout, roll_call),
                "A rank is stuck, or runs another program: then split MPI_COMM_WORLD in each program, and give Launch "
                "the ranks of its own, by from_mpi(); --timeout sets the limit"),
          roll_call);
}

}  // namespace muster::detail::comm
