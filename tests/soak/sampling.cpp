// Plays random programs whose passes draw samples by weights, or shuffle them in buckets of like length, over a dataset
// of samples of different length, in one file or several. They are stopped in the middle and continued by another
// number of workers, maybe with other options. The order of each pass is computed by its definition.
//   mpirun -n RANKS sampling_storm --first SEED --count PROGRAMS
//   mpirun -n RANKS sampling_storm --seed SEED              one program, printed pass by pass
#include "data/passes/alias_table.hpp"
#include "data/sources/permutation.hpp"
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "support/bucket_order.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/job.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

using Samples = std::vector<std::int64_t>;

/// Thrown on purpose, to stop a run.
struct Stop : std::runtime_error {
  Stop() : std::runtime_error("stopped on purpose") {}
};

struct PassPlan {
  std::vector<double> weights = {};  ///< empty: none
  std::int64_t draws = 0;            ///< with weights
  bool shuffle = false;
  std::int64_t bucket = 0;  ///< 0: none
  std::int64_t step = 1;    ///< samples over all workers
  bool drop_last = false;
  int prefetch = 1;
};

struct Program {
  int workers = 1, later = 1;
  Samples lengths = {};
  std::size_t files = 1;  ///< of the dataset; at most one for each sample
  bool compressed = false;
  std::int64_t cut = 0;  ///< RaggedOptions::max_length; 0: none
  std::vector<std::vector<PassPlan>> epochs = {}, epochs_later = {};
  std::size_t stop_epoch = 0, stop_pass = 0;
  std::int64_t stop_step = 0;  ///< 0: does not stop
};

PassPlan draw_pass(Dice& dice, std::size_t samples) {
  PassPlan pass{.step = dice.between(1, 12), .drop_last = dice.chance(0.2), .prefetch = dice.between(0, 3)};
  if (dice.chance(0.5)) {
    for (std::size_t i = 0; i < samples; ++i) pass.weights.push_back(dice.chance(0.3) ? 0 : dice.real(0, 5));
    pass.weights[static_cast<std::size_t>(dice.below(static_cast<int>(samples)))] = 1;
    pass.draws = dice.between(1, 2 * static_cast<int>(samples));
  } else {
    pass.shuffle = dice.chance(0.9);
    if (pass.shuffle && dice.chance(0.8)) pass.bucket = dice.between(1, dice.chance(0.2) ? 1000 : 5);
  }
  return pass;
}

/// The same pass as the run begins it that goes on: the weights must stay.
PassPlan changed(PassPlan pass, Dice& dice) {
  if (dice.chance(0.5)) pass.step = dice.between(1, 12);
  if (pass.draws > 0 && dice.chance(0.3)) pass.draws = dice.between(1, 40);
  if (pass.shuffle && dice.chance(0.3)) pass.bucket = dice.between(0, 5);
  return pass;
}

Program draw(std::uint64_t seed, int ranks) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + 7);
  Program program{.workers = dice.between(1, ranks), .later = dice.between(1, ranks)};
  program.lengths.resize(static_cast<std::size_t>(dice.between(1, dice.chance(0.3) ? 900 : 40)));
  for (auto& length : program.lengths) length = dice.chance(0.1) ? 0 : dice.below(30);
  if (dice.chance(0.05))
    std::ranges::fill(program.lengths, 0);
  else
    program.lengths.front() += 1;
  program.compressed = dice.chance(0.5);
  if (dice.chance(0.3)) program.cut = dice.between(1, 20);
  program.files = std::min(program.lengths.size(), static_cast<std::size_t>(dice.between(1, 4)));
  for (int epochs = dice.between(1, 3); epochs > 0; --epochs) {
    program.epochs.emplace_back();
    program.epochs_later.emplace_back();
    for (int passes = dice.between(1, 3); passes > 0; --passes) {
      program.epochs.back().push_back(draw_pass(dice, program.lengths.size()));
      program.epochs_later.back().push_back(changed(program.epochs.back().back(), dice));
    }
  }
  program.stop_epoch = static_cast<std::size_t>(dice.below(static_cast<int>(program.epochs.size())));
  program.stop_pass = static_cast<std::size_t>(dice.below(static_cast<int>(program.epochs[program.stop_epoch].size())));
  program.stop_step = dice.chance(0.8) ? dice.between(1, 8) : 0;
  return program;
}

