// Random couplings of solvers and a trainer in one job: M:N ranks, several solvers, decompositions, types, rules,
// speeds and stops, compared with a model in memory. Each value of each sample is compared.
#include "muster/live.hpp"
#include "base/hash.hpp"
#include "data/sources/source.hpp"
#include "muster/launch.hpp"
#include "muster/mpi.hpp"
#include "muster_live.h"
#include "soak/dice.hpp"
#include "soak/driver.hpp"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace muster::soak {
namespace {

constexpr std::array type_bytes{4, 8, 4, 8, 1};

struct Field {
  std::string name;
  int type = 0;
  std::vector<std::int64_t> global;
  std::vector<int> grid;                          // blocks in each dimension
  std::vector<std::vector<std::int64_t>> bounds;  // of the blocks in each dimension
  std::vector<std::int64_t> before, after;        // halos
};

struct SolverPlan {
  int ranks = 1, rule = MUSTER_LIVE_WAIT, samples = 1, slots = 1, pause_us = 0;
  std::vector<double> parameters;
  std::vector<Field> fields;  // the same but for the decomposition
};

struct Plan {
  const char* transport = "";  // MUSTER_TEST_LIVE: "mpi", "mixed", or by node; "file": as between jobs
  int trainers = 1, pause_us = 0, batch = 1;
  std::vector<SolverPlan> solvers;
  LiveOptions options;
  int stop_after = -1;  // draws of a rank after which it asks the solvers to stop; -1: never
};

/// What the value at `index` of a field is, as a small whole number that every type holds.
int value_of(int solver, std::int64_t number, int field, std::int64_t index) {
  return static_cast<int>((solver * 31 + number * 7 + field * 13 + index * 3) % 251);
}

void decompose(Dice& dice, Field& field, int ranks) {
  const auto dims = field.global.size();
  field.grid.assign(dims, 1);
  for (int left = ranks, factor = 2; left > 1; ++factor)
    for (; left % factor == 0; left /= factor)
      field.grid[static_cast<std::size_t>(dice.below(static_cast<int>(dims)))] *= factor;
  field.bounds.clear();
  for (std::size_t d = 0; d < dims; ++d) {
    std::vector<std::int64_t> bounds{0, field.global[d]};
    for (int cut = 1; cut < field.grid[d]; ++cut) bounds.push_back(dice.between(0, static_cast<int>(field.global[d])));
    std::ranges::sort(bounds);
    field.bounds.push_back(bounds);
    field.before.push_back(dice.below(3));
    field.after.push_back(dice.below(3));
  }
}

Plan plan_of(std::uint64_t seed, int ranks) {
  Dice dice(seed);
  Plan plan;
  plan.trainers = dice.between(1, std::min(ranks - 1, 3));
  std::vector<Field> fields(static_cast<std::size_t>(dice.between(1, 3)));
  std::int64_t bytes = 0;
  for (std::size_t f = 0; f < fields.size(); ++f) {
    fields[f].name = "field" + std::to_string(f);
    fields[f].type = dice.below(5);
    std::int64_t volume = 1;
    for (int d = dice.between(1, 3); d > 0; --d) volume *= fields[f].global.emplace_back(dice.between(1, 9));
    bytes += volume * type_bytes[static_cast<std::size_t>(fields[f].type)];
  }
  const int parameters = dice.below(3);
  for (int left = ranks - plan.trainers; left > 0;) {
    SolverPlan solver{.ranks = dice.between(1, left),
                      .rule = dice.below(3),
                      .samples = dice.between(0, 60),
                      .slots = dice.between(1, 6),
                      .pause_us = dice.one_of({0, 0, 200}),
                      .parameters = {},
                      .fields = fields};
    for (int p = 0; p < parameters; ++p) solver.parameters.push_back(dice.real());
    for (auto& field : solver.fields) decompose(dice, field, solver.ranks);
    left -= solver.ranks;
    plan.solvers.push_back(solver);
  }
  bytes += 8 * parameters;
  plan.transport = dice.one_of({"", "mpi", "mixed", "file"});
  plan.pause_us = dice.one_of({0, 0, 200});
  plan.batch = dice.between(1, 8);
  if (dice.chance(0.25)) plan.stop_after = dice.between(0, 20);
  auto& options = plan.options;
  options.rule = dice.one_of({LiveRule::fifo, LiveRule::firo, LiveRule::reservoir, LiveRule::uniform});
  const bool once = options.rule == LiveRule::fifo || options.rule == LiveRule::firo;
  options.watermark = dice.between(0, 6);
  options.validation_every = dice.one_of({0, 0, 3});
  options.validation_samples = dice.between(1, 5);
  const int ahead = 2 * static_cast<int>(plan.solvers.size());  // of solvers on other nodes
  options.bytes = (bytes + 64) * (dice.between(1, 12) + 2 * options.watermark + options.validation_samples + ahead);
  if (!once) options.max_uses = dice.one_of({0, 0, 1, 3});
  if (options.rule != LiveRule::uniform) options.min_fresh = dice.one_of({0.0, 0.0, 0.5, 1.0});
  if (dice.chance(0.3)) options.after_end = dice.between(0, 30);
  options.solvers = static_cast<int>(plan.solvers.size());
  options.timeout = patience;
  options.seed = seed;
  return plan;
}

/// Where a solver rank's block of a field is.
struct Block {
  std::vector<std::int64_t> offset, local;
};
Block block_of(const Field& field, int rank) {
  Block block;
  for (std::size_t d = 0; d < field.global.size(); rank /= field.grid[d++]) {
    const auto at = static_cast<std::size_t>(rank % field.grid[d]);
    block.offset.push_back(field.bounds[d][at]);
    block.local.push_back(field.bounds[d][at + 1] - field.bounds[d][at]);
  }
  return block;
}

void put(std::vector<std::byte>& array, std::int64_t index, int type, int value) {
  auto* const at = array.data() + index * type_bytes[static_cast<std::size_t>(type)];
  const auto write = [&](auto number) { std::memcpy(at, &number, sizeof number); };
  type == MUSTER_LIVE_FLOAT32   ? write(static_cast<float>(value))
  : type == MUSTER_LIVE_FLOAT64 ? write(static_cast<double>(value))
  : type == MUSTER_LIVE_INT32   ? write(static_cast<std::int32_t>(value))
  : type == MUSTER_LIVE_INT64   ? write(static_cast<std::int64_t>(value))
                                : write(static_cast<std::uint8_t>(value));
}

/// This rank's array of a field with its halos, in which a wrong value lies.
std::vector<std::byte> array_of(const Field& field, const Block& block, int solver, std::int64_t number, int index) {
  const auto dims = field.global.size();
  std::vector<std::int64_t> extents;
  for (std::size_t d = 0; d < dims; ++d) extents.push_back(field.before[d] + block.local[d] + field.after[d]);
  const auto volume = std::accumulate(extents.begin(), extents.end(), std::int64_t{1}, std::multiplies<>());
  std::vector<std::byte> array(static_cast<std::size_t>(volume * type_bytes[static_cast<std::size_t>(field.type)]));
  for (std::int64_t i = 0; i < volume; ++i) {
    std::int64_t rest = i, global = 0, step = 1;
    bool inside = true;
    for (auto d = dims; d-- > 0; rest /= extents[d]) {
      const auto at = rest % extents[d] - field.before[d];
      inside = inside && at >= 0 && at < block.local[d];
      global += (block.offset[d] + at) * step;
      step *= field.global[d];
    }
    put(array, i, field.type, inside ? value_of(solver, number, index, global) : 255);
  }
  return array;
}

bool is_held_out(const LiveOptions& options, std::int64_t number) {
  return detail::scrambled(static_cast<std::uint64_t>(number)) % static_cast<std::uint64_t>(options.validation_every) ==
         0;
}

struct Sent {
  std::int64_t sent = 0, dropped = 0;
};

std::string solve(const SolverPlan& plan, int solver, const std::string& stream, const std::string& file, MPI_Comm comm,
                  Dice dice, Sent& counts) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  std::int64_t block_bytes = 0;
  std::vector<Block> blocks;
  for (const auto& field : plan.fields) {
    blocks.push_back(block_of(field, rank));
    const auto& local = blocks.back().local;
    const auto volume = std::accumulate(local.begin(), local.end(), std::int64_t{1}, std::multiplies<>());
    block_bytes += (volume * type_bytes[static_cast<std::size_t>(field.type)] + 63) / 64 * 64;
  }
  muster_live* live = nullptr;
  const muster_live_options options{.solver = solver,
                                    .bytes = plan.slots * (block_bytes + 72),
                                    .rule = plan.rule,
                                    .timeout_s = patience.count() * 1.0};
  const int opened = file.empty() ? muster_live_open(comm, stream.c_str(), &options, &live)
                                  : muster_live_connect(comm, file.c_str(), stream.c_str(), &options, &live);
  if (opened != MUSTER_LIVE_OK) return muster_live_text(live);
  for (std::size_t p = 0; p < plan.parameters.size(); ++p)
    muster_live_parameter(live, ("p" + std::to_string(p)).c_str(), plan.parameters[p]);
  for (std::size_t f = 0; f < plan.fields.size(); ++f) {
    const auto& field = plan.fields[f];
    muster_live_field(live, field.name.c_str(), field.type, static_cast<int>(field.global.size()), field.global.data(),
                      blocks[f].offset.data(), blocks[f].local.data());
    muster_live_halo(live, field.name.c_str(), field.before.data(), field.after.data());
  }
  std::int64_t number = -1;
  int code = muster_live_next(live, &number);
  if (code != MUSTER_LIVE_OK && code != MUSTER_LIVE_STOP) return std::string("next: ") + muster_live_text(live);
  int done = 0;
  for (number = dice.below(3); done < plan.samples && code != MUSTER_LIVE_STOP; ++done, number += dice.between(1, 3)) {
    std::vector<std::vector<std::byte>> arrays;
    std::vector<const void*> values;
    for (std::size_t f = 0; f < plan.fields.size(); ++f) {
      arrays.push_back(array_of(plan.fields[f], blocks[f], solver, number, static_cast<int>(f)));
      values.push_back(arrays.back().data());
    }
    code = muster_live_send(live, number, values.data());
    if (code > MUSTER_LIVE_STOP) return "send: " + std::string(muster_live_text(live));
    if (plan.pause_us > 0) ::usleep(static_cast<unsigned>(dice.below(plan.pause_us)));
  }
  // All ranks have stopped at the same sample.
  std::array<int, 2> ends{done, -done};
  MPI_Allreduce(MPI_IN_PLACE, ends.data(), 2, MPI_INT, MPI_MAX, comm);
  muster_live_counts own{};
  muster_live_close(&live, &own);
  if (rank == 0) counts = {own.sent, own.dropped};
  return ends[0] == -ends[1] ? "" : "the ranks of a solver have stopped at different samples";
}

