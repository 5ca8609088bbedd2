#include "muster/dataset.hpp"

#include "data/sources/source.hpp"
#include "muster/error.hpp"
#include "step/batch_weight.hpp"

#include <algorithm>

namespace muster {
namespace {

template <class Items>
auto find(Items& items, std::string_view name) {
  return std::find_if(items.begin(), items.end(), [&](const auto& item) { return item.first == name; });
}

[[noreturn]] void refuse_name(const std::vector<Batch::Item>& items, std::string_view name) {
  std::string names;
  for (const auto& item : items) names += (names.empty() ? "" : ", ") + item.first;
  throw Error(ExitCode::data, "looking into a batch", "it has no column \"" + std::string(name) + "\"",
              "Its columns are " + names);
}

}  // namespace

Batch::Batch(std::vector<Item> items, std::optional<std::int64_t> samples, std::optional<std::int64_t> global_samples,
             std::shared_ptr<const detail::step::BatchWeight> step)
    : items_(std::move(items)), step_(std::move(step)) {
  const auto rows = [](const Item& item) { return item.second.dim() > 0 ? item.second.size(0) : 0; };
  for (const auto& item : items_)
    if (rows(item) != rows(items_.front()))
      throw Error(ExitCode::data, "making a batch",
                  "column \"" + items_.front().first + "\" has " + std::to_string(rows(items_.front())) + " rows, \"" +
                      item.first + "\" has " + std::to_string(rows(item)),
                  "Give columns of the same length");
  samples_ = samples.value_or(items_.empty() ? 0 : rows(items_.front()));
  global_samples_ = global_samples.value_or(samples_);
}

double Batch::weight() const { return step_ ? step_->relative() : 1.0; }

at::Tensor& Batch::operator[](std::string_view name) {
  const auto found = find(items_, name);
  if (found == items_.end()) refuse_name(items_, name);
  return found->second;
}

const at::Tensor& Batch::operator[](std::string_view name) const {
  const auto found = find(items_, name);
  if (found == items_.end()) refuse_name(items_, name);
  return found->second;
}

void Batch::set(std::string name, at::Tensor value) {
  const auto found = find(items_, name);
  if (found == items_.end())
    items_.emplace_back(std::move(name), std::move(value));
  else
    found->second = std::move(value);
}

bool Batch::contains(std::string_view name) const noexcept { return find(items_, name) != items_.end(); }

Dataset::Dataset(const char* path) : Dataset(std::string(path)) {}
Dataset::Dataset(const std::string& path) : Dataset(detail::data::hdf5_source({path}, {})) {}
Dataset::Dataset(const std::filesystem::path& path) : Dataset(path.string()) {}
Dataset::Dataset(std::shared_ptr<detail::data::Source> source) : source_(std::move(source)) {}

Dataset Dataset::from_hdf5(std::vector<std::string> paths, DatasetOptions options) {
  return Dataset(detail::data::hdf5_source(std::move(paths), std::move(options)));
}

Dataset Dataset::from_tensors(std::vector<std::pair<std::string, at::Tensor>> columns) {
  return Dataset(detail::data::memory_source(std::move(columns)));
}

std::int64_t Dataset::count() const { return source_->count(); }

Schema Dataset::schema() const { return source_->schema(); }

Batch Dataset::read(std::span<const std::int64_t> samples) const {
  for (const auto sample : samples)
    if (sample < 0 || sample >= count())
      throw Error(ExitCode::usage, "reading " + source_->shown(),
                  "there is no sample " + std::to_string(sample) + ", it has " + std::to_string(count()),
                  "Ask for samples from 0 on");
  return source_->read(samples);
}

Dataset Dataset::transform(std::shared_ptr<const Preprocessor> preprocessor) const {
  return Dataset(detail::data::transformed_source(source_, std::move(preprocessor)));
}

}  // namespace muster
