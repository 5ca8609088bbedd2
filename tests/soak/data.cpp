// Plays random programs over datasets of every kind. Their passes run in sessions that are stopped and then continued
// by another number of workers. A model in memory, made of loops over numbers, says which samples must come and with
// which values.
//   mpirun -n RANKS data_storm --first SEED --count PROGRAMS
//   mpirun -n RANKS data_storm --seed SEED              one program, printed pass by pass
// Ends with 1 if a program differs from the model, and prints the command that repeats it. A program that does not end
// also ends the programs after it; the last line says which one it was.
#include "hdf5/types.hpp"
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "support/hdf5_fixture.hpp"
#include "support/job.hpp"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace muster::soak {
namespace {

constexpr int virtual_workers = 12;

/// Thrown on purpose by the program: by its reader, its preprocessor or its loop.
struct Thrown : std::runtime_error {
  Thrown() : std::runtime_error("thrown on purpose") {}
};
/// Thrown if something differs from the model.
struct Mismatch : std::logic_error {
  using std::logic_error::logic_error;
};

template <class A, class B>
void expect(const A& have, const B& want, const std::string& what) {
  if (have != want) throw Mismatch(what + " is " + std::to_string(have) + ", not " + std::to_string(want));
}

// The program.

enum class Layout { tensors, items, contiguous, chunked, compressed, files, json_stream, batch_stream };
bool is_stream(Layout layout) { return layout >= Layout::json_stream; }
const char* name_of(Layout layout) {
  static const char* const names[] = {"tensors",    "items", "contiguous",  "chunked",
                                      "compressed", "files", "JSON stream", "Batch stream"};
  return names[static_cast<int>(layout)];
}

struct DataPlan {
  std::string name;
  Layout layout = Layout::tensors;
  std::int64_t rows = 1;
  bool split = true;
  int dealing = 0;                         ///< for a stream: how rows are dealt to workers
  std::vector<int> maps = {};              ///< the threads of each function of map_batches()
  std::optional<std::size_t> subset = {};  ///< for a subset: as many of the functions come before it
};

struct PassPlan {
  std::size_t data = 0;
  std::int64_t batch_size = 1;
  bool global = false;  ///< batch_size counts the samples of a step
  bool training = true, shuffle = false, drop_last = false, as_stored = false;
  int prefetch = 1, convert = 0;
  std::optional<std::int64_t> window = {};
  std::int64_t leave_after = -1;          ///< number of batches after which the loop leaves the pass; −1: never
  std::shared_ptr<PassPlan> beside = {};  ///< a second pass that advances batch by batch with this one
  std::shared_ptr<PassPlan> inside =
      {};  ///< a pass inside the second step, or inside the first batch if this pass does not train
};

enum class Step { plus, scale, min_max, one_hot, noise, old_noise, drop, fail, map_noise, map_fail };

/// When a program makes a training pass outside its loop over the epochs.
enum class Outside { never, before_restore, after_restore, on_a_fresh_start };

struct Program {
  std::uint64_t seed = 1;
  int workers = 1, later = 1;
  bool is_virtual = false;
  at::ScalarType v_type = at::kFloat, w_type = at::kLong;
  std::vector<std::int64_t> v_shape = {};
  std::vector<DataPlan> datasets = {};
  std::vector<Step> steps = {};
  std::vector<std::vector<PassPlan>> epochs = {};
  bool stops = false;
  std::size_t stop_epoch = 0, stop_pass = 0;
  std::int64_t stop_batch = -1;  ///< index of the batch to stop in; −1: stop at the end of the epoch
  Outside outside = Outside::never;
  PassPlan pass_outside = {};
  bool reader_fails = false;
  std::int64_t bad = 0;                       ///< id of the sample at which the program fails
  std::vector<std::string> later_flags = {};  ///< of the start that goes on