/// Compares the rows of a batch with what the solvers have sent. Counts the uses of each sample.
std::string compare(const Plan& plan, const Batch& batch, std::map<std::array<std::int64_t, 2>, int>& uses) {
  const auto samples = batch["sample"];
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto solver = samples[row][0].item<std::int64_t>(), number = samples[row][1].item<std::int64_t>();
    const auto name = "sample " + std::to_string(number) + " of solver " + std::to_string(solver);
    if (solver < 0 || solver >= static_cast<std::int64_t>(plan.solvers.size())) return name + " does not exist";
    const auto& sent = plan.solvers[static_cast<std::size_t>(solver)];
    ++uses[{solver, number}];
    for (std::size_t p = 0; p < sent.parameters.size(); ++p)
      if (batch["p" + std::to_string(p)][row].item<double>() != sent.parameters[p]) return name + ": wrong parameter";
    for (std::size_t f = 0; f < sent.fields.size(); ++f) {
      const auto values = batch[sent.fields[f].name][row];
      if (values.sizes() != at::IntArrayRef(sent.fields[f].global)) return name + ": wrong shape";
      const auto flat = values.reshape(-1).to(at::kDouble);
      for (std::int64_t i = 0; i < flat.numel(); ++i)
        if (flat[i].item<double>() != value_of(static_cast<int>(solver), number, static_cast<int>(f), i))
          return name + ": wrong value at " + std::to_string(i) + " of " + sent.fields[f].name;
    }
  }
  return "";
}

