#include "data/preprocess/column_preprocessor.hpp"

#include "data/passes/samples.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>

namespace muster {
namespace detail::data {
namespace {

constexpr const char* build_the_same = "Build the same preprocessor as the run that was saved";

/// An Error if the state is that of another kind of preprocessor.
void require_kind(const Json& state, const std::string& kind) {
  const auto saved = state.is_object() ? state.value("kind", std::string("nothing")) : "nothing";
  if (saved != kind)
    throw Error(ExitCode::data, "restoring a preprocessor", "a " + kind + " was asked for and " + saved + " was saved",
                build_the_same);
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
  constexpr std::int64_t rows = 256;
  auto& source = *dataset.source();
  const auto doing = [this](const std::string& name) { return "fitting " + kind_ + " on column \"" + name + "\""; };
  for (const auto& name : columns_)
    if (const auto why = objection(column_of(source, name, doing(name)).dtype); !why.empty())
      throw Error(ExitCode::data, doing(name), why, "Choose another column or convert it");

  std::map<std::string, at::Tensor> mine, learned;
  const auto add = [this](at::Tensor& sum, const at::Tensor& table) { sum = sum.defined() ? join(sum, table) : table; };
  const auto share = share_of(source.count(), communicator.size(), communicator.rank());
  for (auto first = share.first, end = first + share.count; first < end; first += rows) {
    std::vector<std::int64_t> samples(static_cast<std::size_t>(std::min(rows, end - first)));
    std::iota(samples.begin(), samples.end(), first);
    const Batch batch = source.read(samples);
    for (const auto& name : columns_) {
      const auto& values = batch[name];
      add(mine[name], summary(values.reshape({-1, values.dim() > 1 ? values.size(-1) : 1})));
    }
  }
  for (const auto& name : columns_) {
    at::Tensor all;
    for (const auto& table : gather(communicator, mine[name])) add(all, table);
    learned[name] = learn(all, doing(name));
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
      throw Error(ExitCode::data, "restoring " + kind_ + " of column \"" + name + "\"", error.what(), build_the_same);
    }
  }
  learned_ = std::move(learned);
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
    const bool again = std::ranges::all_of(ranks, everywhere);
    auto seen = dataset;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (again || !everywhere(ranks[i])) steps_[i]->fit(seen, communicator);
      seen = seen.transform(steps_[i]);
    }
  }

  bool fitted() const override { return std::ranges::all_of(steps_, &Preprocessor::fitted); }

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
                  detail::data::build_the_same);
    for (std::size_t i = 0; i < steps_.size(); ++i) steps_[i]->load_state(steps[i]);
  }

 private:
  std::vector<PreprocessorPtr> steps_;
};

}  // namespace

PreprocessorPtr chain(std::vector<PreprocessorPtr> steps) { return std::make_shared<Chain>(std::move(steps)); }

}  // namespace muster
