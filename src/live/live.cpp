#include "muster/live.hpp"

#include "base/duration.hpp"
#include "base/hash.hpp"
#include "base/text.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "live/state.hpp"
#include "muster/error.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace muster {
namespace {

using detail::str;
using detail::live::LiveState;
using detail::live::Part;
using Lock = std::unique_lock<std::mutex>;

void check(const LiveOptions& options, const std::string& doing) {
  const auto refuse = [&](bool is_wrong, const char* fact, const char* remedy) {
    if (is_wrong) throw Error(ExitCode::usage, doing, fact, remedy);
  };
  refuse(options.bytes < 1 || options.samples_per_epoch < 1 || options.solvers < 1,
         "bytes, samples_per_epoch or solvers is less than 1", "Give at least 1");
  refuse(options.watermark < 0 || options.max_uses < 0 || options.after_end.value_or(0) < 0 ||
             options.validation_every < 0 || options.validation_samples < 0,
         "an option is negative", "Give numbers from 0 on");
  refuse(!(options.min_fresh >= 0 && options.min_fresh <= 1), "min_fresh is not a share", "Give a number from 0 to 1");
  refuse((options.rule == LiveRule::fifo || options.rule == LiveRule::firo) && options.max_uses > 1,
         "max_uses is more than 1, and the rule uses each sample once", "Leave out max_uses, or take another rule");
  refuse(options.rule == LiveRule::uniform && options.min_fresh > 0,
         "min_fresh is set, and the rule uniform throws away samples that were never used",
         "Leave out min_fresh, or take another rule");
}

/// A secret for solvers of other jobs. Collective.
std::string token_for_other_jobs(const Communicator& ranks, const std::string& doing) {
  const auto nodes = detail::comm::run_on_all(ranks, [] { return static_cast<std::int64_t>(live_node()); });
  return detail::comm::run_on_root(ranks, [&] {
    std::array<char, 33> token{};
    if (std::ranges::count(nodes, nodes.front()) != ranks.size())
      throw Error(ExitCode::usage, doing,
                  "LiveOptions::connect_file is set, and the trainer's ranks are on several nodes",
                  "Start the trainer on the solver's node, or both in one job");
    if (live_make_token(token.data()) == 0)
      throw Error(ExitCode::retry, doing, "the system has no random numbers", "Try again");
    return std::string(token.data());
  });
}

/// Tells solvers of other jobs how to find this trainer. For rank 0.
void write_contact(const detail::live::Stream& stream) {
  live_contact contact{
      .protocol = LIVE_PROTOCOL, .trainers = stream.ranks, .node = live_node(), .token = {}, .name = {}};
  stream.token.copy(contact.token, sizeof contact.token - 1);
  stream.name.copy(contact.name, sizeof contact.name - 1);
  if (const int error = live_write_contact(stream.options.connect_file.c_str(), &contact); error != 0)
    throw Error(ExitCode::usage, "opening the live stream \"" + stream.name + "\"",
                str(stream.options.connect_file, " cannot be written: ", std::strerror(error)),
                "Give LiveOptions::connect_file a file in a folder that both jobs see");
}

}  // namespace