  bool has(Step step) const { return std::ranges::find(steps, step) != steps.end(); }
  bool fails() const { return has(Step::fail) || has(Step::map_fail) || has(Step::drop) || reader_fails; }
  bool is_random() const { return has(Step::noise) || has(Step::old_noise) || has(Step::map_noise); }
  /// The number of micro-batches into which a step is divided.
  int total(int now) const { return is_virtual ? virtual_workers : now; }
};

/// True if both the pass and the pass beside it are training passes over the same shard. A saved position can describe
/// only one of them.
bool has_two_training_passes(const Program& program, const PassPlan& pass) {
  return pass.beside && pass.beside->data == pass.data && pass.training && pass.beside->training &&
         program.datasets[pass.data].split;
}

PassPlan draw_pass(Dice& dice, const Program& program, std::size_t data, int most_workers) {
  PassPlan pass{.data = data};
  const auto& of = program.datasets[data];
  pass.batch_size = dice.between(1, 9);
  pass.global = dice.chance(0.6);
  if (pass.global && is_stream(of.layout)) pass.batch_size += most_workers;
  pass.training = dice.chance(0.75);
  pass.shuffle = !is_stream(of.layout) && dice.chance(0.5);
  if (!is_stream(of.layout) && dice.chance(0.2)) pass.window = dice.between(1, 12);
  pass.drop_last = dice.chance(0.2);
  pass.as_stored = dice.chance(0.2);
  pass.prefetch = dice.between(0, 3);
  pass.convert = dice.below(3);
  if (dice.chance(0.2)) pass.leave_after = dice.between(1, 4);
  return pass;
}

/// Draws what functions of map_batches() do in the program.
void draw_maps(Program& program) {
  Dice dice(program.seed * 0x9e3779b97f4a7c15ULL + 7);
  for (auto& step : program.steps) {
    if ((step == Step::noise || step == Step::old_noise) && dice.chance(0.5)) step = Step::map_noise;
    if (step == Step::fail && dice.chance(0.5)) step = Step::map_fail;
  }
  for (auto& data : program.datasets) {
    for (int count = dice.chance(0.6) ? dice.between(1, 3) : 0; count > 0; --count)
      data.maps.push_back(dice.between(1, 4));
    if (!is_stream(data.layout) && dice.chance(0.3))
      data.subset = static_cast<std::size_t>(dice.below(static_cast<int>(data.maps.size()) + 1));
  }
}

Program draw(std::uint64_t seed, int ranks) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + 99);
  Program program{.seed = seed};
  program.workers = dice.between(1, ranks);
  program.later = dice.between(1, ranks);
  const bool random = dice.chance(0.25), fitted = !random && dice.chance(0.35);
  program.is_virtual = random || dice.chance(0.2);
  program.v_type =
      dice.one_of({at::kByte, at::kShort, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble, at::kBool});
  program.w_type = dice.one_of({at::kByte, at::kInt, at::kLong});
  program.v_shape = dice.one_of<std::vector<std::int64_t>>({{}, {3}, {2, 2}});
  const char* const names[] = {"train", "other", "third"};
  for (int i = dice.between(1, 3), d = 0; d < i; ++d) {
    auto layout = static_cast<Layout>(dice.below(8));
    if ((program.is_virtual || (fitted && d == 0)) && is_stream(layout)) layout = Layout::tensors;
    program.datasets.push_back(
        {names[d], layout, dice.between(1, dice.chance(0.1) ? 700 : 50), d == 0 || dice.chance(0.7), dice.below(3)});
  }
  if (dice.chance(0.3)) program.steps.push_back(Step::plus);
  if (fitted) program.steps.push_back(dice.one_of({Step::scale, Step::min_max}));
  if (fitted && dice.chance(0.5)) program.steps.push_back(Step::one_hot);
  if (random) program.steps.push_back(dice.one_of({Step::noise, Step::old_noise}));
  dice.shuffle(program.steps);
  if (!random && dice.chance(0.12)) {
    const bool stream = is_stream(program.datasets.front().layout);
    if (stream && dice.chance(0.5))
      program.reader_fails = true;
    else
      program.steps.push_back(dice.one_of({Step::drop, Step::fail}));
    program.bad = dice.below(static_cast<int>(program.datasets.front().rows));
  }
  for (int epochs = dice.between(1, 3); epochs > 0; --epochs) {
    std::vector<PassPlan> passes;
    for (int count = dice.between(1, 3); count > 0; --count) {
      const auto any = [&] { return static_cast<std::size_t>(dice.below(static_cast<int>(program.datasets.size()))); };
      auto pass = draw_pass(dice, program, passes.empty() ? 0 : any(), ranks);
      // If one of the two datasets is not split, the number of workers decides how far the other pass gets.
      if (dice.chance(0.2) && !random) {
        auto other = draw_pass(dice, program, any(), ranks);
        other.leave_after = pass.leave_after = -1;
        pass.beside = std::make_shared<PassPlan>(other);
      } else if (dice.chance(random ? 0.6 : 0.2)) {
        auto inner = draw_pass(dice, program, any(), ranks);
        inner.training = false;
        pass.inside = std::make_shared<PassPlan>(inner);
      }
      // The first pass of an epoch trains, so that every epoch trains and ends when its passes end.
      if (passes.empty()) pass.training = true;
      if (program.is_virtual) pass.leave_after = -1;
      passes.push_back(pass);
    }
    program.epochs.push_back(passes);
  }
  program.stops = !program.fails() && dice.chance(0.6);
  program.stop_epoch = static_cast<std::size_t>(dice.below(static_cast<int>(program.epochs.size())));
  const auto& passes = program.epochs[program.stop_epoch];
  program.stop_pass = static_cast<std::size_t>(dice.below(static_cast<int>(passes.size())));
  const auto can_stop = [&](const PassPlan& pass) {
    const auto& of = program.datasets[pass.data];
    return !is_stream(of.layout) || !of.split || !pass.training;
  };
  const auto& pass = passes[program.stop_pass];
  const auto& of = program.datasets[pass.data];
  if (dice.chance(0.75) && can_stop(pass) && (!pass.beside || can_stop(*pass.beside)) && pass.training && of.split)
    program.stop_batch = dice.below(6);
  if (!program.fails() && dice.chance(0.4)) {
    program.outside = dice.one_of({Outside::before_restore, Outside::after_restore, Outside::on_a_fresh_start});
    program.pass_outside = draw_pass(
        dice, program, static_cast<std::size_t>(dice.below(static_cast<int>(program.datasets.size()))), ranks);
    program.pass_outside.training = true;
    if (program.is_virtual) program.pass_outside.leave_after = -1;
  }
  draw_maps(program);
  if (!random && dice.chance(0.3)) program.later_flags = {"--seed", std::to_string(dice.between(1, 5))};
  return program;
}

std::string describe(const PassPlan& pass, const Program& program) {
  const auto& of = program.datasets[pass.data];
  std::string text = "\"" + of.name + "\" in " + (pass.global ? "steps" : "batches") + " of " +
                     std::to_string(pass.batch_size) + ", prefetch " + std::to_string(pass.prefetch);
  if (!pass.training) text += ", no training";
  if (pass.shuffle) text += ", shuffle";
  if (pass.window) text += ", local shuffle " + std::to_string(*pass.window);
  if (pass.drop_last) text += ", drop_last";
  if (pass.as_stored) text += ", as stored";
  if (pass.leave_after >= 0) text += ", left after " + std::to_string(pass.leave_after);
  if (pass.beside) text += "\n    beside " + describe(*pass.beside, program);
  if (pass.inside) text += "\n    around " + describe(*pass.inside, program);
  return text;
}

std::string describe_maps(const DataPlan& data) {
  std::string text;
  for (std::size_t m = 0; m < data.maps.size(); ++m)
    text += (data.subset == m ? ", subset" : "") + std::string(", map in ") + std::to_string(data.maps[m]);
  return text + (data.subset == data.maps.size() ? ", subset" : "");
}

