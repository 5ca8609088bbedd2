// Learning-rate schedulers: what moves as they step. Their settings are the program's; the learning rates themselves
// are the optimizer's.
#include "checkpoint/object.hpp"

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

namespace muster {
namespace {

using detail::checkpoint::Differences;
using detail::checkpoint::ParameterPaths;
using torch::optim::LRScheduler;
using torch::optim::ReduceLROnPlateauScheduler;

/// step_count_ is protected: a class derived from it may name the member.
struct StepCount : LRScheduler {
  static constexpr unsigned LRScheduler::*of = &StepCount::step_count_;
};

// The plateau scheduler's members are private. An explicit instantiation may name them, and a friend function defined
// in the template hands the pointer out.
template <class Tag, auto member>
struct Reveal {
  friend constexpr auto reveal(Tag) { return member; }
};
struct Best {
  friend constexpr auto reveal(Best);
};
struct BadEpochs {
  friend constexpr auto reveal(BadEpochs);
};
struct CooldownCounter {
  friend constexpr auto reveal(CooldownCounter);
};
struct LastEpoch {
  friend constexpr auto reveal(LastEpoch);
};
template struct Reveal<Best, &ReduceLROnPlateauScheduler::best>;
template struct Reveal<BadEpochs, &ReduceLROnPlateauScheduler::num_bad_epochs>;
template struct Reveal<CooldownCounter, &ReduceLROnPlateauScheduler::cooldown_counter>;
template struct Reveal<LastEpoch, &ReduceLROnPlateauScheduler::last_epoch>;

bool holds_integer(const Json& json, const char* key) {
  const auto at = json.find(key);
  return at != json.end() && at->is_number_integer();
}

class SchedulerObject : public StateEntry::Object {
 public:
  explicit SchedulerObject(LRScheduler& scheduler) : scheduler_(&scheduler) {}

  StateDict save(const ParameterPaths&) const override {
    return {.values = {{"step_count", scheduler_->*StepCount::of}}};
  }
  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!saved.values.is_object() || !holds_integer(saved.values, "step_count"))
      differences.push_back({"", "a scheduler here, something else in the checkpoint"});
  }
  void load(const StateDict& saved, const ParameterPaths&) override {
    scheduler_->*StepCount::of = saved.values.at("step_count").get<unsigned>();
  }

  detail::checkpoint::Copies copies() const override { return detail::checkpoint::Copies::averaged; }

 private:
  LRScheduler* scheduler_;
};

class PlateauObject : public StateEntry::Object {
 public:
  explicit PlateauObject(ReduceLROnPlateauScheduler& scheduler) : scheduler_(&scheduler) {}

  StateDict save(const ParameterPaths&) const override {
    return {.values = {{"best", detail::checkpoint::number_to_json(scheduler_->*reveal(Best{}))},
                       {"num_bad_epochs", scheduler_->*reveal(BadEpochs{})},
                       {"cooldown_counter", scheduler_->*reveal(CooldownCounter{})},
                       {"last_epoch", scheduler_->*reveal(LastEpoch{})}}};
  }
  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    const auto& json = saved.values;
    if (!json.is_object() || !json.contains("best") || !detail::checkpoint::number_from_json(json.at("best")) ||
        !holds_integer(json, "num_bad_epochs") || !holds_integer(json, "cooldown_counter") ||
        !holds_integer(json, "last_epoch"))
      differences.push_back({"", "a plateau scheduler here, something else in the checkpoint"});
  }
  void load(const StateDict& saved, const ParameterPaths&) override {
    scheduler_->*reveal(Best{}) = static_cast<float>(*detail::checkpoint::number_from_json(saved.values.at("best")));
    scheduler_->*reveal(BadEpochs{}) = saved.values.at("num_bad_epochs").get<int>();
    scheduler_->*reveal(CooldownCounter{}) = saved.values.at("cooldown_counter").get<int>();
    scheduler_->*reveal(LastEpoch{}) = saved.values.at("last_epoch").get<int>();
  }

  detail::checkpoint::Copies copies() const override { return detail::checkpoint::Copies::averaged; }

 private:
  ReduceLROnPlateauScheduler* scheduler_;
};

}  // namespace

StateEntry::StateEntry(LRScheduler& scheduler) : object_(std::make_shared<SchedulerObject>(scheduler)) {}
StateEntry::StateEntry(ReduceLROnPlateauScheduler& scheduler) : object_(std::make_shared<PlateauObject>(scheduler)) {}

}  // namespace muster
