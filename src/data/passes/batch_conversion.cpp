#include "data/passes/batch_conversion.hpp"

#include <ATen/DeviceAccelerator.h>

#include <utility>

namespace muster::detail::data {
namespace {

std::vector<Batch::Item> converted(const Batch& batch, const ColumnTypes& dtypes, std::optional<at::Device> device) {
  std::vector<Batch::Item> items;
  for (const auto& [name, tensor] : batch)
    items.emplace_back(name,
                       tensor.to(device.value_or(tensor.device()), dtypes.of(name).value_or(tensor.scalar_type())));
  return items;
}

}  // namespace

BatchConversion::BatchConversion(const BatchOptions& options)
    : dtypes_(std::make_shared<const ColumnTypes>(options.dtypes)), device_(options.device) {
  if (device_ && at::accelerator::isAccelerator(device_->type())) copies_ = std::make_shared<DeviceCopies>(*device_);
}

void BatchConversion::add_to(ReadBatch& read, Make make) const {
  if (!copies_) {
    read.work.push_back(
        {[dtypes = dtypes_, device = device_, make = std::move(make)](Batch& batch, at::Generator&, bool) {
          batch = make(converted(batch, *dtypes, device));
          return true;
        }});
    return;
  }
  const auto copy = std::make_shared<DeviceCopy>();
  read.work.push_back(
      {[copies = copies_, dtypes = dtypes_, copy, make = std::move(make)](Batch& batch, at::Generator&, bool) {
        *copy = copies->start(batch, *dtypes);
        batch = make(copy->items);
        return true;
      }});
  read.work.push_back({[copies = copies_, copy](Batch&, at::Generator&, bool ahead) {
    if (ahead) return false;  // the stream that computes is the one of the thread that iterates
    copies->wait_on_device(*copy);
    return true;
  }});
}

}  // namespace muster::detail::data
