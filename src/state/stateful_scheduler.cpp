// Learning-rate schedulers. Only the values that change with steps are saved. The program sets the options again, and
// the optimizer saves the learning rates.
#include "optim/step_count.hpp"
#include "state/stateful.hpp"

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>

#include <tuple>

namespace muster {
namespace {

using namespace detail::state;

using torch::optim::LRScheduler;
using torch::optim::ReduceLROnPlateauScheduler;

// The plateau scheduler's members are private. An explicit template instantiation may name private members, and its
// friend function returns them.
constexpr auto plateau_members();
template <auto... members>
struct Reveal {
  friend constexpr auto plateau_members() { return std::tuple(members...); }
};
template struct Reveal<&ReduceLROnPlateauScheduler::best, &ReduceLROnPlateauScheduler::num_bad_epochs,
                       &ReduceLROnPlateauScheduler::cooldown_counter, &ReduceLROnPlateauScheduler::last_epoch>;

void visit_fields(LRScheduler& scheduler, auto&& field) {
  field("step_count", scheduler.*detail::optim::StepCount::of);
}
void visit_fields(ReduceLROnPlateauScheduler& scheduler, auto&& field) {
  const auto [best, num_bad_epochs, cooldown_counter, last_epoch] = plateau_members();
  field("best", scheduler.*best);
  field("num_bad_epochs", scheduler.*num_bad_epochs);
  field("cooldown_counter", scheduler.*cooldown_counter);
  field("last_epoch", scheduler.*last_epoch);
}

template <class Scheduler>
class StatefulScheduler : public Stateful {
 public:
  StatefulScheduler(Scheduler& scheduler, const char* kind) : scheduler_(&scheduler), kind_(kind) {}

  StateDict save(const ParameterPaths&) const override { return {.values = quick_values()}; }
  Json quick_values() const override {
    auto values = Json::object();
    visit_fields(*scheduler_, [&](const char* name, const auto& value) { values[name] = value_to_json(value); });
    return values;
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

  std::function<void()> keep_schedule() override {
    return [this, before = save({})] { load(before, {}); };
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