std::string describe(const PassPlan& pass) {
  std::string text = "steps of " + std::to_string(pass.step);
  if (pass.draws > 0) text += ", " + std::to_string(pass.draws) + " weighted draws";
  if (pass.shuffle) text += ", shuffle";
  if (pass.bucket > 0) text += ", buckets of " + std::to_string(pass.bucket);
  return text + (pass.drop_last ? ", drop_last" : "");
}

std::string describe(const Program& program) {
  std::string text = std::to_string(program.lengths.size()) + " samples in " + std::to_string(program.files) +
                     " files" + (program.compressed ? ", compressed" : "") + "; " + std::to_string(program.workers) +
                     " workers, then " + std::to_string(program.later) + "\n";
  for (std::size_t e = 0; e < program.epochs.size(); ++e)
    for (std::size_t p = 0; p < program.epochs[e].size(); ++p) {
      text += "  epoch " + std::to_string(e) + ": " + describe(program.epochs[e][p]) + "; later " +
              describe(program.epochs_later[e][p]) + "\n";
      if (program.stop_step > 0 && e == program.stop_epoch && p == program.stop_pass)
        text += "    stops in step " + std::to_string(program.stop_step) + "\n";
    }
  return text;
}

constexpr std::uint64_t hash_of_train = 0xdee795a6c5087209u;  ///< FNV-1a of the dataset's name

/// The order of a pass by its definition. `number`: of the pass in its epoch.
Samples order_of(const Program& program, const PassPlan& pass, std::uint64_t seed, std::size_t epoch,
                 std::size_t number) {
  using detail::data::mix;
  const auto key = [&](std::uint64_t purpose) { return mix(mix(mix(seed ^ hash_of_train, purpose), epoch), number); };
  const auto count = std::ssize(program.lengths);
  Samples order;
  if (pass.draws > 0) {
    const detail::data::AliasTable table(pass.weights);
    for (std::uint64_t p = 0; p < static_cast<std::uint64_t>(pass.draws); ++p)
      order.push_back(table(mix(key(4), 2 * p), mix(key(4), 2 * p + 1)));
  } else if (pass.bucket > 0) {
    order = test::bucket_order(program.lengths, pass.bucket, key(1));
  } else {
    const detail::data::Permutation shuffled(count, key(1));
    for (std::int64_t i = 0; i < count; ++i) order.push_back(pass.shuffle ? shuffled(i) : i);
  }
  return order;
}

std::int64_t token(std::int64_t sample, std::int64_t place) { return 1 + sample * 31 + place; }

/// Writes the samples `first` … `last` − 1.
void write_file(const Program& program, const std::string& path, std::size_t first, std::size_t last) {
  Samples offsets{0}, tokens, ids;
  for (auto i = first; i < last; ++i) {
    ids.push_back(static_cast<std::int64_t>(i));
    for (std::int64_t j = 0; j < program.lengths[i]; ++j) tokens.push_back(token(ids.back(), j));
    offsets.push_back(std::ssize(tokens));
  }
  test::H5File file(path);
  const auto write = [&](const std::string& name, const Samples& values) {
    test::Layout layout;
    if (program.compressed)
      layout = {.chunk = std::min<hsize_t>(values.size(), 16), .deflate = values.empty() ? 0U : 1U};
    file.dataset(name, {values.size()}, H5T_STD_I64LE, H5T_NATIVE_INT64, values.data(), layout);
  };
  write("tokens", tokens);
  write("offsets", offsets);
  write("id", ids);
}

Dataset make_dataset(const Program& program, const std::filesystem::path& folder, const Communicator& world) {
  std::vector<std::string> paths;
  for (std::size_t file = 0; file < program.files; ++file) {
    paths.push_back((folder / ("ragged" + std::to_string(file) + ".h5")).string());
    const auto seam = [&](std::size_t number) { return number * program.lengths.size() / program.files; };
    if (world.rank() == 0) write_file(program, paths.back(), seam(file), seam(file + 1));
  }
  world.barrier();
  RaggedOptions options{.values = {"tokens"}, .columns = {"id"}, .padding = -1};
  if (program.cut > 0) options.max_length = program.cut;
  if (program.compressed) options.cache_bytes = 1000;
  return Dataset::ragged(paths, options);
}

