// metrics_peer IN.json OUT.json
//
// Of each case of metrics.py, what the metrics of samples say.
#include "muster/metrics.hpp"
#include "muster/classification.hpp"

#include <ATen/ATen.h>

#include <fstream>
#include <vector>

namespace {

using muster::Average;
using muster::Json;

at::Tensor numbers(const Json& json) { return at::tensor(json.get<std::vector<double>>(), at::kDouble); }

Json of(const Json& json) {
  const auto classes = json.at("classes").get<std::int64_t>();
  const auto target = numbers(json.at("target")).to(at::kLong), weight = numbers(json.at("weight"));
  const auto logits = numbers(json.at("logits")).view({-1, classes});
  Json all;
  const auto say = [&](const char* name, auto metric, const at::Tensor& prediction, const at::Tensor& right) {
    metric.add(prediction, right, {}, weight);
    all[name] = muster::Metric(metric).value();
  };
  say("accuracy", muster::Accuracy(), logits, target);
  say("top2", muster::Accuracy({.top_k = 2}), logits, target);
  say("f1_macro", muster::F1({classes, Average::macro}), logits, target);
  say("f1_micro", muster::F1({classes, Average::micro}), logits, target);
  say("f1_each", muster::F1({classes, Average::none}), logits, target);
  say("matrix", muster::ConfusionMatrix({classes}), logits, target);
  say("iou", muster::MeanIoU({classes}), logits, target);
  say("auc", muster::AUC(), logits.select(1, 1), target.eq(1));
  say("perplexity", muster::Perplexity(), logits, target);
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  auto all = Json::array();
  for (const auto& one : Json::parse(std::ifstream(argv[1]))) all.push_back(of(one));
  std::ofstream(argv[2]) << all;
}
