// The cases of `muster bench step`.
#pragma once

#include <muster/error.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace muster::bench {

struct StepCase {
  const char* name;
  const char* model;
  std::int64_t batch_size;  ///< per rank
};

inline constexpr std::array<StepCase, 6> step_cases{{{"mlp batch 64", "mlp", 64},
                                                     {"mlp50 batch 16", "mlp50", 16},
                                                     {"mlp50 batch 64", "mlp50", 64},
                                                     {"mlp50 batch 256", "mlp50", 256},
                                                     {"cnn", "cnn", 64},
                                                     {"resnet18", "resnet18", 64}}};

/// The cases for a program with a loop of its own, with a plain optimizer or a prepared one. The program has the model
/// and the batch size of own_loop_base_case, one of step_cases.
inline constexpr const char* own_loop_case = "own loop";
inline constexpr const char* own_loop_prepared_case = "own loop prepared";
inline constexpr const char* own_loop_base_case = "mlp50 batch 64";

/// Number of steps before the timed ones: in these, memory is allocated and the order of buckets becomes final.
inline constexpr int warm_up_steps = 5;

/// Returns the case with this name; null if there is none.
inline const StepCase* find_step_case(const std::string& name) {
  for (const auto& entry : step_cases)
    if (entry.name == name) return &entry;
  return nullptr;
}

inline const StepCase& step_case(const std::string& name) {
  if (const auto* found = find_step_case(name)) return *found;
  throw Error(ExitCode::usage, "choosing a case of step", "there is no \"" + name + "\"");
}

}  // namespace muster::bench
