#include "muster/dataset.hpp"

#include "base/text.hpp"
#include "data/preprocess/batch_work.hpp"
#include "data/sources/items.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "step/batch_weight.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_unique2.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>
#include <numeric>

namespace muster {
namespace {

int checked_threads(const MapOptions& options) {
  if (options.threads < 1)
    throw Error(ExitCode::usage, "transforming a dataset", "threads is less than 1", "Give at least 1");
  return options.threads;
}

}  // namespace

Batch::Batch(std::vector<Item> items, std::optional<std::int64_t> samples, std::optional<std::int64_t> global_samples,
             std::shared_ptr<const detail::step::BatchWeight> step)
    : items_(std::make_move_iterator(items.begin()), std::make_move_iterator(items.end())), step_(std::move(step)) {
  const auto rows = [](const Item& item) { return item.second.dim() > 0 ? item.second.size(0) : 0; };
  for (const auto& item : items_)
    if (rows(item) != rows(items_.front()))
      throw Error(ExitCode::data, "making a batch",
                  detail::str("column \"", items_.front().first, "\" has ", rows(items_.front()), " rows, \"",
                              item.first, "\" has ", rows(item)),
                  "Give columns of the same length");
  samples_ = samples.value_or(items_.empty() ? 0 : rows(items_.front()));
  global_samples_ = global_samples.value_or(samples_);
}

double Batch::weight() const { return step_ ? step_->relative() : 1.0; }

at::Tensor& Batch::operator[](std::string_view name) { return const_cast<at::Tensor&>(std::as_const(*this)[name]); }

const at::Tensor& Batch::operator[](std::string_view name) const {
  const auto found = std::ranges::find(items_, name, &Item::first);
  if (found == items_.end())
    throw Error(ExitCode::data, "looking into a batch", detail::str("it has no column \"", name, "\""),
                "Its columns are " + detail::data::joined(items_, &Item::first));
  return found->second;
}

void Batch::set(std::string name, at::Tensor value) {
  if (const auto found = std::ranges::find(items_, name, &Item::first); found != items_.end())
    found->second = std::move(value);
  else
    items_.emplace_back(std::move(name), std::move(value));
}

bool Batch::contains(std::string_view name) const noexcept {
  return std::ranges::find(items_, name, &Item::first) != items_.end();
}

Dataset::Dataset(const char* path) : Dataset(std::string(path)) {}
Dataset::Dataset(const std::string& path) : Dataset(detail::data::hdf5_source({path}, {})) {}
Dataset::Dataset(const std::filesystem::path& path) : Dataset(path.string()) {}
Dataset::Dataset(std::shared_ptr<detail::data::Source> source) : source_(std::move(source)) {}

const std::shared_ptr<detail::data::Source>& detail::data::source_of(const Dataset& dataset) noexcept {
  return dataset.source_;
}

Dataset detail::data::dataset_of(std::shared_ptr<Source> source) { return Dataset(std::move(source)); }

Dataset Dataset::from_hdf5(std::vector<std::string> paths, DatasetOptions options) {
  return Dataset(detail::data::hdf5_source(std::move(paths), std::move(options)));
}

Dataset Dataset::windows(std::vector<std::string> variables, WindowOptions options) {
  return Dataset(detail::data::window_source(std::move(variables), std::move(options)));
}

Dataset Dataset::ragged(std::vector<std::string> paths, RaggedOptions options) {
  return Dataset(detail::data::ragged_source(paths, std::move(options)));
}

Dataset Dataset::from_tensors(std::vector<std::pair<std::string, at::Tensor>> columns) {
  return Dataset(detail::data::memory_source(std::move(columns)));
}

Dataset Dataset::from_items(const Json& items) {
  return Dataset(detail::data::memory_source(detail::data::columns_of(items, "making a dataset of items"), false));
}

Dataset Dataset::from_stream(MakeStream make) { return Dataset(detail::data::stream_source(std::move(make))); }

std::int64_t Dataset::count() const { return source_->count(); }

Schema Dataset::schema() const { return source_->schema(); }

Batch Dataset::read(std::span<const std::int64_t> samples) const {
  for (const auto sample : samples)
    if (sample < 0 || sample >= count())
      throw Error(ExitCode::usage, "reading " + source_->shown(),
                  detail::str("there is no sample ", sample, ", it has ", count()),
                  detail::str("Ask for samples from 0 to ", count() - 1));
  return source_->read(samples);
}

at::Tensor Dataset::column(const std::string& name) const {
  const auto& column = detail::data::column_of(*source_, name, "reading a column");
  if (detail::data::is_ragged(column))
    throw Error(ExitCode::usage, "reading a column", "the samples of \"" + name + "\" are of different length",
                "Read them in batches");
  auto shape = column.shape;
  shape.insert(shape.begin(), count());
  const at::NoGradGuard no_grad;
  auto values = at::empty(shape, column.dtype);
  constexpr std::int64_t block_bytes = std::int64_t{16} << 20;
  // read() also reads the other columns, and samples of ragged columns may have any size.
  const std::int64_t most = std::ranges::any_of(schema(), detail::data::is_ragged) ? 1 << 8 : 1 << 16;
  const auto rows = std::clamp<std::int64_t>(block_bytes / detail::data::row_bytes(schema()), 1, most);
  std::vector<std::int64_t> samples;
  for (std::int64_t first = 0; first < count(); first += rows) {
    samples.resize(static_cast<std::size_t>(std::min(rows, count() - first)));
    std::iota(samples.begin(), samples.end(), first);
    values.narrow(0, first, static_cast<std::int64_t>(samples.size())).copy_(source_->read(samples)[name]);
  }
  return values;
}

Dataset Dataset::subset(std::vector<std::int64_t> samples) const {
  return Dataset(detail::data::subset_source(source_, std::move(samples)));
}

std::vector<Dataset> Dataset::random_split(std::vector<double> fractions, std::uint64_t seed) const {
  std::vector<Dataset> parts;
  for (auto& part : detail::data::split_source(source_, fractions, seed)) parts.push_back(Dataset(std::move(part)));
  return parts;
}

at::Tensor balanced_weights(const at::Tensor& labels) {
  if (!labels.defined() || labels.dim() != 1 || labels.numel() == 0 || !at::isIntegralType(labels.scalar_type(), true))
    throw Error(ExitCode::usage, "balancing weights", "the labels are not a tensor [samples] of whole numbers",
                "Give the class of each sample");
  const at::NoGradGuard no_grad;
  const auto [classes, numbers, counts] =
      at::_unique2(labels.cpu(), /*sorted=*/true, /*return_inverse=*/true, /*return_counts=*/true);
  return counts.to(at::kDouble).mul(classes.numel()).reciprocal().index_select(0, numbers);
}

Dataset Dataset::transform(std::shared_ptr<const Preprocessor> preprocessor, MapOptions options) const {
  if (!preprocessor) throw Error(ExitCode::usage, "transforming a dataset", "there is no preprocessor", "Give one");
  return Dataset(detail::data::transformed_source(
      source_, detail::data::work_of(std::move(preprocessor), checked_threads(options))));
}

Dataset Dataset::map_batches(BatchFunction function, MapOptions options) const {
  auto given = std::move(function).take();
  if (std::visit([](const auto& each) { return !each; }, given))
    throw Error(ExitCode::usage, "mapping the batches of a dataset", "there is no function", "Give one");
  return Dataset(
      detail::data::transformed_source(source_, {detail::data::work_of(std::move(given), checked_threads(options))}));
}

}  // namespace muster