std::string train(const Plan& plan, const Live& live, Live& stopper, Dice dice, LiveLedger& ledger,
                  std::int64_t& used) {
  const auto source = detail::data::source_of(live.dataset());
  const auto& options = plan.options;
  const bool once = options.rule == LiveRule::fifo || options.rule == LiveRule::firo;
  std::map<std::array<std::int64_t, 2>, int> uses;
  std::map<std::int64_t, std::int64_t> last;
  std::int64_t draws = 0;
  bool stopped = false;
  for (;;) {
    if (plan.stop_after >= 0 && draws >= plan.stop_after && !std::exchange(stopped, true)) stopper.stop_solvers();
    const auto wanted = dice.between(1, plan.batch);
    auto drawn = source->draw(wanted, 0, [] {});
    if (!drawn) break;
    const auto& batch = drawn->batch;
    draws += batch.size();
    if (batch.size() > wanted) return "a batch has too many rows";
    if (auto wrong = compare(plan, batch, uses); !wrong.empty()) return wrong;
    for (std::int64_t row = 0; options.rule == LiveRule::fifo && row < batch.size(); ++row) {
      const auto solver = batch["sample"][row][0].item<std::int64_t>(),
                 number = batch["sample"][row][1].item<std::int64_t>();
      if (const auto before = last.find(solver); before != last.end() && before->second >= number)
        return "fifo has changed the order";
      last[solver] = number;
    }
    if (plan.pause_us > 0) ::usleep(static_cast<unsigned>(dice.below(plan.pause_us)));
  }
  if (!stopped && plan.stop_after >= 0) stopper.stop_solvers();
  const auto most = once ? 1 : options.max_uses;
  for (const auto& [sample, count] : uses) {
    if (most > 0 && count > most) return "a sample was used too often";
    if (options.validation_every > 0 && is_held_out(options, sample[1]) && options.validation_samples > 60)
      return "a sample that is held out was used";
  }
  if (!live.ended()) return "a rank has ended before the others";
  if (options.validation_every > 0) {
    const auto held_out = detail::data::source_of(live.validation());
    std::map<std::array<std::int64_t, 2>, int> seen;
    if (auto drawn = held_out->draw(options.validation_samples, 0, [] {})) {
      if (auto wrong = compare(plan, drawn->batch, seen); !wrong.empty()) return "held out: " + wrong;
      for (const auto& [sample, count] : seen)
        if (!is_held_out(options, sample[1]) || uses.contains(sample)) return "the wrong sample is held out";
    }
  }
  ledger = live.ledger();
  used = static_cast<std::int64_t>(uses.size());
  return "";
}

