// muster predict: applies a program of torch.export to a dataset, in this process or on ranks that it starts.
#include "base/text.hpp"
#include "checkpoint_text.hpp"
#include "commands.hpp"

#include <muster/checkpoint.hpp>
#include <muster/dataset.hpp>
#include <muster/error.hpp>
#include <muster/exported.hpp>
#include <muster/launch.hpp>
#include <muster/predictor.hpp>
#include <muster/supervise.hpp>

#include <algorithm>
#include <array>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace muster::tool {
namespace {

struct PredictArguments {
  std::string program, checkpoint, data, out;
  int ranks = 0;  ///< 0 if this process is a rank already, or the only one
  bool use_gpu = false;
  BatchPredictorOptions options;
};

const std::string predicting = "predicting";

/// Adds what the model returns as columns: a dict's tensors by their keys, a tuple's or a list's tensors as NAME_0, …
/// What is nested in one of them has the outer name in front. `is_root`: `value` is the whole result.
void add_columns(const std::string& name, bool is_root, const c10::IValue& value,
                 std::map<std::string, at::Tensor>& columns) {
  const auto inside = [&](const std::string& part) { return is_root ? part : name + "_" + part; };
  if (value.isTensor()) {
    columns[name] = value.toTensor();
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict())
      add_columns(inside(item.key().isString() ? item.key().toStringRef() : std::to_string(item.key().toInt())), false,
                  item.value(), columns);
  } else if (value.isTuple() || value.isList()) {
    const auto parts = value.isTuple() ? value.toTupleRef().elements().vec() : value.toListRef().vec();
    for (std::size_t i = 0; i < parts.size(); ++i) add_columns(detail::str(name, "_", i), false, parts[i], columns);
  } else if (!value.isNone()) {
    throw Error(ExitCode::usage, predicting, "the program's \"" + name + "\" is no tensor", "Have it return tensors");
  }
}

/// Returns the tensors for the program's inputs, by name. A single column is used for a single input, whatever their
/// names. Throws an Error if an input has no column.
std::map<std::string, c10::IValue> inputs_of(const Batch& batch, const std::vector<std::string>& names) {
  if (names.size() == 1 && batch.num_columns() == 1) return {{names.front(), batch.begin()->second}};
  std::map<std::string, c10::IValue> inputs;
  for (const auto& name : names) {
    if (!batch.contains(name)) {
      std::string columns, wanted;
      for (const auto& [column, tensor] : batch) columns += (columns.empty() ? "" : ", ") + column;
      for (const auto& input : names) wanted += (wanted.empty() ? "" : ", ") + input;
      throw Error(ExitCode::data, predicting, "the program takes " + wanted + ", and the data has " + columns,
                  "Give the data's columns the names of the program's inputs");
    }
    inputs.emplace(name, batch[name]);
  }
  return inputs;
}

TorchPredictor make_predictor(ExportedModule net, const PredictArguments& arguments, const Schema& schema) {
  const auto names = net->input_names();
  PredictorOptions options{.use_gpu = arguments.use_gpu};
  // If all inputs are columns, other columns are left out. If not, a preprocessor may make the inputs from columns with
  // other names.
  const auto is_column = [&](const auto& name) {
    return std::ranges::find(schema, name, &Column::name) != schema.end();
  };
  if (std::ranges::all_of(names, is_column)) options.feature_columns = names;
  const auto predict = [net, names](Batch& batch) mutable -> Prediction {
    if (batch.num_columns() > 0) net->to(batch.begin()->second.device());
    std::map<std::string, at::Tensor> columns;
    add_columns("predictions", true, net->call({}, inputs_of(batch, names)), columns);
    return columns;
  };
  if (!arguments.checkpoint.empty())
    return TorchPredictor::from_checkpoint(Checkpoint::from_directory(arguments.checkpoint), net, predict, options);
  net->eval();
  return TorchPredictor(predict, options);
}

/// Predicts as one of the ranks of a launcher, or as the only rank.
int predict_as_rank(const PredictArguments& arguments) {
  std::array<std::string, 5> words{"muster", "--progress", "none", "--log-level", "warn"};
  std::array<char*, words.size() + 1> argv{};
  std::ranges::transform(words, argv.begin(), [](auto& word) { return word.data(); });
  Launch launch(static_cast<int>(words.size()), argv.data());
  return launch.run([&] {
    const auto net = load_exported(arguments.program);
    const Dataset data(arguments.data);
    BatchPredictor(make_predictor(net, arguments, data.schema()))
        .predict(launch, data, arguments.out, arguments.options);
  });
}

/// Starts this program again on several ranks.
int predict_on_ranks(const PredictArguments& arguments) {
  std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe"), "predict"};
  if (!arguments.checkpoint.empty()) command.insert(command.end(), {"--checkpoint", arguments.checkpoint});
  command.insert(command.end(), {"--batch-size", std::to_string(arguments.options.batch_size)});
  for (const auto& column : arguments.options.keep_columns) command.insert(command.end(), {"--keep", column});
  if (arguments.use_gpu) command.emplace_back("--use-gpu");
  command.insert(command.end(), {"--", arguments.program, arguments.data, arguments.out});
  return supervise({.command = std::move(command), .ranks = arguments.ranks, .max_failures = 0});
}

}  // namespace

void add_predict(CLI::App& app) {
  const auto arguments = std::make_shared<PredictArguments>();
  auto* command = app.add_subcommand("predict", "Apply a model from Python to a dataset");
  command->add_option("program", arguments->program, "A file of torch.export.save")->option_text("NET.pt2")->required();
  command->add_option("data", arguments->data, "The dataset, FILE.h5[:/group]")->option_text("DATA.h5")->required();
  command->add_option("out", arguments->out, "The file to make")->option_text("OUT.h5")->required();
  command
      ->add_option("--checkpoint", arguments->checkpoint,
                   "Use the weights and the preprocessor of a checkpoint's folder")
      ->option_text("CHECKPOINT");
  command->add_option("-n,--ranks", arguments->ranks, "Ranks to start [this process alone]")
      ->transform(whole_number(1, std::numeric_limits<int>::max()))
      ->option_text("N");
  command->add_option("--batch-size", arguments->options.batch_size, "Rows of a batch; 256 unless given")
      ->transform(whole_number(1))
      ->option_text("B");
  command->add_option("--keep", arguments->options.keep_columns, "A column to copy; may be given again")
      ->allow_extra_args(false)
      ->option_text("COLUMN");
  command->add_flag("--use-gpu", arguments->use_gpu, "Compute on each rank's GPU");
  command->footer(
      "Columns go to the inputs of the same name; a single input takes a single column\n"
      "of any name. A tensor becomes the column predictions, a tuple predictions_0 and\n"
      "so on, a dict columns of its keys.\n\n"
      "Example:\n  muster predict net.pt2 --checkpoint runs/demo/checkpoint_000003 test.h5 out.h5");
  command->callback([arguments] {
    require_outside_records(arguments->out);
    if (const int code = arguments->ranks > 0 ? predict_on_ranks(*arguments) : predict_as_rank(*arguments); code != 0)
      throw CLI::RuntimeError(code);
  });
}

}  // namespace muster::tool
