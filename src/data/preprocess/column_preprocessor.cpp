#include "data/preprocess/column_preprocessor.hpp"

#include "base/text.hpp"
#include "data/preprocess/apply.hpp"
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

/// Throws an Error if `state` belongs to another kind of preprocessor.
void require_kind(const Json& state, const std::string& kind) {
  const auto saved = state.is_object() ? state.value("kind", std::string("nothing")) : "nothing";
  if (saved != kind)
    throw Error(ExitCode::data, "restoring a preprocessor", "a " + kind + " was asked for, but " + saved + " was saved",
                build_the_same);
}

/// The summary of the blocks [first, first + count). `count` is a power of two, `first` a multiple of it.
struct Part {
  std::int64_t first = 0, count = 0;
  at::Tensor summary = {};
};

/// Joins the summaries of consecutive blocks in pairs, pairs of pairs, and so on. The pairs depend only on the numbers
/// of the blocks.
class PairwiseJoin {
 public:
  /// `part` must begin where the part added before it ended.
  template <class Join>
  void add(Part part, const Join& join) {
    for (; !parts_.empty(); parts_.pop_back()) {
      auto& left = parts_.back();
      if (left.count != part.count || left.first % (2 * left.count) != 0) break;
      part = {left.first, 2 * left.count, join(left.summary, part.summary)};
    }
    parts_.push_back(std::move(part));
  }
  /// The parts that could not be joined yet, in order.
  const std::vector<Part>& parts() const noexcept { return parts_; }
  /// The summary of all blocks. They must begin with block 0.
  template <class Join>
  at::Tensor result(const Join& join) const {
    auto all = parts_.back().summary;
    for (auto part = parts_.rbegin() + 1; part != parts_.rend(); ++part) all = join(part->summary, all);
    return all;
  }

 private:
  std::vector<Part> parts_;
};

struct Header {
  std::int64_t first, count, rows, columns, dtype;
};

/// The parts of all ranks, in the order of ranks. Their summaries have two dimensions, maybe of different sizes.
/// Collective.
std::vector<Part> gather(const Communicator& communicator, const std::vector<Part>& mine) {
  std::string bytes;
  for (const auto& part : mine) {
    const auto table = part.summary.contiguous();
    const Header header{part.first, part.count, table.size(0), table.size(1),
                        static_cast<std::int64_t>(table.scalar_type())};
    bytes.append(reinterpret_cast<const char*>(&header), sizeof header);
    bytes.append(static_cast<const char*>(table.const_data_ptr()), table.nbytes());
  }
  std::vector<Part> parts;
  for (const auto& theirs : communicator.all_gather(bytes))
    for (std::size_t at = 0; at < theirs.size();) {
      Header header{};
      std::memcpy(&header, theirs.data() + at, sizeof header);
      at += sizeof header;
      const auto table = at::empty({header.rows, header.columns}, static_cast<at::ScalarType>(header.dtype));
      std::memcpy(table.mutable_data_ptr(), theirs.data() + at, table.nbytes());
      at += table.nbytes();
      parts.push_back({header.first, header.count, table});
    }
  return parts;
}

}  // namespace

ColumnPreprocessor::ColumnPreprocessor(std::string kind, std::vector<std::string> columns)
    : kind_(std::move(kind)), columns_(std::move(columns)) {
  if (columns_.empty()) throw Error(ExitCode::usage, "making a " + kind_, "it has no columns", "Name at least one");
  for (auto name = columns_.begin(); name != columns_.end(); ++name)
    if (std::find(columns_.begin(), name, *name) != name)
      throw Error(ExitCode::usage, "making a " + kind_, "column \"" + *name + "\" is named twice",
                  "Name each column once; chain() applies one preprocessor after the other");
}