/// Empty, or what is wrong with the values of a batch.
std::string wrong_values(const Program& program, const Batch& batch) {
  const auto &ids = batch["id"], &tokens = batch["tokens"], &mask = batch["tokens_mask"];
  std::int64_t longest = 0;
  for (std::int64_t row = 0; row < ids.size(0); ++row) {
    const auto id = ids[row].item<std::int64_t>();
    auto length = program.lengths[static_cast<std::size_t>(id)];
    if (program.cut > 0) length = std::min(length, program.cut);
    longest = std::max(longest, length);
    for (std::int64_t j = 0; j < tokens.size(1); ++j) {
      if (mask[row][j].item<bool>() != (j < length)) return "the mask of sample " + std::to_string(id);
      if (tokens[row][j].item<std::int64_t>() != (j < length ? token(id, j) : -1))
        return "token " + std::to_string(j) + " of sample " + std::to_string(id);
    }
  }
  return tokens.size(1) == longest ? "" : "a batch is " + std::to_string(tokens.size(1)) + " tokens long";
}

/// What a rank sees of a run.
struct Seen {
  std::map<std::pair<std::size_t, std::size_t>, std::vector<Samples>> steps;  ///< of a pass
  std::uint64_t seed = 0;
  bool stopped = false;
  std::string wrong;
};

void loop(Session& session, const Program& program, bool again, Seen& seen) {
  std::int64_t marker = 0;
  auto state = session.state({{"marker", marker}});
  if (!state.restore()) seen.seed = session.seed();
  const auto& epochs = again ? program.epochs_later : program.epochs;
  for (const auto number : session.epochs(static_cast<std::int64_t>(epochs.size()))) {
    const auto epoch = static_cast<std::size_t>(number);
    for (std::size_t p = 0; p < epochs[epoch].size(); ++p) {
      const auto& pass = epochs[epoch][p];
      BatchOptions options{.global_batch_size = pass.step,
                           .shuffle = pass.shuffle,
                           .drop_last = pass.drop_last,
                           .prefetch_batches = pass.prefetch};
      if (pass.draws > 0) options.weights = at::tensor(pass.weights, at::kDouble);
      if (pass.draws > 0) options.num_samples = pass.draws;
      if (pass.bucket > 0) options.bucket_samples = pass.bucket;
      auto& steps = seen.steps[{epoch, p}];
      for (auto& batch : session.get_dataset_shard().iter_torch_batches(options)) {
        if (const auto wrong = wrong_values(program, batch); !wrong.empty()) throw std::logic_error(seen.wrong = wrong);
        const auto ids = batch["id"].contiguous();
        steps.emplace_back(ids.const_data_ptr<std::int64_t>(), ids.const_data_ptr<std::int64_t>() + batch.size());
        if (again || epoch != program.stop_epoch || p != program.stop_pass || std::ssize(steps) != program.stop_step)
          continue;
        session.report({}, state);
        seen.stopped = true;
        throw Stop();
      }
    }
    session.report({});
  }
}

/// The steps of all ranks, in the order of the ranks. Collective.
std::map<std::pair<std::size_t, std::size_t>, Samples> merged(const Seen& seen, const Communicator& world) {
  auto mine = Json::array();
  for (const auto& [pass, steps] : seen.steps) mine.push_back({pass.first, pass.second, steps});
  std::map<std::pair<std::size_t, std::size_t>, std::vector<Samples>> all;
  for (const auto& theirs : world.all_gather(mine.dump()))
    for (const auto& entry : Json::parse(theirs)) {
      auto& steps = all[{entry[0].get<std::size_t>(), entry[1].get<std::size_t>()}];
      steps.resize(std::max(steps.size(), entry[2].size()));
      for (std::size_t s = 0; s < entry[2].size(); ++s)
        for (const auto& id : entry[2][s]) steps[s].push_back(id.get<std::int64_t>());
    }
  std::map<std::pair<std::size_t, std::size_t>, Samples> flat;
  for (const auto& [pass, steps] : all)
    for (const auto& step : steps) flat[pass].insert(flat[pass].end(), step.begin(), step.end());
  return flat;
}

