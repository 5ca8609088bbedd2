// The source of a stream: rows without an index, in the order in which they come.
#include "base/text.hpp"
#include "data/sources/items.hpp"
#include "data/sources/source.hpp"
#include "muster/error.hpp"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <utility>

namespace muster::detail::data {
namespace {

const std::string reading_stream = "reading a stream";

[[noreturn]] void refuse_index(const std::string& doing) {
  throw Error(ExitCode::usage, doing, "a stream gives its rows one after the other, and they are not known before",
              "Use a dataset of files, tensors or items instead");
}

/// Reads rows and batches from the user's function and regroups them into batches of plan.rows.
class RowBatcher {
 public:
  RowBatcher(StreamReader read, const StreamPlan& plan, std::shared_ptr<std::atomic<bool>> seen_objects)
      : read_(std::move(read)), batch_rows_(plan.rows), dtypes_(plan.dtypes), seen_objects_(std::move(seen_objects)) {}

  std::optional<ReadBatch> operator()() {
    while (more_ && unused_rows_ < batch_rows_) {
      if (auto given = read_())
        add(std::move(*given).take());
      else
        more_ = false;
    }
    const auto rows = std::min(unused_rows_, batch_rows_);
    if (rows == 0) return {};
    unused_rows_ -= rows;
    std::vector<std::vector<at::Tensor>> parts(schema_->size());
    for (auto left = rows; left > 0;) {
      const auto& block = blocks_.front();
      const auto taken = std::min(left, block.size() - used_rows_);
      for (std::size_t c = 0; c < parts.size(); ++c)
        parts[c].push_back((block.begin() + static_cast<std::ptrdiff_t>(c))->second.narrow(0, used_rows_, taken));
      left -= taken;
      used_rows_ += taken;
      if (used_rows_ < block.size()) continue;
      blocks_.pop_front();
      used_rows_ = 0;
    }
    std::vector<Batch::Item> items;
    for (std::size_t c = 0; c < parts.size(); ++c) items.emplace_back((*schema_)[c].name, at::cat(parts[c]));
    return Batch(std::move(items));
  }

 private:
  void add(std::variant<Json, Batch> given) {
    auto* const row = std::get_if<Json>(&given);
    if (row != nullptr) *seen_objects_ = true;
    if (row != nullptr && !row->is_object())
      throw Error(ExitCode::data, reading_stream,
                  str("row ", row_count_, " is ", row->type_name(), " and no JSON object"),
                  "Give objects as in {{\"x\", 0}, {\"y\", 1}}, or a Batch");
    auto block = row != nullptr ? Batch(columns_of(Json::array({std::move(*row)}), reading_stream, row_count_))
                                : std::move(std::get<Batch>(given));
    for (const auto& [name, tensor] : block)
      if (!tensor.defined() || tensor.dim() == 0)
        throw Error(ExitCode::data, reading_stream,
                    str("column \"", name, "\" of the Batch at row ", row_count_, " has no first dimension"),
                    "Give tensors of shape [rows, …]");
    for (const auto& [name, tensor] : block)
      if (tensor.size(0) != block.size())
        throw Error(ExitCode::data, reading_stream,
                    str("the Batch at row ", row_count_, " has ", block.size(), " rows, and its column \"", name,
                        "\" has ", tensor.size(0)),
                    "Give columns of the same length");
    if (block.size() == 0) return;
    auto schema = schema_of(block);
    if (!schema_) schema_ = schema;
    if (row != nullptr && schema != *schema_) {
      settle_types(schema, block);
      schema = schema_of(block);
    }
    if (schema != *schema_)
      throw Error(
          ExitCode::data, reading_stream,
          str("row ", row_count_, " is ", schema_text(schema), ", but the rows before it are ", schema_text(*schema_)),
          row != nullptr
              ? "Give the same columns and shapes in all rows. For a column of floats, give a float in the first row "
                "(2.0 for 2), or name a floating type in BatchOptions::dtypes"
              : "Give the same columns, types and shapes in all rows");
    row_count_ += block.size();
    unused_rows_ += block.size();
    blocks_.push_back(std::move(block));
  }

  /// Converts integers to floats if their column holds floats. If floats come into a column of integers, converts the
  /// column to floats, but only if BatchOptions::dtypes names a floating type for it anyway.
  void settle_types(const Schema& given, Batch& block) {
    if (given.size() != schema_->size()) return;
    for (std::size_t c = 0; c < given.size(); ++c) {
      auto& settled = (*schema_)[c];
      const auto& name = settled.name;
      if (given[c].name != name || given[c].shape != settled.shape) return;
      if (settled.dtype == at::kDouble && given[c].dtype == at::kLong) block.set(name, block[name].to(at::kDouble));
      if (settled.dtype != at::kLong || given[c].dtype != at::kDouble) continue;
      if (const auto later = dtypes_.of(name); !later || !at::isFloatingType(*later)) continue;
      settled.dtype = at::kDouble;
      for (auto& waiting : blocks_) waiting.set(name, waiting[name].to(at::kDouble));
    }
  }

  StreamReader read_;
  std::int64_t batch_rows_;
  ColumnTypes dtypes_;
  std::shared_ptr<std::atomic<bool>> seen_objects_;
  bool more_ = true;
  std::optional<Schema> schema_;
  std::deque<Batch> blocks_;
  std::int64_t used_rows_ = 0;    ///< rows of the first block that are already in a batch
  std::int64_t unused_rows_ = 0;  ///< rows of all blocks that are not in a batch yet
  std::int64_t row_count_ = 0;    ///< rows read from the user's function
};

class StreamSource final : public Source {
 public:
  explicit StreamSource(MakeStream make) : make_(std::move(make)) {
    if (!make_) throw Error(ExitCode::usage, "making a dataset of a stream", "there is no function", "Give one");
  }

  bool is_stream() const noexcept override { return true; }
  BatchReader open(const StreamShard& shard, const StreamPlan& plan) override {
    auto read = make_(shard);
    if (!read)
      throw Error(ExitCode::usage, reading_stream, "the function given for it returned no reader function",
                  "Return one");
    // A shared_ptr, since a std::function must be copyable.
    return [batcher = std::make_shared<RowBatcher>(std::move(read), plan, seen_objects_)] { return (*batcher)(); };
  }

  std::int64_t count() override { refuse_index("counting the samples of a stream"); }
  const Schema& schema() override { refuse_index("asking a stream for its columns"); }
  Batch read(std::span<const std::int64_t>) override { refuse_index("reading samples of a stream by their numbers"); }
  std::string shown() const override { return "a stream"; }
  bool has_column_order() const noexcept override { return !*seen_objects_; }
  DatasetFingerprint fingerprint() override { return {.schema = "a stream's"}; }  // each rank has its own rows

 private:
  MakeStream make_;
  std::shared_ptr<std::atomic<bool>> seen_objects_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

std::shared_ptr<Source> stream_source(MakeStream make) { return std::make_shared<StreamSource>(std::move(make)); }

}  // namespace muster::detail::data
