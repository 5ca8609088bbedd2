// A Mean, and as an entry of a state.
#include "checkpoint/object.hpp"
#include "muster/metrics.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>

namespace muster {
namespace {

using detail::checkpoint::Differences;
using detail::checkpoint::ParameterPaths;

bool holds_mean(const Json& json) {
  const auto sum = json.is_object() ? json.find("sum") : json.end();
  const auto samples = json.is_object() ? json.find("samples") : json.end();
  return json.is_object() && sum != json.end() && samples != json.end() && detail::checkpoint::number_from_json(*sum) &&
         samples->is_number_integer() && samples->get<std::int64_t>() >= 0;
}

class MeanObject : public StateEntry::Object {
 public:
  MeanObject(double& sum, std::int64_t& samples) : sum_(&sum), samples_(&samples) {}

  StateDict save(const ParameterPaths&) const override { return to_state(*sum_, *samples_); }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!saved.tensors.empty() || !holds_mean(saved.values))
      differences.push_back({"", "a mean here, something else in the checkpoint"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override {
    *sum_ = *detail::checkpoint::number_from_json(saved.values.at("sum"));
    *samples_ = saved.values.at("samples").get<std::int64_t>();
  }

  detail::checkpoint::Copies copies() const override { return detail::checkpoint::Copies::own; }

  std::optional<StateDict> regroup(const StateDict& all, detail::checkpoint::Part here) const override {
    double sum = 0;
    std::int64_t samples = 0;
    for (const auto& rank : all.values) {
      if (!holds_mean(rank)) return StateDict{.values = rank};  // compare() says so
      if (here.index != 0) continue;
      sum += *detail::checkpoint::number_from_json(rank.at("sum"));
      samples += rank.at("samples").get<std::int64_t>();
    }
    return to_state(sum, samples);
  }

 private:
  static StateDict to_state(double sum, std::int64_t samples) {
    return {.values = {{"sum", detail::checkpoint::number_to_json(sum)}, {"samples", samples}}};
  }

  double* sum_;
  std::int64_t* samples_;
};

}  // namespace

void Mean::add(const at::Tensor& value, std::int64_t samples) {
  if (samples > 0) add(value.item().toDouble(), samples);
}

Mean::operator StateEntry() { return StateEntry(std::make_shared<MeanObject>(sum_, samples_)); }

}  // namespace muster