std::string describe(const Program& program) {
  std::string text = "program " + std::to_string(program.seed) + ": " + std::to_string(program.workers) +
                     " workers, then " + std::to_string(program.later) + (program.is_virtual ? ", virtual" : "") +
                     (program.later_flags.empty() ? "" : " and seed " + program.later_flags.back()) + "; v " +
                     c10::toString(program.v_type) + ", w " + c10::toString(program.w_type) + "\n";
  for (const auto& data : program.datasets)
    text += "  \"" + data.name + "\": " + std::to_string(data.rows) + " rows, " + name_of(data.layout) +
            (data.split ? "" : ", whole") + describe_maps(data) + "\n";
  static const char* const steps[] = {"plus",      "scale", "min_max", "one_hot",   "noise",
                                      "old noise", "drop",  "fail",    "map noise", "map fail"};
  for (const auto step : program.steps) text += std::string("  ") + steps[static_cast<int>(step)] + "\n";
  static const char* const outside[] = {"", "before restore()", "after restore()", "on a fresh start alone"};
  if (program.outside != Outside::never)
    text += std::string("  outside the loop, ") + outside[static_cast<int>(program.outside)] + ": " +
            describe(program.pass_outside, program) + "\n";
  if (program.fails()) text += "  fails at " + std::to_string(program.bad) + "\n";
  for (std::size_t e = 0; e < program.epochs.size(); ++e)
    for (std::size_t p = 0; p < program.epochs[e].size(); ++p) {
      text += "  epoch " + std::to_string(e) + ": " + describe(program.epochs[e][p], program) + "\n";
      if (program.stops && e == program.stop_epoch && p == program.stop_pass)
        text +=
            "    stops " +
            (program.stop_batch < 0 ? "at the end of the epoch" : "in batch " + std::to_string(program.stop_batch)) +
            "\n";
    }
  return text;
}

// The values.

/// Value j of column v of sample `id`, before conversion to the column's type.
double v_of(std::int64_t id, std::int64_t j, at::ScalarType type) {
  const auto whole = static_cast<double>((id * 7 + j * 3) % 100);
  if (type == at::kBool) return static_cast<double>((id + j) % 3 == 0);
  return at::isFloatingType(type) ? whole + 0.5 : whole;
}
double w_of(std::int64_t id) { return static_cast<double>(id % 5 * 3); }

/// The type in which a dataset stores the values: JSON has only three.
at::ScalarType stored_type(at::ScalarType type, Layout layout) {
  if (layout != Layout::items && layout != Layout::json_stream) return type;
  return type == at::kBool ? at::kBool : at::isFloatingType(type) ? at::kDouble : at::kLong;
}

std::int64_t values_per_row(const Program& program) {
  std::int64_t count = 1;
  for (const auto size : program.v_shape) count *= size;
  return count;
}

/// The columns of the samples `ids`.
std::vector<Batch::Item> columns_of(const Program& program, const std::vector<std::int64_t>& ids) {
  const auto rows = static_cast<std::int64_t>(ids.size()), values = values_per_row(program);
  const auto id = at::empty({rows}, at::kLong), v = at::empty({rows, values}, at::kDouble),
             w = at::empty({rows}, at::kDouble);
  for (std::int64_t i = 0; i < rows; ++i) {
    id.data_ptr<std::int64_t>()[i] = ids[static_cast<std::size_t>(i)];
    w.data_ptr<double>()[i] = w_of(ids[static_cast<std::size_t>(i)]);
    for (std::int64_t j = 0; j < values; ++j)
      v.data_ptr<double>()[i * values + j] = v_of(ids[static_cast<std::size_t>(i)], j, program.v_type);
  }
  auto shape = program.v_shape;
  shape.insert(shape.begin(), rows);
  return {{"id", id}, {"v", v.to(program.v_type).view(shape)}, {"w", w.to(program.w_type)}};
}

Json json_of(const Program& program, std::int64_t id) {
  std::int64_t next = 0;
  const auto value = [&]() -> Json {
    const auto number = v_of(id, next++, program.v_type);
    if (program.v_type == at::kBool) return number != 0;
    if (!at::isFloatingType(program.v_type)) return static_cast<std::int64_t>(number);
    return number;
  };
  const std::function<Json(std::size_t)> nested = [&](std::size_t depth) -> Json {
    if (depth == program.v_shape.size()) return value();
    auto array = Json::array();
    for (std::int64_t i = 0; i < program.v_shape[depth]; ++i) array.push_back(nested(depth + 1));
    return array;
  };
  return {{"id", id}, {"v", nested(0)}, {"w", static_cast<std::int64_t>(w_of(id))}};
}

std::vector<std::int64_t> from_to(std::int64_t first, std::int64_t end) {
  std::vector<std::int64_t> ids;
  for (auto id = first; id < end; ++id) ids.push_back(id);
  return ids;
}

/// The rows of a stream that a worker reads, in order.
std::vector<std::int64_t> rows_of_worker(const DataPlan& data, int worker, int workers) {
  std::vector<std::int64_t> ids;
  for (std::int64_t id = 0; id < data.rows; ++id) {
    const auto turn = data.dealing == 0   ? id % workers
                      : data.dealing == 1 ? 0
                                          : std::min<std::int64_t>(id * id / 40, workers - 1);
    if (turn == worker) ids.push_back(id);
  }
  return ids;
}

MakeStream stream_of(const Program& program, const DataPlan& data) {
  const bool fails = program.reader_fails && data.name == "train";
  return [&program, data, fails](const StreamShard& shard) -> StreamReader {
    const auto ids = rows_of_worker(data, shard.worker, shard.workers);
    return [&program, shard, ids, json = data.layout == Layout::json_stream, fails, next = std::size_t{0},
            block = std::size_t{1}]() mutable -> std::optional<StreamRows> {
      if (next == ids.size()) return {};
      const auto end = json ? next + 1 : std::min(ids.size(), next + block++ % 4);
      const std::vector<std::int64_t> given(ids.begin() + static_cast<std::ptrdiff_t>(next),
                                            ids.begin() + static_cast<std::ptrdiff_t>(end));
      next = end;
      if (fails && std::ranges::find(given, program.bad) != given.end()) throw Thrown();
      if (json) return json_of(program, given.front());
      return Batch(columns_of(program, given));
    };
  };
}

