// Mean, and its entry in a state.
#include "muster/error.hpp"
#include "muster/metrics.hpp"
#include "state/stateful.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <c10/util/StringUtil.h>

namespace muster {
namespace {

using namespace detail::state;

bool holds_mean(const Json& json) {
  double sum = 0;
  return json.is_object() && json.contains("sum") && json.contains("samples") && value_from_json(json.at("sum"), sum) &&
         json.at("samples").is_number_integer() && json.at("samples").get<std::int64_t>() >= 0;
}

class StatefulMean : public Stateful {
 public:
  StatefulMean(double& sum, std::int64_t& samples) : sum_(&sum), samples_(&samples) {}

  StateDict save(const ParameterPaths&) const override { return to_state(*sum_, *samples_); }
  Json quick_values() const override { return to_state(*sum_, *samples_).values; }

  void compare(const StateDict& saved, const ParameterPaths&, Differences& differences) const override {
    if (!saved.tensors.empty() || !holds_mean(saved.values))
      differences.push_back({"", "a mean here, something else in the checkpoint"});
  }

  void load(const StateDict& saved, const ParameterPaths&) override {
    value_from_json(saved.values.at("sum"), *sum_);
    *samples_ = saved.values.at("samples").get<std::int64_t>();
  }

  Replication replication() const override { return Replication::per_rank; }

  std::optional<StateDict> redistribute(const StateDict& all, RankInGroup here) const override {
    double sum = 0, rank_sum = 0;
    std::int64_t samples = 0;
    for (const auto& rank : all.values) {
      if (!holds_mean(rank)) return StateDict{.values = rank};  // compare() reports the difference
      if (here.rank != 0) continue;
      value_from_json(rank.at("sum"), rank_sum);
      sum += rank_sum;
      samples += rank.at("samples").get<std::int64_t>();
    }
    return to_state(sum, samples);
  }

 private:
  static StateDict to_state(double sum, std::int64_t samples) {
    return {.values = {{"sum", value_to_json(sum)}, {"samples", samples}}};
  }

  double* sum_;
  std::int64_t* samples_;
};

}  // namespace

void Mean::add(const at::Tensor& value, std::int64_t samples) {
  if (samples <= 0) return;
  if (!value.defined() || value.numel() != 1 || value.is_complex())
    throw Error(ExitCode::user_error, "adding to a mean",
                !value.defined()     ? "the tensor is undefined"
                : value.numel() != 1 ? c10::str("the tensor has the shape ", value.sizes())
                                     : "the tensor is a complex number",
                "Give one real number, as loss.mean()");
  add(value.item().toDouble(), samples);
}

Mean::operator StateEntry() { return StateEntry(std::make_shared<StatefulMean>(sum_, samples_)); }

}  // namespace muster
