// Averages of weights. Their state has the names of the module's parameters and buffers, so it can be loaded into a
// module.
#include "muster/ema.hpp"
#include "muster/error.hpp"
#include "optim/weight_averages.hpp"
#include "state/copy.hpp"
#include "state/stateful.hpp"

namespace muster {
namespace {

using namespace detail::state;

class StatefulAverage : public Stateful {
 public:
  explicit StatefulAverage(std::shared_ptr<detail::optim::WeightAverages> averages) : averages_(std::move(averages)) {}

  StateDict save(const ParameterPaths&) const override {
    if (averages_->is_applied())
      throw Error(ExitCode::user_error, "saving an average of weights",
                  "averages are in the model, in place of the model's own weights",
                  "End the scope of EMA::apply() before the report");
    return {.tensors = tensors(), .values = quick_values()};
  }
  Json quick_values() const override { return {{"updates", averages_->updates()}}; }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (averages_->is_applied()) differences.push_back({"", "a scope of EMA::apply() is alive"});
    std::int64_t updates = -1;
    if (saved.values.is_object() && saved.values.contains("updates"))
      value_from_json(saved.values.at("updates"), updates);
    if (updates < 0) differences.push_back({"", "an average of weights here, something else in the checkpoint"});
    const auto here = tensors();
    for (const auto& [path, tensor] : here) {
      const auto at = saved.tensors.find(path);
      if (at == saved.tensors.end())
        differences.push_back({path, "not in the checkpoint"});
      else
        compare_tensor(path, at->second, tensor.sizes(), tensor.scalar_type(), differences);
    }
    for (const auto& [path, tensor] : saved.tensors)
      if (!here.contains(path)) differences.push_back({path, "in the checkpoint, not here"});
  }

  /// Loads the averages only. The module's own entry loads the buffers.
  void load(const StateDict& saved, const ParameterPaths&) override {
    for (const auto& [path, tensor] : averages_->averages()) copy_values(tensor, saved.tensors.at(path));
    averages_->set_updates(saved.values.at("updates"));
  }

  Replication replication() const override { return Replication::averaged; }

 private:
  std::map<std::string, at::Tensor> tensors() const {
    auto all = averages_->averages();
    all.merge(averages_->buffers());
    return all;
  }

  std::shared_ptr<detail::optim::WeightAverages> averages_;
};

}  // namespace

EMA::operator StateEntry() const { return StateEntry(std::make_shared<StatefulAverage>(averages_)); }

}  // namespace muster