void write_hdf5(const Program& program, const std::string& path, Layout layout, const std::vector<std::int64_t>& ids) {
  test::H5File file(path, program.seed % 3 == 0 ? 512 : 0);
  file.dataset("unwritten", {ids.size()}, H5T_NATIVE_FLOAT, 0, nullptr);
  for (const auto& [name, tensor] : columns_of(program, ids)) {
    const auto values = tensor.contiguous();
    std::vector<hsize_t> shape;
    for (const auto size : values.sizes()) shape.push_back(static_cast<hsize_t>(size));
    const auto type = detail::hdf5::memory_type_of(values.scalar_type());
    test::Layout how;
    if (layout == Layout::chunked || layout == Layout::compressed) how.chunk = std::min<hsize_t>(shape.front(), 7);
    if (layout == Layout::compressed) how.deflate = 3;
    file.dataset(name, shape, type.get(), type.get(), values.const_data_ptr(), how);
  }
}

/// A dataset of the samples `ids`.
Dataset make_stored(const Program& program, const DataPlan& data, const std::vector<std::int64_t>& ids,
                    const std::filesystem::path& folder, const Communicator& world) {
  switch (data.layout) {
    case Layout::tensors:
      return Dataset::from_tensors(columns_of(program, ids));
    case Layout::items: {
      auto rows = Json::array();
      for (const auto id : ids) rows.push_back(json_of(program, id));
      return Dataset::from_items(rows);
    }
    case Layout::json_stream:
    case Layout::batch_stream:
      return Dataset::from_stream(stream_of(program, data));
    default:
      break;
  }
  const auto rows = static_cast<std::int64_t>(ids.size());
  const auto parts = data.layout == Layout::files ? std::min<std::int64_t>(3, rows) : 1;
  std::vector<std::string> paths;
  // The files differ in length; each has at least one row.
  const auto begin = [&](std::int64_t part) {
    return ids.begin() + static_cast<std::ptrdiff_t>(part + (rows - parts) * part * part / (parts * parts));
  };
  for (std::int64_t part = 0; part < parts; ++part) {
    paths.push_back((folder / (data.name + std::to_string(part) + ".h5")).string());
    if (world.rank() == 0) write_hdf5(program, paths.back(), data.layout, std::vector(begin(part), begin(part + 1)));
  }
  world.barrier();
  return Dataset::from_hdf5(paths, {.cache_bytes = program.seed % 2 == 0 ? 0 : 1 << 20});
}

std::string map_column(std::size_t map) { return "map" + std::to_string(map); }

/// The dataset with function `map`: column map0 is id + 1, and each later one is twice that before plus its number.
Dataset mapped(const Dataset& dataset, std::size_t map, int threads) {
  const auto function = [map](Batch& batch) {
    const auto before = map == 0 ? batch["id"].to(at::kLong) : batch[map_column(map - 1)] * 2;
    batch.set(map_column(map), before + (map == 0 ? 1 : static_cast<std::int64_t>(map)));
  };
  return dataset.map_batches(function, {.threads = threads});
}

Dataset make_dataset(const Program& program, const DataPlan& data, const std::filesystem::path& folder,
                     const Communicator& world) {
  auto ids = from_to(0, data.rows), chosen = ids;
  if (data.subset) {  // of a dataset that has some more samples and is in reverse order
    ids = from_to(0, data.rows + data.rows % 3);
    std::ranges::reverse(ids);
    for (auto& sample : chosen) sample = static_cast<std::int64_t>(ids.size()) - 1 - sample;
  }
  auto dataset = make_stored(program, data, ids, folder, world);
  for (std::size_t map = 0; map <= data.maps.size(); ++map) {
    if (data.subset == map) dataset = dataset.subset(chosen);
    if (map < data.maps.size()) dataset = mapped(dataset, map, data.maps[map]);
  }
  const MapOptions options{.threads = 1 + static_cast<int>(program.seed % 4)};
  if (program.has(Step::map_noise))
    dataset = dataset
                  .map_batches(
                      [](Batch& batch, at::Generator& generator) {
                        batch.set("noise", at::rand({batch["id"].size(0)}, generator, at::kDouble));
                      },
                      options)
                  .transform(random_noise({"noise"}, 0.5));
  if (program.has(Step::map_fail))
    dataset = dataset.map_batches(
        [bad = program.bad](Batch& batch) {
          if ((batch["id"] == bad).any().item<bool>()) throw Thrown();
        },
        options);
  return dataset;
}

// The preprocessors.

class FittedPreprocessor : public Preprocessor {
 public:
  explicit FittedPreprocessor(std::int64_t bad = -1) : bad_(bad) {}
  void fit(const Dataset&, const Communicator&) override {}
  bool fitted() const override { return true; }
  Json state() const override { return nullptr; }
  void load_state(const Json&) override {}

 protected:
  const std::int64_t bad_;
};

class Plus final : public FittedPreprocessor {
  void transform(Batch& batch, at::Generator&) const override { batch.set("plus", batch["id"] * 2 + 1); }
};
class Noise final : public FittedPreprocessor {
  void transform(Batch& batch, at::Generator& generator) const override {
    batch.set("noise", at::rand({batch["id"].size(0)}, generator, at::kDouble));
  }
};
class OldNoise final : public FittedPreprocessor {
  void transform(Batch& batch) const override { batch.set("noise", at::rand({batch["id"].size(0)}, at::kDouble)); }
};
/// Drops the bad sample.
class Drop final : public FittedPreprocessor {
 public:
  using FittedPreprocessor::FittedPreprocessor;

 private:
  void transform(Batch& batch, at::Generator&) const override {
    const auto kept = at::nonzero(batch["id"] != bad_).flatten();
    for (const auto* name : {"id", "v", "w"}) batch.set(name, batch[name].index_select(0, kept));
  }
};
/// Throws at the bad sample.
class Fail final : public FittedPreprocessor {
 public:
  using FittedPreprocessor::FittedPreprocessor;

 private:
  void transform(Batch& batch) const override {
    if ((batch["id"] == bad_).any().item<bool>()) throw Thrown();
  }
};

PreprocessorPtr make_preprocessor(const Program& program) {
  std::vector<PreprocessorPtr> steps;
  for (const auto step : program.steps) {
    if (step == Step::plus) steps.push_back(std::make_shared<Plus>());
    if (step == Step::scale) steps.push_back(standard_scaler({"v"}));
    if (step == Step::min_max) steps.push_back(min_max_scaler({"v"}));
    if (step == Step::one_hot) steps.push_back(one_hot_encoder({"w"}));
    if (step == Step::noise) steps.push_back(std::make_shared<Noise>());
    if (step == Step::old_noise) steps.push_back(std::make_shared<OldNoise>());
    if (step == Step::drop) steps.push_back(std::make_shared<Drop>(program.bad));
    if (step == Step::fail) steps.push_back(std::make_shared<Fail>(program.bad));
  }
  if (steps.empty()) return nullptr;
  return steps.size() == 1 && program.seed % 3 > 0 ? steps.front() : chain(steps);
}

