// The results of an operator's calls, computed in one process with torch's tensors alone: the plain reference of
// operators.cpp. Everything is in double precision.
#pragma once

#include <ATen/ATen.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace muster::soak {

/// The settings that all trainers of a program share.
struct OperatorSettings {
  std::vector<std::int64_t> widths;  ///< of the layers, from the inputs to the output
  std::int64_t samples = 1;          ///< of the training data that setup() registers
  std::int64_t batch = 1, checked = 1, checked_batch = 1;
  bool shuffle = false, adam = false, fuse = false;
  double lr = 0.01, momentum = 0, weight_decay = 0;
  enum class Schedule { none, step, plateau } schedule = Schedule::none;
  enum class Steps { batch, epoch, manual } steps = Steps::manual;
  std::int64_t step_size = 1, patience = 0;
  double gamma = 0.5;

  std::int64_t batches(std::int64_t rows) const { return (rows + batch - 1) / batch; }
  std::int64_t checked_batches() const { return (checked + checked_batch - 1) / checked_batch; }
};

/// An exception thrown inside a call.
struct OperatorFault {
  enum class Place { none, batch, function } place = Place::none;
  std::int64_t batch = 0;
  int rank = -1;  ///< -1: on all workers
};

struct OperatorCall {
  enum class Kind {
    make,
    train,
    validate,
    save,
    load,
    state_dict,
    load_state_dict,
    update_scheduler,
    apply_all_workers,
    apply_all_operators,
    register_data,
    shutdown,
    forced_shutdown,
    destroy
  } kind = Kind::make;
  int trainer = 0;
  std::optional<std::int64_t> num_steps = {};
  int max_retries = 3;
  bool profile = false, reduce = true;
  /// The number of the save or state_dict() call whose state is loaded. -1: none, or a target that must be refused.
  int which = -1;
  double metric = 0;
  std::int64_t samples = 0;  ///< of the data that register_data registers for training
  OperatorFault fault = {};
};

struct OperatorProgram {
  OperatorSettings settings;
  std::vector<OperatorCall> calls;
};

struct OperatorOutcome {
  std::string error = {};  ///< a part of the expected Error message; empty if the call succeeds
  nlohmann::json result = {};
  bool compares_state = false;  ///< true if the trainer can still be used and has this state
  std::vector<at::Tensor> weights = {};
  std::int64_t epochs = 0, global_step = 0, seen = 0;
  double lr = 0;
};

/// The values of a column; the same on every machine.
at::Tensor operator_inputs(std::int64_t rows, std::int64_t columns, std::uint64_t seed);
/// The inputs of training data with that many rows.
at::Tensor operator_train_inputs(const OperatorSettings& settings, std::int64_t rows);
at::Tensor operator_targets(const at::Tensor& inputs);
std::vector<at::Tensor> operator_weights(const OperatorSettings& settings, std::uint64_t seed);
at::Tensor operator_output(const std::vector<at::Tensor>& weights, at::Tensor x);

/// The expected outcome of each call of the program.
std::vector<OperatorOutcome> play(const OperatorProgram& program);

}  // namespace muster::soak
