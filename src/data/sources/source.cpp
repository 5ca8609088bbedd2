#include "data/sources/source.hpp"

#include "data/sources/tensor_pool.hpp"
#include "muster/error.hpp"
#include "muster/preprocessor.hpp"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>

#include <algorithm>
#include <array>
#include <mutex>

namespace muster::detail::data {
namespace {

class MemorySource final : public Source {
 public:
  explicit MemorySource(std::vector<Batch::Item> columns) : columns_(std::move(columns)) {
    const std::string doing = "making a dataset of tensors";
    if (columns_.empty()) throw Error(ExitCode::data, doing, "there are none", "Give at least one column");
    for (auto& [name, tensor] : columns_) {
      if (!tensor.defined() || tensor.dim() == 0)
        throw Error(ExitCode::data, doing, "column \"" + name + "\" has no first dimension",
                    "Give tensors of shape [samples, …]");
      if (tensor.size(0) != columns_.front().second.size(0))
        throw Error(ExitCode::data, doing,
                    "column \"" + columns_.front().first + "\" has " + std::to_string(columns_.front().second.size(0)) +
                        " samples, \"" + name + "\" has " + std::to_string(tensor.size(0)),
                    "Give columns of the same length");
      if (std::any_of(schema_.begin(), schema_.end(), [&](const Column& column) { return column.name == name; }))
        throw Error(ExitCode::data, doing, "two columns are called \"" + name + "\"", "Name each once");
      tensor = tensor.detach();
      schema_.push_back({name, tensor.scalar_type(), tensor.sizes().slice(1).vec()});
    }
    if (count() == 0) throw Error(ExitCode::data, doing, "it has no samples", "Give at least one");
  }

  std::int64_t count() override { return columns_.front().second.size(0); }
  const Schema& schema() override { return schema_; }
  std::string shown() const override { return "the dataset in memory"; }

  Fingerprint fingerprint() override {
    Fingerprint print{.count = count(), .schema = described(schema_)};
    for (const auto& [name, tensor] : columns_)
      print.portions.push_back(
          look_at("column \"" + name + "\"", tensor, blocks_of_dataset / static_cast<int>(columns_.size())));
    return print;
  }

  Batch read(std::span<const std::int64_t> samples) override {
    const auto indices = at::from_blob(const_cast<std::int64_t*>(samples.data()),
                                       {static_cast<std::int64_t>(samples.size())}, at::kLong);
    std::vector<Batch::Item> items;
    for (const auto& [name, tensor] : columns_) {
      if (!tensor.is_cpu()) {
        items.emplace_back(name, tensor.index_select(0, indices.to(tensor.device())));
        continue;
      }
      auto shape = tensor.sizes().vec();
      shape.front() = indices.size(0);
      auto rows = pool_.take(shape, tensor.scalar_type());
      items.emplace_back(name, at::index_select_out(rows, tensor, 0, indices));
    }
    return Batch(std::move(items));
  }

 private:
  std::vector<Batch::Item> columns_;
  Schema schema_;
  TensorPool pool_;
};

class TransformedSource final : public Source {
 public:
  TransformedSource(std::shared_ptr<Source> source, std::shared_ptr<const Preprocessor> preprocessor)
      : source_(std::move(source)), preprocessor_(std::move(preprocessor)) {}

  std::int64_t count() override { return source_->count(); }
  std::string shown() const override { return source_->shown(); }
  Fingerprint fingerprint() override { return source_->fingerprint(); }  // what is made of it follows from it

  const Schema& schema() override {
    // A preprocessor does not say what it makes of the columns, so one sample shows it.
    std::call_once(once_, [this] {
      constexpr std::array<std::int64_t, 1> first{0};
      for (const auto& [name, tensor] : read(first))
        schema_.push_back({name, tensor.scalar_type(), tensor.sizes().slice(1).vec()});
    });
    return schema_;
  }

  Batch read(std::span<const std::int64_t> samples) override {
    Batch batch = source_->read(samples);
    preprocessor_->transform(batch);
    return batch;
  }

 private:
  std::shared_ptr<Source> source_;
  std::shared_ptr<const Preprocessor> preprocessor_;
  std::once_flag once_;
  Schema schema_;
};

}  // namespace

std::shared_ptr<Source> memory_source(std::vector<Batch::Item> columns) {
  return std::make_shared<MemorySource>(std::move(columns));
}

std::shared_ptr<Source> transformed_source(std::shared_ptr<Source> source,
                                           std::shared_ptr<const Preprocessor> preprocessor) {
  return std::make_shared<TransformedSource>(std::move(source), std::move(preprocessor));
}

std::string describe(const Column& column) {
  std::string text = std::string(c10::toString(column.dtype)) + "[";
  for (std::size_t i = 0; i < column.shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(column.shape[i]);
  return text + "]";
}

std::string described(const Schema& schema) {
  std::string all;
  for (const auto& column : schema) all += (all.empty() ? "" : ", ") + column.name + " " + describe(column);
  return all;
}

std::string names_of(const Schema& schema) {
  std::string names;
  for (const auto& column : schema) names += (names.empty() ? "" : ", ") + column.name;
  return names;
}

const Column& column_of(Source& source, const std::string& name, const std::string& doing) {
  const auto& schema = source.schema();
  const auto found = std::find_if(schema.begin(), schema.end(), [&](const Column& c) { return c.name == name; });
  if (found == schema.end())
    throw Error(ExitCode::data, doing, source.shown() + " has no column \"" + name + "\"",
                "Its columns are " + names_of(schema));
  return *found;
}

}  // namespace muster::detail::data