/// The values after fitted preprocessors: (x − shift) / scale for each feature of v, and the classes of w.
struct Fitted {
  explicit Fitted(const Program& program) : features(program.v_shape.empty() ? 1 : program.v_shape.back()) {
    const auto& train = program.datasets.front();
    const auto values = values_per_row(program);
    for (std::int64_t id = 0; id < train.rows; ++id) classes.insert(w_of(id));
    for (std::int64_t f = 0; f < features; ++f) {
      double sum = 0, squares = 0, least = INFINITY, most = -INFINITY, count = 0;
      const auto for_values = [&](auto&& visit) {
        for (std::int64_t id = 0; id < train.rows; ++id)
          for (auto j = f; j < values; j += features) visit(v_of(id, j, program.v_type));
      };
      for_values([&](double x) { sum += x, ++count, least = std::min(least, x), most = std::max(most, x); });
      for_values([&](double x) { squares += (x - sum / count) * (x - sum / count); });
      const auto deviation = std::sqrt(squares / count);
      const bool standard = program.has(Step::scale);
      shift.push_back(standard ? sum / count : least);
      scale.push_back(standard ? (deviation > 1e-9 ? deviation : 1) : most > least ? most - least : INFINITY);
    }
  }
  std::int64_t features;
  std::vector<double> shift, scale;
  std::set<double> classes;
};

// The model of the passes.

struct Share {
  std::int64_t first = 0, count = 0;
};
Share share_of(std::int64_t count, int parts, int part) {
  Share share;
  for (int p = 0; p <= part; ++p) {
    share.first += share.count;
    share.count = count / parts + (p < count % parts ? 1 : 0);
  }
  return share;
}

/// The batches that one pass must give this worker.
struct Expected {
  struct Batch {
    std::int64_t size = 0, global_size = 0;
    double weight = 1;
    std::optional<std::vector<std::int64_t>> ids = {};  ///< set if the order is known
    std::int64_t position = 0;                          ///< position of the pass after this batch
  };
  std::vector<Batch> batches;
};

struct Worker {
  int rank = 0, count = 1;
};

Expected expected(const Program& program, const PassPlan& pass, Worker worker, std::int64_t position) {
  Expected all;
  const auto& data = program.datasets[pass.data];
  const auto total = program.total(worker.count);
  const auto rounded_up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto whole_batch = pass.global ? rounded_up(pass.batch_size, total) : pass.batch_size;
  const auto step = pass.global ? pass.batch_size : pass.batch_size * total;
  if (is_stream(data.layout)) {
    std::vector<std::int64_t> sizes;  // for each step of each worker
    std::vector<std::vector<std::int64_t>> rows;
    for (int w = 0; w < (data.split ? worker.count : 1); ++w)
      rows.push_back(rows_of_worker(data, w, data.split ? worker.count : 1));
    const auto batch_of = [&](int w) { return data.split ? share_of(step, worker.count, w).count : whole_batch; };
    const auto batch_at = [&](int w, std::int64_t s) {
      const auto given = static_cast<std::int64_t>(rows[static_cast<std::size_t>(w)].size());
      const auto left = std::max<std::int64_t>(0, given - s * batch_of(w));
      return left >= batch_of(w) ? batch_of(w) : pass.drop_last ? 0 : left;
    };
    for (std::int64_t s = 0;; ++s) {
      const int mine = data.split ? worker.rank : 0;
      std::int64_t of_all = 0;
      for (int w = 0; w < static_cast<int>(rows.size()); ++w) of_all += batch_at(w, s);
      if (of_all == 0) return all;
      const auto size = batch_at(mine, s);
      const auto& ids = rows[static_cast<std::size_t>(mine)];
      const auto first = ids.begin() + static_cast<std::ptrdiff_t>(std::min<std::int64_t>(
                                           s * batch_of(mine), static_cast<std::int64_t>(ids.size())));
      all.batches.push_back(
          {.size = size,
           .global_size = of_all,
           .weight = data.split ? static_cast<double>(size) * worker.count / static_cast<double>(of_all) : 1,
           .ids = std::vector(first, first + static_cast<std::ptrdiff_t>(size))});
    }
  }
  const bool ordered = !pass.shuffle && !pass.window;
  const auto batch = data.split ? step : whole_batch;
  const int parts = data.split ? total : 1, own = data.split ? total / worker.count : 1;
  while (position < data.rows && (!pass.drop_last || data.rows - position >= batch)) {
    const auto samples = std::min(batch, data.rows - position);
    for (int m = 0; m < own; ++m) {
      const auto mine = share_of(samples, parts, data.split ? worker.rank * own + m : 0);
      Expected::Batch next{
          .size = mine.count,
          .global_size = samples,
          .weight = data.split ? static_cast<double>(mine.count) * parts / static_cast<double>(samples) : 1,
          .position = m + 1 == own ? position + samples : position};
      if (ordered) next.ids = from_to(position + mine.first, position + mine.first + mine.count);
      all.batches.push_back(next);
    }
    position += samples;
  }
  return all;
}

// Playing.

/// Identifies a pass: its epoch, its index in the epoch, and 0 for the pass itself, 1 beside it, 2 inside it.
using Key = std::tuple<std::size_t, std::size_t, int>;

/// What a rank records about one program over all starts.
struct Record {
  std::map<Key, std::int64_t> position;            ///< of passes that continue in the next start
  std::map<Key, std::int64_t> steps;               ///< of the same passes, over all starts
  std::map<Key, std::vector<std::int64_t>> taken;  ///< ids of the samples taken
  std::set<std::string> noise;  ///< the random numbers that each sample got in each pass, with its id
  bool stopped_inside = false;  ///< stopped inside a pass, not at the end of an epoch
};

