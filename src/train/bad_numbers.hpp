// What a run does about gradients with NaN or infinite numbers: FailureConfig::bad_numbers.
#pragma once

#include "muster/communicator.hpp"
#include "muster/config.hpp"
#include "optim/number_watch.hpp"
#include "step/steps.hpp"

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace muster::detail::gradients {
class DataParallel;
}

namespace muster::detail::train {

/// What was bad, over all attempts of a job.
struct BadSteps {
  /// A step of an optimizer by its place in the run, where training that goes back comes again: by the global step, and
  /// the steps of the optimizer that there have been in it since training began or the last checkpoint.
  struct Place {
    std::int64_t global_step = 0;
    int optimizer = 0;
    std::int64_t call = 0;
    auto operator<=>(const Place&) const = default;
  };
  std::set<Place> left_out = {};
  int gone_back = 0;  ///< times since the last checkpoint

  /// An attempt has ended: whether it goes back for a step, `here` as this rank knows, which may have heard of the end
  /// before it knew why. Collective over the launch.
  bool go_back(const Communicator& world, const std::optional<Place>& here);
};

/// For one attempt on one worker.
class BadNumbersWatch final : public optim::NumberWatch {
 public:
  /// `control` for reports and checkpoints; `record` over all attempts.
  BadNumbersWatch(const FailureConfig& config, Communicator control, std::shared_ptr<const step::Steps> steps,
                  BadSteps& record);

  bool ends_training() const noexcept override { return policy_ != BadNumbers::skip; }
  bool begin_step(int optimizer) override;
  bool any_rank(bool bad) const override;
  void bad(int optimizer, const std::string& where, const std::string& own, bool together) override;
  void good(int optimizer) override { in_a_row_[optimizer] = 0; }

  /// An optimizer has been prepared; gives its number.
  int watch(const torch::optim::Optimizer& optimizer);
  /// An Error where one of the models has been trained and no prepared optimizer steps it.
  void require_watched(const std::vector<std::shared_ptr<gradients::DataParallel>>& models);
  /// A checkpoint has been made: nothing goes back to before it.
  void saved();
  /// Says, on the first worker, how many steps were left out since the last time.
  void warn();
  /// The step for which the attempt ends, to begin again from the newest checkpoint.
  const std::optional<BadSteps::Place>& goes_back() const noexcept { return goes_back_; }

 private:
  BadNumbers policy_;
  int limit_;
  Communicator control_;
  std::shared_ptr<const step::Steps> steps_;
  BadSteps& record_;
  BadSteps::Place now_;
  std::int64_t global_step_ = -1;
  std::map<int, std::int64_t> calls_;  ///< by optimizer, in this global step
  std::map<int, int> in_a_row_;        ///< steps left out, by optimizer
  int left_out_ = 0;                   ///< since the last warning
  std::string last_;
  std::optional<BadSteps::Place> goes_back_;
  int optimizers_ = 0;
  std::set<const void*> watched_;  ///< parameters
  std::size_t required_ = 0;       ///< models of which that is known
};

}  // namespace muster::detail::train
