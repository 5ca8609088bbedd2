// The last work on a batch: its columns get the types and the device that the pass was asked for.
#pragma once

#include "data/passes/device_copies.hpp"
#include "data/preprocess/batch_work.hpp"
#include "muster/dataset.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace muster::detail::data {

class BatchConversion {
 public:
  /// Makes the batch that the program gets, from the converted columns.
  using Make = std::function<Batch(std::vector<Batch::Item> columns)>;

  explicit BatchConversion(const BatchOptions& options);
  /// Adds the conversion to the work on a batch. DeviceCopies copies columns to an accelerator. Thread-safe.
  void add_to(ReadBatch& read, Make make) const;

 private:
  std::shared_ptr<const ColumnTypes> dtypes_;
  std::optional<at::Device> device_;
  std::shared_ptr<DeviceCopies> copies_;  ///< null unless the device is an accelerator
};

}  // namespace muster::detail::data