class Player {
 public:
  Player(Session& session, const Program& program, int start, bool stops, Record& trail, bool aloud)
      : session_(session),
        program_(program),
        fitted_(program),
        worker_{session.world_rank(), session.world_size()},
        start_(start),
        stops_(stops),
        trail_(trail),
        aloud_(aloud) {}

  void run() {
    std::int64_t marker = 0;
    auto state = session_.state({{"marker", marker}});
    play_outside(Outside::before_restore);
    const bool restored = state.restore();
    expect(restored, start_ > 0, "whether it goes on");
    state_ = &state;
    play_outside(Outside::after_restore);
    if (!restored) play_outside(Outside::on_a_fresh_start);
    for (const auto epoch : session_.epochs(static_cast<std::int64_t>(program_.epochs.size()))) {
      epoch_ = static_cast<std::size_t>(epoch);
      const auto& passes = program_.epochs[epoch_];
      for (pass_ = 0; pass_ < passes.size(); ++pass_) {
        tell("epoch " + std::to_string(epoch_) + " pass " + std::to_string(pass_) + " on " +
             std::to_string(worker_.count));
        play(passes[pass_]);
      }
      if (stops_ && epoch_ == program_.stop_epoch) {
        session_.report({}, state);
        throw Thrown();
      }
      session_.report({});
    }
  }

 private:
  void tell(const std::string& text) const {
    if (aloud_ && worker_.rank == 0) std::fprintf(stderr, "  start %d: %s\n", start_, text.c_str());
  }

  /// A pass under way.
  struct Running {
    const PassPlan& plan;
    Key key;
    bool counts;  ///< true if it trains on split data
    Expected expected;
    std::unique_ptr<BatchRange> range = {};
    BatchRange::iterator at = {};
    std::size_t next = 0;  ///< index of the next batch
    std::vector<std::int64_t> whole = {};
  };

  /// Plays a pass that starts from its beginning in every start. Its key is an epoch after the last one.
  void play_outside(Outside when) {
    if (program_.outside != when) return;
    epoch_ = program_.epochs.size();
    pass_ = 0;
    trail_.position.erase({epoch_, pass_, 0});
    trail_.steps.erase({epoch_, pass_, 0});
    tell("outside the loop");
    play(program_.pass_outside);
    trail_.taken.erase({epoch_, pass_, 0});
  }

  bool already_ended(const PassPlan& plan) const {
    return start_ > 0 && trail_.stopped_inside && epoch_ == program_.stop_epoch && pass_ < program_.stop_pass &&
           trains(plan);
  }
  bool trains(const PassPlan& plan) const { return plan.training && program_.datasets[plan.data].split; }

  Running begin(const PassPlan& plan, int which) {
    const auto& data = program_.datasets[plan.data];
    Running running{plan, {epoch_, pass_, which}, trains(plan), {}};
    const auto from = running.counts && !is_stream(data.layout) ? trail_.position[running.key] : 0;
    if (!already_ended(plan)) running.expected = soak::expected(program_, plan, worker_, from);
    BatchOptions options{.shuffle = plan.shuffle,
                         .drop_last = plan.drop_last,
                         .prefetch_batches = plan.prefetch,
                         .local_shuffle_buffer_size = plan.window};
    if (plan.global)
      options.global_batch_size = plan.batch_size;
    else
      options.batch_size = plan.batch_size;
    options.training = plan.training;
    if (plan.convert == 1) options.dtypes = at::kDouble;
    if (plan.convert == 2) options.dtypes = {{"v", at::kFloat}};
    const auto shard = session_.get_dataset_shard(data.name);
    running.range =
        std::make_unique<BatchRange>(plan.as_stored ? shard.iter_batches(options) : shard.iter_torch_batches(options));
    if (!is_stream(data.layout))
      expect(running.range->num_batches(), static_cast<std::int64_t>(running.expected.batches.size()), "num_batches()");
    running.at = running.range->begin();
    return running;
  }

  bool at_end(const Running& running) const { return running.at == running.range->end(); }

  /// Checks that an exception thrown in place of a batch is thrown again at the next attempt.
  static void advance(Running& running) {
    try {
      ++running.at;
    } catch (const Thrown&) {
      try {
        ++running.at;
      } catch (const Thrown&) {
        throw;
      }
      throw Mismatch("a pass that has thrown goes on");
    }
  }

  void take(Running& running) {
    if (running.next == running.expected.batches.size())
      throw Mismatch("there is a batch more than " + std::to_string(running.next));
    const auto& want = running.expected.batches[running.next++];
    auto& batch = *running.at;
    expect(batch.size(), want.size, "the size of batch " + std::to_string(running.next));
    expect(batch.global_size(), want.global_size, "the size of the step of batch " + std::to_string(running.next));
    if (running.counts) expect(batch.weight(), want.weight, "the weight of batch " + std::to_string(running.next));
    expect(batch["id"].size(0), std::max<std::int64_t>(1, want.size),
           "the rows of batch " + std::to_string(running.next));
    const auto ids = batch["id"].to(at::kLong).contiguous();
    std::vector<std::int64_t> taken(ids.const_data_ptr<std::int64_t>(),
                                    ids.const_data_ptr<std::int64_t>() + ids.numel());
    check_values(running.plan, batch, taken);
    taken.resize(static_cast<std::size_t>(want.size));
    if (want.ids && taken != *want.ids) throw Mismatch("other samples come than in order");
    if (running.counts) {
      auto& all = trail_.taken[running.key];
      all.insert(all.end(), taken.begin(), taken.end());
      trail_.position[running.key] = want.position;
      if (session_.is_step_complete()) ++trail_.steps[running.key];
    }
    if (batch.contains("noise") && epoch_ < program_.epochs.size())
      for (std::int64_t i = 0; i < want.size; ++i)
        trail_.noise.insert(Json{std::get<0>(running.key), std::get<1>(running.key), std::get<2>(running.key),
                                 taken[static_cast<std::size_t>(i)], batch["noise"][i].item<double>()}
                                .dump());
    running.whole.insert(running.whole.end(), taken.begin(), taken.end());
  }