Live::Live(const Launch& launch, const std::string& name, const LiveOptions& options) {
  const auto doing = "opening the live stream \"" + name + "\"";
  const auto ranks = launch.communicator().duplicate();
  detail::comm::require_same_options(ranks, "the live stream",
                                     {{"name", name},
                                      {"rule", static_cast<int>(options.rule)},
                                      {"bytes", options.bytes},
                                      {"watermark", options.watermark},
                                      {"max_uses", options.max_uses},
                                      {"min_fresh", options.min_fresh},
                                      {"after_end", options.after_end.value_or(-1)},
                                      {"samples_per_epoch", options.samples_per_epoch},
                                      {"validation_every", options.validation_every},
                                      {"validation_samples", options.validation_samples},
                                      {"solvers", options.solvers},
                                      {"seed", options.seed.value_or(launch.flags().seed)},
                                      {"on_solver_death", static_cast<int>(options.on_solver_death)},
                                      {"connect_file", options.connect_file},
                                      {"timeout", options.timeout.count()}});
  auto own_options = options;
  own_options.timeout = std::min(options.timeout, detail::longest_time);  // so that no sum of times overflows
  const auto number = ranks.all_reduce(LiveState::last_number + 1, ReduceOp::max);
  LiveState::last_number = number;
  std::string token;
  const auto own_rank = detail::comm::rank_and_size().first;
  const auto world_ranks = detail::comm::run_on_all(ranks, [&] { return own_rank; });
  bool has_other_nodes = false;
  detail::comm::run_on_all(ranks, [&] {
    check(options, doing);
    if (live_is_name(name.c_str()) == 0)
      throw Error(ExitCode::usage, doing, "it is no name of a stream",
                  str("Give up to ", static_cast<int>(MUSTER_LIVE_MAX_NAME), " letters, digits, '-', '_' and '.'"));
    if (!options.connect_file.empty()) return;
    if (ranks.size() == detail::comm::rank_and_size().second)
      throw Error(ExitCode::usage, doing, "no rank of the job is left for a solver",
                  "Start both, as in mpirun -n 6 ./solver : -n 2 ./trainer, and give Launch the part of a LiveWorld");
    std::array<char, 33> digits{};
    std::array<char, LIVE_TEXT> text{};
    if (live_join(static_cast<double>(own_options.timeout.count()), digits.data(), text.data()) != MUSTER_LIVE_OK)
      throw Error(ExitCode::retry, doing, "not all ranks of MPI_COMM_WORLD have come in time",
                  "Ranks that neither simulate nor train call muster_live_world(NULL)");
    token = digits.data();
    for (int rank = 0; rank < detail::comm::rank_and_size().second; ++rank)
      has_other_nodes =
          has_other_nodes || (live_share_node(own_rank, rank) == 0 && std::ranges::count(world_ranks, rank) == 0);
    if (has_other_nodes && !detail::comm::threads_may_call_mpi())
      throw Error(ExitCode::usage, doing,
                  "a solver may be on another node, and MPI was not initialised for several threads",
                  "Ask for MPI_THREAD_MULTIPLE in MPI_Init_thread, or start all ranks on one node");
  });
  if (!options.connect_file.empty()) token = token_for_other_jobs(ranks, doing);
  const bool any_has_other_nodes = ranks.all_reduce(std::int64_t{has_other_nodes}, ReduceOp::max) > 0;
  detail::comm::run_on_all(ranks, [&] {
    state_ = std::make_shared<LiveState>(
        ranks,
        detail::live::Stream{.token = token,
                             .name = name,
                             .rank = ranks.rank(),
                             .ranks = ranks.size(),
                             .tag = static_cast<int>(1 + 2 * (number % detail::live::most_streams)),
                             .has_other_nodes = has_other_nodes,
                             .any_has_other_nodes = any_has_other_nodes,
                             .options = own_options,
                             .seed = detail::scrambled(options.seed.value_or(launch.flags().seed) +
                                                       static_cast<std::uint64_t>(ranks.rank()))},
        number);
  });
  detail::comm::run_on_all(ranks, [&] { state_->receiver.start(); });
  if (!options.connect_file.empty())
    detail::comm::run_on_root(ranks, [&] { write_contact(state_->receiver.stream); });
  else if (ranks.rank() == 0)
    detail::live::announce(state_->receiver.stream, world_ranks);
}

Live::~Live() {
  const auto& stream = state_->receiver.stream;
  if (stream.rank != 0) return;
  const auto* const file = stream.options.connect_file.c_str();
  // A trainer that was started meanwhile may have replaced the file.
  if (live_contact found{}; *file != '\0' && live_read_contact(file, &found) != 0 && stream.token == found.token)
    ::unlink(file);
  if (*file == '\0' && !detail::comm::mpi_is_finalised()) detail::live::announce(stream, {});
}

Dataset Live::dataset() const {
  state_->require_solver();
  return detail::live::dataset_of(state_, Part::training);
}

Dataset Live::validation() const {
  if (state_->options.validation_every == 0)
    throw Error(ExitCode::usage, "reading the live stream \"" + state_->receiver.stream.name + "\"",
                "no sample is held out for validation", "Set LiveOptions::validation_every");
  state_->require_solver();
  return detail::live::dataset_of(state_, Part::validation);
}

Live::operator StateEntry() const {
  state_->require_solver();
  state_->ranks = state_->launched.duplicate();
  return StateEntry(detail::live::saved(state_));
}

std::int64_t Live::send_weights(const std::string& bytes) {
  detail::comm::run_on_root(state_->ranks, [&] { state_->receiver.send_weights(bytes); });
  return ++state_->weights_version;
}

void Live::stop_solvers() { state_->receiver.stop_solvers(); }

bool Live::ended() const {
  state_->require_solver();
  std::int64_t left = 0;
  {
    const Lock lock(state_->receiver.mutex);
    state_->receiver.end_pause();
    left = state_->receiver.all_ended() ? state_->draws_left(1) : 1;
  }
  return state_->ranks.all_reduce(left) == 0;
}

LiveLedger Live::ledger() const {
  state_->require_solver();
  return state_->ledger(state_->ranks);
}

}  // namespace muster
