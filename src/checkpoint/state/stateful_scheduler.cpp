// Learning-rate schedulers: what moves as they step. Their settings are the program's; the learning rates themselves
// are the optimizer's.
#include "checkpoint/state/json_value.hpp"
#include "checkpoint/state/stateful.hpp"

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

namespace muster {
namespace {

using namespace detail::checkpoint;

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

void visit_fields(LRScheduler& scheduler, auto&& field) { field("step_count", scheduler.*StepCount::of); }
void visit_fields(ReduceLROnPlateauScheduler& scheduler, auto&& field) {
  field("best", scheduler.*reveal(Best{}));
  field("num_bad_epochs", scheduler.*reveal(BadEpochs{}));
  field("cooldown_counter", scheduler.*reveal(CooldownCounter{}));
  field("last_epoch", scheduler.*reveal(LastEpoch{}));
}

template <class Scheduler>
class StatefulScheduler : public Stateful {
 public:
  StatefulScheduler(Scheduler& scheduler, const char* kind) : scheduler_(&scheduler), kind_(kind) {}

  StateDict save(const ParameterPaths&) const override {
    StateDict out;
    visit_fields(*scheduler_, [&](const char* name, const auto& value) { out.values[name] = value_to_json(value); });
    return out;
  }
  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    bool fits = saved.values.is_object();
    visit_fields(*scheduler_, [&](const char* name, auto unused) {
      fits = fits && saved.values.contains(name) && value_from_json(saved.values.at(name), unused);
    });
    if (!fits) differences.push_back({"", std::string(kind_) + " here, something else in the checkpoint"});
  }
  void load(const StateDict& saved, const ParameterPaths&) override {
    visit_fields(*scheduler_, [&](const char* name, auto& value) { value_from_json(saved.values.at(name), value); });
  }

  Replication replication() const override { return Replication::averaged; }

 private:
  Scheduler* scheduler_;
  const char* kind_;
};

}  // namespace

StateEntry::StateEntry(LRScheduler& scheduler)
    : object_(std::make_shared<StatefulScheduler<LRScheduler>>(scheduler, "a scheduler")) {}
StateEntry::StateEntry(ReduceLROnPlateauScheduler& scheduler)
    : object_(std::make_shared<StatefulScheduler<ReduceLROnPlateauScheduler>>(scheduler, "a plateau scheduler")) {}

}  // namespace muster
