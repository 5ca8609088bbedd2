#include "data/sources/source.hpp"

#include "base/memory_limit.hpp"
#include "base/text.hpp"
#include "muster/error.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <mutex>

namespace muster::detail::data {
namespace {

/// True if torch can choose samples of such a tensor.
bool can_choose_from(const at::Tensor& tensor) {
  try {
    tensor.index_select(0, at::zeros({1}, tensor.options().dtype(at::kLong)));
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

class MemorySource final : public Source {
 public:
  MemorySource(std::vector<Batch::Item> columns, bool ordered) : columns_(std::move(columns)), ordered_(ordered) {
    const std::string doing = "making a dataset of tensors";
    if (columns_.empty()) throw Error(ExitCode::data, doing, "there are no tensors", "Give at least one column");
    for (auto& [name, tensor] : columns_) {
      if (!tensor.defined() || tensor.dim() == 0)
        throw Error(ExitCode::data, doing, "column \"" + name + "\" has no first dimension",
                    "Give tensors of shape [samples, …]");
      if (tensor.layout() != at::kStrided || tensor.is_nested() || tensor.is_quantized())
        throw Error(ExitCode::data, doing, "column \"" + name + "\" is a sparse, nested or quantized tensor",
                    "Convert it first, as by to_dense() or dequantize()");
      if (tensor.size(0) != columns_.front().second.size(0))
        throw Error(ExitCode::data, doing,
                    str("column \"", columns_.front().first, "\" has ", columns_.front().second.size(0), " samples, \"",
                        name, "\" has ", tensor.size(0)),
                    "Give columns of the same length");
      if (std::ranges::find(schema_, name, &Column::name) != schema_.end())
        throw Error(ExitCode::data, doing, "two columns are called \"" + name + "\"", "Name each once");
      tensor = tensor.detach();
      schema_.push_back({name, tensor.scalar_type(), tensor.sizes().slice(1).vec()});
    }
    if (count() == 0) throw Error(ExitCode::data, doing, "it has no samples", "Give at least one");
    for (const auto& [name, tensor] : columns_)
      if (!can_choose_from(tensor))
        throw Error(ExitCode::data, doing,
                    "column \"" + name + "\" is of type " + c10::toString(tensor.scalar_type()) +
                        ", and torch cannot choose samples of it",
                    "Convert it to another type first");
  }

  std::int64_t count() override { return columns_.front().second.size(0); }
  const Schema& schema() override { return schema_; }
  std::string shown() const override { return "the dataset in memory"; }
  bool has_column_order() const noexcept override { return ordered_; }

  DatasetFingerprint fingerprint() override {
    DatasetFingerprint print{.count = count(), .schema = schema_text(schema_)};
    for (const auto& [name, tensor] : columns_)
      print.parts.push_back(fingerprint_of("column \"" + name + "\"", tensor,
                                           max_fingerprint_blocks / static_cast<int>(columns_.size())));
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
  bool ordered_;
  Schema schema_;
  TensorPool pool_;
};

}  // namespace

std::shared_ptr<Source> memory_source(std::vector<Batch::Item> columns, bool ordered) {
  return std::make_shared<MemorySource>(std::move(columns), ordered);
}

namespace {

/// The bytes of a tensor; an Error if they are more than this process may use.
std::size_t bytes_in_memory(at::IntArrayRef shape, at::ScalarType dtype) {
  constexpr std::size_t small = std::size_t{1} << 30;  // memory_limit() reads files; smaller tensors need not ask
  std::size_t bytes = c10::elementSize(dtype);
  bool is_absurd = false;
  for (const auto size : shape) is_absurd = __builtin_mul_overflow(bytes, size, &bytes) || is_absurd;
  if (!is_absurd && (bytes <= small || static_cast<double>(bytes) <= memory_limit())) return bytes;
  throw Error(ExitCode::data, "reading a batch",
              str("a column of it takes ", is_absurd ? "2^64 bytes or more" : str(bytes, " bytes"),
                  ", more than the memory that this process may use"),
              "Choose a smaller batch_size, or other columns");
}

}  // namespace

at::Tensor TensorPool::take(at::IntArrayRef shape, at::ScalarType dtype) {
  constexpr std::size_t large = 128 << 10;  // bytes; for this size and more, malloc takes fresh pages
  constexpr std::size_t most = 16;          // a few columns times the batches in hand and read ahead
  const auto bytes = bytes_in_memory(shape, dtype);
  if (bytes < large) return at::empty(shape, dtype);

  const std::lock_guard lock(mutex_);
  const auto is_free = [](const c10::Storage& storage) { return storage.use_count() == 1; };
  const auto fits = [&](const c10::Storage& storage) { return is_free(storage) && storage.nbytes() == bytes; };
  if (const auto found = std::ranges::find_if(storages_, fits); found != storages_.end())
    return at::empty({0}, dtype).set_(*found, 0, shape);
  auto tensor = at::empty(shape, dtype);
  if (storages_.size() < most)
    storages_.push_back(tensor.storage());
  else if (const auto other = std::ranges::find_if(storages_, is_free); other != storages_.end())
    *other = tensor.storage();
  return tensor;
}

Schema schema_of(const Batch& batch) {
  Schema schema;
  for (const auto& [name, tensor] : batch)
    schema.push_back({name, tensor.scalar_type(), tensor.sizes().slice(1).vec()});
  return schema;
}

bool is_ragged(const Column& column) noexcept {
  return std::ranges::any_of(column.shape, [](std::int64_t size) { return size < 0; });
}

std::int64_t row_bytes(const Schema& schema) noexcept {
  std::int64_t bytes = 1;
  for (const auto& column : schema) {
    auto of_column = static_cast<std::int64_t>(c10::elementSize(column.dtype));
    for (const auto size : column.shape) of_column *= std::max<std::int64_t>(0, size);
    bytes += of_column;
  }
  return bytes;
}

std::string column_text(const Column& column) {
  const auto sizes = joined(column.shape, [](std::int64_t size) { return std::to_string(size); });
  return str(c10::toString(column.dtype), "[", sizes, "]");
}

std::string schema_text(const Schema& schema) {
  return joined(schema, [](const Column& column) { return column.name + " " + column_text(column); });
}

const Column& column_of(Source& source, const std::string& name, const std::string& doing) {
  const auto& schema = source.schema();
  const auto found = std::ranges::find(schema, name, &Column::name);
  if (found == schema.end())
    throw Error(ExitCode::data, doing, source.shown() + " has no column \"" + name + "\"",
                "Its columns are " + joined(schema, &Column::name));
  return *found;
}

}  // namespace muster::detail::data