  void check_values(const PassPlan& plan, const Batch& batch, const std::vector<std::int64_t>& ids) const {
    const auto& data = program_.datasets[plan.data];
    const auto type_of = [&](const std::string& name, at::ScalarType plain) {
      return plan.convert == 1 ? at::kDouble : plan.convert == 2 && name == "v" ? at::kFloat : plain;
    };
    const auto column = [&](const std::string& name, at::ScalarType plain) {
      const auto& values = batch[name];
      if (values.scalar_type() != type_of(name, plain))
        throw Mismatch("column " + name + " is " + c10::toString(values.scalar_type()) + ", not " +
                       c10::toString(type_of(name, plain)));
      return values.to(at::kDouble).reshape({static_cast<std::int64_t>(ids.size()), -1}).contiguous();
    };
    const auto compare = [&](const at::Tensor& have, std::int64_t row, std::int64_t j, double want, double apart,
                             const char* name) {
      const auto value = have.const_data_ptr<double>()[row * have.size(1) + j];
      if (!(std::abs(value - want) <= apart))
        throw Mismatch(std::string(name) + " of sample " + std::to_string(ids[static_cast<std::size_t>(row)]) + " is " +
                       std::to_string(value) + ", not " + std::to_string(want));
    };
    const bool scaled = program_.has(Step::scale) || program_.has(Step::min_max), coded = program_.has(Step::one_hot);
    const auto stored = stored_type(program_.v_type, data.layout);
    const auto v = column("v", !scaled || at::isFloatingType(stored) ? stored : at::kFloat);
    const auto w = column("w", coded ? at::kFloat : stored_type(program_.w_type, data.layout));
    column("id", at::kLong);
    if (batch.contains("unwritten") && batch["unwritten"].ne(0).any().item<bool>())
      throw Mismatch("a value that was never written is not 0");
    const auto apart = !scaled ? 0 : stored == at::kHalf ? 2e-2 : 1e-4;
    for (std::int64_t row = 0; row < static_cast<std::int64_t>(ids.size()); ++row) {
      const auto id = ids[static_cast<std::size_t>(row)];
      if (id < 0 || id >= data.rows) throw Mismatch("there is no sample " + std::to_string(id));
      for (std::int64_t j = 0; j < v.size(1); ++j) {
        const auto f = static_cast<std::size_t>(j % fitted_.features);
        const auto plain = v_of(id, j, program_.v_type);
        compare(v, row, j, scaled ? (plain - fitted_.shift[f]) / fitted_.scale[f] : plain, apart, "v");
      }
      if (coded) {
        std::int64_t k = 0;
        for (const auto known : fitted_.classes) compare(w, row, k++, known == w_of(id), 0, "w");
        expect(w.size(1), k, "classes");
      } else {
        compare(w, row, 0, w_of(id), 0, "w");
      }
      if (program_.has(Step::plus))
        compare(batch["plus"].to(at::kDouble).view({-1, 1}), row, 0, static_cast<double>(2 * id + 1), 0, "plus");
      auto want = static_cast<double>(id + 1);
      for (std::size_t map = 0; map < data.maps.size(); ++map) {
        if (map > 0) want = 2 * want + static_cast<double>(map);
        compare(batch[map_column(map)].to(at::kDouble).view({-1, 1}), row, 0, want, 0, "map");
      }
    }
  }

  void stop_here(std::size_t batch) {
    if (!stops_ || epoch_ != program_.stop_epoch || pass_ != program_.stop_pass || program_.stop_batch < 0) return;
    // Nothing can be saved between the micro-batches of a step.
    const auto of_step = program_.is_virtual ? static_cast<std::size_t>(virtual_workers / worker_.count) : 1;
    if (batch != (static_cast<std::size_t>(program_.stop_batch) + 1) * of_step) return;
    trail_.stopped_inside = true;
    session_.report({}, *state_);
    if (has_two_training_passes(program_, program_.epochs[epoch_][pass_]))
      throw Mismatch("a State is saved while two training passes over one shard are under way");
    throw Thrown();
  }

  void play(const PassPlan& plan) {
    auto running = begin(plan, 0);
    if (plan.beside) {
      auto other = begin(*plan.beside, 1);
      while (!at_end(running) && !at_end(other)) {
        take(running);
        take(other);
        stop_here(running.next);
        advance(running);
        advance(other);
      }
      return;
    }
    while (!at_end(running)) {
      take(running);
      const bool begins =
          running.counts ? trail_.steps[running.key] == 2 && session_.is_step_complete() : running.next == 1;
      if (plan.inside && begins) {
        const at::NoGradGuard no_grad;
        finish(begin(*plan.inside, 2));
      }
      if (plan.leave_after >= 0 && static_cast<std::int64_t>(running.next) == plan.leave_after) return;
      stop_here(running.next);
      advance(running);
    }
    expect(running.next, running.expected.batches.size(), "the number of batches");
    check_whole(running);
  }

  void finish(Running running) {
    for (; !at_end(running); advance(running)) take(running);
    expect(running.next, running.expected.batches.size(), "the number of batches");
    check_whole(running);
  }

  /// For a pass over data that are not split: checks that each sample comes once.
  void check_whole(Running& running) const {
    const auto& data = program_.datasets[running.plan.data];
    if (data.split) return;
    std::ranges::sort(running.whole);
    if (std::ranges::adjacent_find(running.whole) != running.whole.end()) throw Mismatch("a sample comes twice");
    if (!running.plan.drop_last) expect(static_cast<std::int64_t>(running.whole.size()), data.rows, "the samples");
  }

  Session& session_;
  const Program& program_;
  const Fitted fitted_;
  const Worker worker_;
  const int start_;
  const bool stops_;
  Record& trail_;
  const bool aloud_;
  const State* state_ = nullptr;
  std::size_t epoch_ = 0, pass_ = 0;
};

struct Ending {
  int code = 0;
  std::string error, difference;
};

