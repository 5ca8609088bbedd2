// Copies batches to an accelerator ahead of time.
#pragma once

#include "muster/dataset.hpp"

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace muster::detail::data {

/// Columns on their way to the device.
struct DeviceCopy {
  std::vector<Batch::Item> items;
  std::shared_ptr<const c10::Event> done;  ///< recorded after the copies
};

/// A batch is put into pinned host memory, from where the device fetches it on a stream of its own, while other streams
/// compute. The stream that uses the batch waits for the copy, on the device; threads do not wait, unless many copies
/// are under way (start()). Pinned memory is used again once its copy is over. Thread-safe.
class DeviceCopies {
 public:
  struct Column {
    std::string name;
    at::Tensor tensor;
    at::ScalarType wanted;  ///< its type on the device
  };

  /// `device`: an accelerator that has streams and events; without an index it is the current device.
  explicit DeviceCopies(at::Device device);
  /// Waits for the copies under way, which read the pinned memory.
  ~DeviceCopies();
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;

  /// Starts copying the columns, converted to `dtypes`. Columns that are not dense tensors on the CPU are converted by
  /// `Tensor::to` on the current stream. The thread waits only if so many copies are under way that their memory must
  /// be bounded.
  DeviceCopy start(const Batch& batch, const ColumnTypes& dtypes);
  /// Makes the current stream of this thread wait for the copy, and tells the allocator that it uses the columns.
  void wait_on_device(const DeviceCopy& copy) const;

 private:
  /// A piece of pinned memory and the copy that reads it.
  struct Staging {
    c10::Storage memory;
    std::shared_ptr<const c10::Event> copied;  ///< null before the first copy

    bool is_free() const { return !copied || copied->query(); }
  };

  std::vector<Batch::Item> start_columns(const std::vector<Column>& columns, const c10::Storage& pinned);
  /// Returns pinned memory of at least this size that no copy reads any more. May wait for the oldest copy.
  Staging take_staging(std::size_t bytes);
  void put_back(Staging staging);

  const at::Device device_;
  const c10::Stream stream_;
  std::mutex mutex_;
  std::list<Staging> stagings_;  ///< pieces that no thread uses; the oldest copy first
};

}  // namespace muster::detail::data