void ColumnPreprocessor::fit(const Dataset& dataset, const Communicator& communicator) {
  constexpr std::int64_t rows = 256;
  auto& source = *source_of(dataset);
  const auto doing = [this](const std::string& name) { return "fitting " + kind_ + " on column \"" + name + "\""; };
  for (const auto& name : columns_) {
    const auto& column = column_of(source, name, doing(name));
    if (is_ragged(column))
      throw Error(ExitCode::data, doing(name), "its samples are of different length, and their padding would count",
                  "Choose another column");
    if (const auto why = objection(column.dtype); !why.empty())
      throw Error(ExitCode::data, doing(name), why, "Choose another column or convert it");
  }

  // The blocks and the order in which they are joined depend on the dataset only, so that the results are bitwise equal
  // at any number of ranks. A source that draws (a reservoir) has other samples on each rank: all ranks' are joined.
  std::map<std::string, PairwiseJoin> mine;
  const auto joining = [this](const at::Tensor& a, const at::Tensor& b) { return join(a, b); };
  const auto count = source.count(), blocks = (count - 1) / rows + 1;
  const auto share =
      source.draws() ? SampleRange{0, blocks} : share_of(blocks, communicator.size(), communicator.rank());
  const auto before = source.draws() ? communicator.rank() * blocks : 0;  // numbers the blocks over all ranks
  for (auto block = share.first, end = share.first + share.count; block < end; ++block) {
    std::vector<std::int64_t> samples(static_cast<std::size_t>(std::min(rows, count - block * rows)));
    std::iota(samples.begin(), samples.end(), block * rows);
    const Batch batch = source.read(samples);
    for (const auto& name : columns_) {
      const auto& values = batch[name];
      mine[name].add({before + block, 1, summary(values.reshape({-1, values.dim() > 1 ? values.size(-1) : 1}))},
                     joining);
    }
  }
  std::map<std::string, at::Tensor> learned;
  for (const auto& name : columns_) {
    PairwiseJoin all;
    for (auto& part : gather(communicator, mine[name].parts())) all.add(std::move(part), joining);
    learned[name] = learn(all.result(joining), doing(name));
  }
  learned_ = std::move(learned);
}

void ColumnPreprocessor::transform(Batch& batch, at::Generator&) const {
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
    // A step counts as fitted only if it is fitted on all ranks: after an exception in an earlier fit() some ranks may
    // have fitted it and others not.
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

  void transform(Batch& batch, at::Generator& generator) const override {
    for (const auto& step : steps_) detail::data::apply(*step, batch, generator);
  }
  const std::vector<PreprocessorPtr>& steps() const noexcept { return steps_; }

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
                  detail::str("it has ", steps_.size(), " steps, ", steps.size(), " were saved"),
                  detail::data::build_the_same);
    for (std::size_t i = 0; i < steps_.size(); ++i) steps_[i]->load_state(steps[i]);
  }

 private:
  std::vector<PreprocessorPtr> steps_;
};

}  // namespace

namespace detail::data {

void add_steps(std::shared_ptr<const Preprocessor> preprocessor,
               std::vector<std::shared_ptr<const Preprocessor>>& steps) {
  if (const auto* const all = dynamic_cast<const Chain*>(preprocessor.get()))
    for (const auto& step : all->steps()) add_steps(step, steps);
  else
    steps.push_back(std::move(preprocessor));
}

bool is_unfitted(const Preprocessor& preprocessor) {
  if (const auto* const all = dynamic_cast<const Chain*>(&preprocessor))
    return std::ranges::any_of(all->steps(), [](const auto& step) { return is_unfitted(*step); });
  return dynamic_cast<const ColumnPreprocessor*>(&preprocessor) != nullptr && !preprocessor.fitted();
}

}  // namespace detail::data

PreprocessorPtr chain(std::vector<PreprocessorPtr> steps) {
  if (std::ranges::find(steps, nullptr) != steps.end())
    throw Error(ExitCode::usage, "making a chain of preprocessors", "one of them is null", "Give preprocessors only");
  return std::make_shared<Chain>(std::move(steps));
}

}  // namespace muster