/// `order` from `begin` on, as far as a pass in steps of `pass.step` takes it.
Samples rest_of(const Samples& order, std::size_t begin, const PassPlan& pass) {
  auto end = order.size();
  if (pass.drop_last) end -= (end - begin) % static_cast<std::size_t>(pass.step);
  return {order.begin() + static_cast<std::ptrdiff_t>(begin), order.begin() + static_cast<std::ptrdiff_t>(end)};
}

/// Where the first start was stopped.
struct StoppedAt {
  bool stopped = false;
  std::pair<std::size_t, std::size_t> pass;
  std::size_t samples = 0;  ///< that the pass had taken
};

/// The samples that the passes of a start must take, by pass. The first start sets `stop`; the second one goes on
/// there.
std::map<std::pair<std::size_t, std::size_t>, Samples> expected(const Program& program, bool again, std::uint64_t seed,
                                                                StoppedAt& stop) {
  std::map<std::pair<std::size_t, std::size_t>, Samples> all;
  for (std::size_t e = 0; e < program.epochs.size(); ++e)
    for (std::size_t p = 0; p < program.epochs[e].size(); ++p) {
      const std::pair place(e, p);
      if (again && place < stop.pass) continue;
      const bool goes_on = again && place == stop.pass;
      const auto& now = (again ? program.epochs_later : program.epochs)[e][p];
      const auto order = order_of(program, goes_on ? program.epochs[e][p] : now, seed, e, p);
      auto& want = all[place] = rest_of(order, goes_on ? stop.samples : 0, now);
      if (again || !stop.stopped || e != program.stop_epoch || p != program.stop_pass) continue;
      want.resize(std::min(want.size(), static_cast<std::size_t>(program.stop_step * now.step)));
      stop.pass = place;
      stop.samples = want.size();
      return all;
    }
  return all;
}

/// Plays one program in one start, or in two if it stops. Returns the difference from the definition. Collective.
std::string play(const Program& program, const Communicator& world, const std::filesystem::path& folder, bool aloud) {
  if (aloud && world.rank() == 0) std::fputs(describe(program).c_str(), stderr);
  const auto data = make_dataset(program, folder, world);
  std::uint64_t seed = 0;
  StoppedAt stop;
  for (const bool again : {false, true}) {
    if (again && !stop.stopped) break;
    Seen seen;
    TorchTrainerOptions options{.run_config = {.name = "run", .checkpoint_config = {.num_to_keep = 1}},
                                .datasets = {{"train", data}}};
    options.scaling_config.num_workers = again ? program.later : program.workers;
    const auto [code, result] =
        test::run({folder, {"--timeout", "30", "--log-level", "off"}, options},
                  [&](Session& session, const Config&) { loop(session, program, again, seen); });
    const auto facts = Json::parse(world.broadcast(Json{seen.seed, seen.stopped}.dump()));  // rank 0 is a worker
    if (!again) seed = facts[0], stop.stopped = facts[1];
    if (!seen.wrong.empty()) return seen.wrong + " is wrong";
    if (code != (facts[1].get<bool>() ? 1 : 0))
      return "a start ends with " + std::to_string(code) + (result && result->error ? result->error->what() : "");
    const auto want = expected(program, again, seed, stop);
    auto have = merged(seen, world);
    std::erase_if(have, [](const auto& pass) { return pass.second.empty(); });
    for (const auto& [pass, samples] : want)
      if (have[pass] != samples)
        return "epoch " + std::to_string(pass.first) + ", pass " + std::to_string(pass.second) +
               (again ? " of the second start" : "") + " takes other samples";
    if (have.size() > want.size()) return "passes come again";
  }
  return "";
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "sampling_storm", [](const Communicator& world) {
    return [&world](const soak::Round& round) {
      return soak::play(soak::draw(round.seed, world.size()), world, round.folder, round.aloud);
    };
  });
}
