#include "data/preprocess/column_preprocessor.hpp"

#include "data/passes/samples.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>

namespace muster {
namespace detail::data {
namespace {

/// Calls `each` with the batches of this rank's share, in order.
void for_each_batch(Source& source, const Range& share, const std::function<void(const Batch&)>& each) {
  constexpr std::int64_t rows = 256;
  std::vector<std::int64_t> samples;
  for (std::int64_t first = share.first; first < share.first + share.count; first += rows) {
    samples.resize(static_cast<std::size_t>(std::min(rows, share.first + share.count - first)));
    std::iota(samples.begin(), samples.end(), first);
    each(source.read(samples));
  }
}

struct Header {
  std::int64_t rows, dtype;
};

/// The tables of the ranks that have one (two dimensions, maybe of different sizes), in the order of ranks. Collective.
std::vector<at::Tensor> gather(const Communicator& communicator, const at::Tensor& mine) {
  std::string bytes;
  if (mine.defined()) {
    const auto table = mine.contiguous();
    const Header header{table.size(0), static_cast<std::int64_t>(table.scalar_type())};
    bytes.append(reinterpret_cast<const char*>(&header), sizeof header);
    bytes.append(static_cast<const char*>(table.const_data_ptr()), table.nbytes());
  }
  std::vector<at::Tensor> tables;
  for (const auto& theirs : communicator.all_gather(bytes)) {
    if (theirs.empty()) continue;
    Header header{};
    std::memcpy(&header, theirs.data(), sizeof header);
    const auto dtype = static_cast<at::ScalarType>(header.dtype);
    const auto values = static_cast<std::int64_t>((theirs.size() - sizeof header) / c10::elementSize(dtype));
    tables.push_back(at::empty({header.rows, values / header.rows}, dtype));
    std::memcpy(tables.back().mutable_data_ptr(), theirs.data() + sizeof header, theirs.size() - sizeof header);
  }
  return tables;
}

}  // namespace

ColumnPreprocessor::ColumnPreprocessor(std::string kind, std::vector<std::string> columns)
    : kind_(std::move(kind)), columns_(std::move(columns)) {
  if (columns_.empty()) throw Error(ExitCode::usage, "making a " + kind_, "it has no columns", "Name at least one");
}

void ColumnPreprocessor::fit(const Dataset& dataset, const Communicator& communicator) {
  auto& source = *dataset.source();
  std::map<std::string, std::int64_t> features;
  for (const auto& name : columns_) {
    const auto doing = "fitting " + kind_ + " on column \"" + name + "\"";
    const auto& column = column_of(source, name, doing);
    if (const auto why = objection(column.dtype); !why.empty())
      throw Error(ExitCode::data, doing, why, "Choose another column or convert it");
    features[name] = column.shape.empty() ? 1 : column.shape.back();
  }
  std::map<std::string, at::Tensor> mine, learned;
  const auto add = [this](at::Tensor& sum, const at::Tensor& table) { sum = sum.defined() ? join(sum, table) : table; };
  for_each_batch(source, share_of(source.count(), communicator.size(), communicator.rank()), [&](const Batch& batch) {
    for (const auto& name : columns_) add(mine[name], summary(batch[name].reshape({-1, features[name]})));
  });
  for (const auto& name : columns_) {
    at::Tensor all;
    for (const auto& table : gather(communicator, mine[name])) add(all, table);
    learned[name] = learn(all, "fitting " + kind_ + " on column \"" + name + "\"");
  }
  learned_ = std::move(learned);
}

void ColumnPreprocessor::transform(Batch& batch) const {
  for (const auto& name : columns_) {
    const auto doing = "applying " + kind_ + " to column \"" + name + "\"";
    const auto learned = learned_.find(name);
    if (learned == learned_.end()) throw Error(ExitCode::usage, doing, "it has not been fitted", "Call fit first");
    batch.set(name, apply(batch[name], learned->second, doing));
  }
}

Json ColumnPreprocessor::state() const {
  Json columns = Json::object();
  for (const auto& [name, learned] : learned_) columns[name] = to_json(learned);
  return {{"kind", kind_}, {"columns", columns}};
}

void ColumnPreprocessor::load_state(const Json& state) {
  require_kind(state, kind_);
  std::map<std::string, at::Tensor> learned;
  for (const auto& name : columns_) {
    try {
      learned[name] = from_json(state.at("columns").at(name));
    } catch (const Json::exception& error) {
      throw Error(ExitCode::data, "restoring " + kind_ + " of column \"" + name + "\"", error.what(),
                  "Build the same preprocessor as the run that was saved");
    }
  }
  learned_ = std::move(learned);
}

void require_kind(const Json& state, const std::string& kind) {
  const auto saved = state.is_object() ? state.value("kind", std::string("nothing")) : "nothing";
  if (saved != kind)
    throw Error(ExitCode::data, "restoring a preprocessor", "a " + kind + " was asked for and " + saved + " was saved",
                "Build the same preprocessor as the run that was saved");
}

}  // namespace detail::data

namespace {

class Chain final : public Preprocessor {
 public:
  explicit Chain(std::vector<PreprocessorPtr> steps) : steps_(std::move(steps)) {}

  void fit(const Dataset& dataset, const Communicator& communicator) override {
    // On all ranks, or it is none: where an exception came in between, some have fitted and others not.
    std::vector<std::int64_t> ranks;
    for (const auto& step : steps_) ranks.push_back(step->fitted());
    communicator.all_reduce(std::span(ranks));
    const auto everywhere = [&](std::int64_t count) { return count == communicator.size(); };
    const bool again = std::all_of(ranks.begin(), ranks.end(), everywhere);
    auto seen = dataset;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (again || !everywhere(ranks[i])) steps_[i]->fit(seen, communicator);
      seen = seen.transform(steps_[i]);
    }
  }

  bool fitted() const override {
    return std::all_of(steps_.begin(), steps_.end(), [](const PreprocessorPtr& step) { return step->fitted(); });
  }

  void transform(Batch& batch) const override {
    for (const auto& step : steps_) step->transform(batch);
  }

  Json state() const override {
    Json states = Json::array();
    for (const auto& step : steps_) states.push_back(step->state());
    return {{"kind", "chain"}, {"steps", states}};
  }

  void load_state(const Json& state) override {
    detail::data::require_kind(state, "chain");
    const auto steps = state.value("steps", Json::array());
    if (steps.size() != steps_.size())
      throw Error(ExitCode::data, "restoring a chain of preprocessors",
                  "it has " + std::to_string(steps_.size()) + " steps, " + std::to_string(steps.size()) + " were saved",
                  "Build the same preprocessor as the run that was saved");
    for (std::size_t i = 0; i < steps_.size(); ++i) steps_[i]->load_state(steps[i]);
  }

 private:
  std::vector<PreprocessorPtr> steps_;
};

}  // namespace

PreprocessorPtr chain(std::vector<PreprocessorPtr> steps) { return std::make_shared<Chain>(std::move(steps)); }

}  // namespace muster