Ending start(const Program& program, const std::map<std::string, Dataset>& datasets,
             const std::filesystem::path& storage, const std::string& name, int number, bool aloud, Record& trail) {
  std::vector<std::string> split;
  for (const auto& data : program.datasets)
    if (data.split) split.push_back(data.name);
  TorchTrainerOptions options{.dataset_config = {.datasets_to_split = split},
                              .run_config = {.name = name, .checkpoint_config = {.num_to_keep = 1}},
                              .datasets = datasets,
                              .preprocessor = make_preprocessor(program)};
  options.scaling_config.num_workers = number == 0 ? program.workers : program.later;
  if (program.is_virtual) options.scaling_config.virtual_workers = virtual_workers;
  Ending ending;
  std::vector<std::string> flags{"--timeout", "30", "--log-level", aloud ? "error" : "off"};
  if (number > 0) flags.insert(flags.end(), program.later_flags.begin(), program.later_flags.end());
  const auto [code, result] = test::run({storage, flags, options}, [&](Session& session, const Config&) {
    try {
      Player(session, program, number, program.stops && number == 0, trail, aloud).run();
    } catch (const Mismatch& differs) {
      ending.difference = differs.what();
      throw;
    }
  });
  ending.code = code;
  if (result && result->error) ending.error = result->error->what();
  return ending;
}

Key key_of(const Json& entry) {
  return {entry[0].get<std::size_t>(), entry[1].get<std::size_t>(), entry[2].get<int>()};
}

/// Gives all ranks rank 0's positions and step counts. Rank 0 is always a worker.
void share(Record& trail, const Communicator& world) {
  auto json = Json::array();
  for (const auto& [key, position] : trail.position)
    json.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), position, trail.steps[key]});
  json = Json::parse(world.broadcast(Json{json, trail.stopped_inside}.dump()));
  for (const auto& entry : json[0]) trail.position[key_of(entry)] = entry[3], trail.steps[key_of(entry)] = entry[4];
  trail.stopped_inside = json[1];
}

/// True if the pass takes all samples of the first dataset.
bool takes_all(const PassPlan& pass) {
  return pass.data == 0 && pass.leave_after < 0 && !pass.drop_last && !pass.beside;
}

/// Checks over all ranks and starts that a training pass takes no sample twice, and takes all samples if it runs to its
/// end.
void check_coverage(const Program& program, Record& trail, const Communicator& world) {
  auto mine = Json::array();
  for (const auto& [key, ids] : trail.taken)
    mine.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), ids});
  std::map<Key, std::vector<std::int64_t>> all;
  for (const auto& theirs : world.all_gather(mine.dump()))
    for (const auto& entry : Json::parse(theirs)) {
      auto& ids = all[key_of(entry)];
      for (const auto& id : entry[3]) ids.push_back(id);
    }
  for (std::size_t e = 0; e < program.epochs.size(); ++e)
    for (std::size_t p = 0; p < program.epochs[e].size(); ++p) {
      const auto& pass = program.epochs[e][p];
      for (const int which : {0, 1}) {
        const auto* const plan = which == 0 ? &pass : pass.beside.get();
        if (plan == nullptr || !plan->training || !program.datasets[plan->data].split) continue;
        auto ids = all[{e, p, which}];
        const auto where = "epoch " + std::to_string(e) + ", pass " + std::to_string(p) + ": ";
        std::ranges::sort(ids);
        if (std::ranges::adjacent_find(ids) != ids.end()) throw Mismatch(where + "a sample comes twice");
        if (!pass.beside && plan->leave_after < 0 && !plan->drop_last)
          expect(static_cast<std::int64_t>(ids.size()), program.datasets[plan->data].rows, where + "the samples");
      }
    }
}

/// Returns the difference from the model; empty if there is none. Collective.
std::string play(const Program& program, const Communicator& world, const std::filesystem::path& folder, bool aloud) {
  if (aloud && world.rank() == 0) std::fputs(describe(program).c_str(), stderr);
  std::map<std::string, Dataset> datasets;
  for (const auto& data : program.datasets) datasets.emplace(data.name, make_dataset(program, data, folder, world));
  Record trail;
  try {
    for (int number = 0; number < (program.stops ? 2 : 1); ++number) {
      const auto ending = start(program, datasets, folder, "run", number, aloud, trail);
      if (!ending.difference.empty()) throw Mismatch(ending.difference);
      const bool stopped = program.stops && number == 0;
      const bool thrown = ending.code == 1 && ending.error.find("thrown on purpose") != std::string::npos;
      const bool dropped = ending.code == 65 && ending.error.find("rows before it and") != std::string::npos;
      if (stopped && program.stop_batch >= 0 && ending.code == 64 &&
          has_two_training_passes(program, program.epochs[program.stop_epoch][program.stop_pass]) &&
          ending.error.find("are under way at once") != std::string::npos)
        return "";
      bool must_fail = false, fails = false;
      if (program.fails()) {
        fails = program.has(Step::drop) ? dropped : thrown;
        for (const auto& passes : program.epochs) must_fail = must_fail || std::ranges::any_of(passes, takes_all);
      }
      if (ending.code != 0 && !fails && !(stopped && thrown))
        throw Mismatch("start " + std::to_string(number) + " ends with " + std::to_string(ending.code) + ": " +
                       ending.error);
      if (ending.code == 0 && (must_fail || stopped)) throw Mismatch("no error ends it");
      if (program.fails()) return "";
      share(trail, world);
    }
    check_coverage(program, trail, world);
    if (program.is_random()) {
      auto undisturbed = program;
      undisturbed.workers = 1;
      undisturbed.stops = false;
      Record alone;
      const auto ending = start(undisturbed, datasets, folder, "alone", 0, false, alone);
      if (!ending.difference.empty() || ending.code != 0) throw Mismatch("alone: " + ending.difference + ending.error);
      std::set<std::string> noise, want;
      for (const auto& theirs : world.all_gather(Json(trail.noise).dump()))
        for (const auto& each : Json::parse(theirs)) noise.insert(each.get<std::string>());
      for (const auto& each : Json::parse(world.broadcast(Json(alone.noise).dump())))
        want.insert(each.get<std::string>());
      if (noise != want) throw Mismatch("random numbers are not those of one worker that nothing disturbs");
    }
  } catch (const Mismatch& differs) {
    return differs.what();
  }
  return "";
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "data_storm", [](const Communicator& world) {
    return [&world](const soak::Round& round) {
      return soak::play(soak::draw(round.seed, world.size()), world, round.folder, round.aloud);
    };
  });
}
