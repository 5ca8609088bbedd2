// What an operator's calls give, in one process and with torch's tensors alone: the plain reference of operators.cpp.
// Everything in double precision.
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

/// What all trainers of a program have alike.
struct OperatorSettings {
  std::vector<std::int64_t> widths;  ///< of the layers, from the inputs to the output
  std::int64_t samples = 1, batch = 1, checked = 1, checked_batch = 1;
  bool shuffle = false, adam = false, fuse = false;
  double lr = 0.01, momentum = 0, weight_decay = 0;
  enum class Schedule { none, step, plateau } schedule = Schedule::none;
  enum class Steps { batch, epoch, manual } steps = Steps::manual;
  std::int64_t step_size = 1, patience = 0;
  double gamma = 0.5;

  std::int64_t batches() const { return (samples + batch - 1) / batch; }
  std::int64_t checked_batches() const { return (checked + checked_batch - 1) / checked_batch; }
};

/// Something goes wrong in a call.
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
    shutdown,
    forced_shutdown,
    destroy
  } kind = Kind::make;
  int trainer = 0;
  std::optional<std::int64_t> num_steps = {};
  int max_retries = 3;
  bool profile = false, reduce = true;
  /// Which save or state_dict() is meant: the number of that call. -1: none, or what cannot be.
  int which = -1;
  double metric = 0;
  OperatorFault fault = {};
};

struct OperatorProgram {
  OperatorSettings settings;
  std::vector<OperatorCall> calls;
};

struct OperatorOutcome {
  std::string error = {};  ///< a part of what the Error says; empty where the call does well
  nlohmann::json result = {};
  bool compares_state = false;  ///< the trainer lives, and has this state
  std::vector<at::Tensor> weights = {};
  std::int64_t epochs = 0, global_step = 0, seen = 0;
  double lr = 0;
};

/// The values of a column: the same on every machine.
at::Tensor operator_inputs(std::int64_t rows, std::int64_t columns, std::uint64_t seed);
at::Tensor operator_targets(const at::Tensor& inputs);
std::vector<at::Tensor> operator_weights(const OperatorSettings& settings, std::uint64_t seed);
at::Tensor operator_output(const std::vector<at::Tensor>& weights, at::Tensor x);

/// What each call of the program comes to.
std::vector<OperatorOutcome> play(const OperatorProgram& program);

}  // namespace muster::soak
