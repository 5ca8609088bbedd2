#include "data/passes/device_copies.hpp"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace muster::detail::data {
namespace {

/// How many copies may have memory that is not free yet. Above that, a thread waits for the oldest copy.
constexpr std::size_t most_under_way = 8;
constexpr std::size_t alignment = 256;  ///< of each column in pinned memory, in bytes

using c10::impl::VirtualGuardImpl;

at::Device with_index(at::Device device) {
  at::globalContext().lazyInitDevice(device.type());
  return device.has_index() ? device : VirtualGuardImpl(device.type()).getDevice();
}

bool can_be_staged(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized() && !tensor.is_nested();
}

/// The type of a column in pinned memory: the smaller of its own and the wanted one. If the wanted type is larger, the
/// device converts the column.
at::ScalarType staged_type(const DeviceCopies::Column& column) {
  const auto own = column.tensor.scalar_type();
  return c10::elementSize(column.wanted) <= c10::elementSize(own) ? column.wanted : own;
}

std::size_t staged_bytes(const DeviceCopies::Column& column) {
  const auto bytes = static_cast<std::size_t>(column.tensor.numel()) * c10::elementSize(staged_type(column));
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The strides of a copy: the tensor's strides if it is dense; otherwise the copy is contiguous.
std::vector<std::int64_t> strides_of_copy(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  const auto strides = c10::contiguous_strides(tensor.sizes());
  return {strides.begin(), strides.end()};
}

c10::Storage pinned_memory(at::DeviceType device, std::size_t bytes) {
  auto* const allocator = at::globalContext().getPinnedMemoryAllocator(device);
  return {c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, /*resizable=*/false};
}

}  // namespace

DeviceCopies::DeviceCopies(at::Device device)
    : device_(with_index(device)), stream_(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device_)) {}

DeviceCopies::~DeviceCopies() {
  for (const auto& staging : stagings_) try {
      if (staging.copied) staging.copied->synchronize();
    } catch (const std::exception&) {  // the device has failed; the program's next call on it says so
    }
}

DeviceCopy DeviceCopies::start(const Batch& batch, const ColumnTypes& dtypes) {
  const at::NoGradGuard no_grad;
  std::vector<Column> columns;
  std::size_t bytes = 0;
  for (const auto& [name, tensor] : batch) {
    columns.push_back({name, tensor, dtypes.of(name).value_or(tensor.scalar_type())});
    if (can_be_staged(tensor)) bytes += staged_bytes(columns.back());
  }
  auto staging = take_staging(bytes);
  DeviceCopy copy;
  auto done = std::make_shared<c10::Event>(device_.type());
  try {
    copy.items = start_columns(columns, staging.memory);
    done->record(stream_);
  } catch (...) {
    VirtualGuardImpl(device_.type()).synchronizeStream(stream_);  // copies that have begun read the pinned memory
    throw;
  }
  copy.done = staging.copied = std::move(done);
  put_back(std::move(staging));
  return copy;
}

std::vector<Batch::Item> DeviceCopies::start_columns(const std::vector<Column>& columns, const c10::Storage& pinned) {
  std::vector<Batch::Item> items;
  std::size_t offset = 0;
  for (const auto& column : columns) {
    const auto& [name, tensor, wanted] = column;
    if (!can_be_staged(tensor)) {
      items.emplace_back(name, tensor.to(device_, wanted));
      continue;
    }
    const auto type = staged_type(column);
    const auto strides = strides_of_copy(tensor);
    const auto place = static_cast<std::int64_t>(offset / c10::elementSize(type));
    const auto staged = at::empty({0}, type).set_(pinned, place, tensor.sizes(), strides).copy_(tensor);
    offset += staged_bytes(column);
    const c10::StreamGuard on_own_stream(stream_);
    const auto on_device = at::empty_strided(tensor.sizes(), strides, staged.options().device(device_));
    on_device.copy_(staged, /*non_blocking=*/true);
    items.emplace_back(name, on_device.to(wanted));
  }
  return items;
}

void DeviceCopies::wait_on_device(const DeviceCopy& copy) const {
  const VirtualGuardImpl device(device_.type());
  const auto current = device.getStream(device_);
  copy.done->block(current);
  for (const auto& [name, tensor] : copy.items)
    if (tensor.device() == device_ && tensor.layout() == at::kStrided)
      device.recordDataPtrOnStream(tensor.storage().data_ptr(), current);
}

DeviceCopies::Staging DeviceCopies::take_staging(std::size_t bytes) {
  Staging taken;
  {
    const std::lock_guard lock(mutex_);
    const auto fits = [&](const Staging& one) { return one.memory.nbytes() >= bytes; };
    auto found = std::ranges::find_if(stagings_, [&](const Staging& one) { return fits(one) && one.is_free(); });
    if (found == stagings_.end()) found = std::ranges::find_if(stagings_, &Staging::is_free);
    if (found == stagings_.end() && stagings_.size() >= most_under_way) found = stagings_.begin();
    if (found != stagings_.end()) {
      taken = std::move(*found);
      stagings_.erase(found);
    }
  }
  if (taken.copied) taken.copied->synchronize();
  if (!taken.memory || taken.memory.nbytes() < bytes)
    taken.memory = pinned_memory(device_.type(), std::max<std::size_t>(bytes, 1));
  return taken;
}

void DeviceCopies::put_back(Staging staging) {
  const std::lock_guard lock(mutex_);
  stagings_.push_back(std::move(staging));
}

}  // namespace muster::detail::data