std::string play(const Round& round, const Communicator& world) {
  auto plan = plan_of(round.seed, world.size());
  const auto stream = "s" + std::to_string(round.seed);
  int solver = -1;
  for (int next = plan.trainers; solver + 1 < static_cast<int>(plan.solvers.size()) && world.rank() >= next;)
    next += plan.solvers[static_cast<std::size_t>(++solver)].ranks;
  // Two jobs find each other by a file on one node only.
  const bool draws_file = std::string_view(plan.transport) == "file";
  const bool by_file = draws_file && world.topology().num_nodes == 1;
  const auto process = world.all_reduce(std::int64_t{world.rank() == 0 ? ::getpid() : 0});
  if (by_file)
    plan.options.connect_file = std::filesystem::temp_directory_path() / (stream + "." + std::to_string(process));
  if (draws_file || *plan.transport == '\0')
    ::unsetenv("MUSTER_TEST_LIVE");
  else
    ::setenv("MUSTER_TEST_LIVE", plan.transport, 1);
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, solver + 1, world.rank(), &part);
  if (round.aloud && world.rank() == 0)
    std::printf("%d trainers, %zu solvers, rule %d, transport \"%s\"\n", plan.trainers, plan.solvers.size(),
                static_cast<int>(plan.options.rule), plan.transport);
  std::string wrong;
  Sent counts;
  LiveLedger ledger;
  std::int64_t used = 0;
  Dice dice(round.seed * 1000 + static_cast<std::uint64_t>(solver + 1));
  if (solver >= 0) {
    wrong = solve(plan.solvers[static_cast<std::size_t>(solver)], solver, stream, plan.options.connect_file, part, dice,
                  counts);
  } else {
    std::string program = "live_storm";
    std::array<char*, 2> arguments{program.data(), nullptr};
    Launch launch(1, arguments.data(), from_mpi(part));
    const auto code = launch.run([&] {
      Live live(launch, stream, plan.options);
      Dice own(round.seed * 2000 + static_cast<std::uint64_t>(world.rank()));
      wrong = train(plan, live, live, own, ledger, used);
      // The others may still look at their part of the ledger.
      launch.communicator().barrier();
    });
    if (code != 0) wrong += " ended with code " + std::to_string(code);
  }
  MPI_Comm_free(&part);
  const auto sent = world.all_reduce(counts.sent), dropped = world.all_reduce(counts.dropped),
             all_used = world.all_reduce(used);
  if (!wrong.empty() || solver >= 0) return wrong;
  const auto text = "sent " + std::to_string(ledger.sent) + " on its way " + std::to_string(ledger.on_its_way) +
                    " waiting " + std::to_string(ledger.waiting) + " used " + std::to_string(ledger.used) +
                    " validation " + std::to_string(ledger.validation) + " dropped " +
                    std::to_string(ledger.dropped_by_solver) + " and " + std::to_string(ledger.dropped_by_trainer) +
                    " lost " + std::to_string(ledger.lost) + "; the solvers have sent " + std::to_string(sent) +
                    " and dropped " + std::to_string(dropped) + "; used were " + std::to_string(all_used);
  if (ledger.sent != sent || ledger.dropped_by_solver != dropped) return "the ledger differs from the solvers: " + text;
  if (ledger.on_its_way != 0 || ledger.lost != 0) return "samples are missing: " + text;
  if (ledger.used != all_used) return "the ledger differs from what was drawn: " + text;
  if (!plan.options.after_end && ledger.waiting != 0) return "samples were not used: " + text;
  if (plan.options.rule != LiveRule::uniform && ledger.dropped_by_trainer != 0)
    return "the trainer has dropped samples: " + text;
  return "";
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "live_storm", [](const Communicator& world) {
    muster_live_world(nullptr);
    return [&world](const soak::Round& round) { return soak::play(round, world); };
  });
}
