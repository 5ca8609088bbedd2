#include "data/sources/tensor_pool.hpp"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace muster::detail::data {

at::Tensor TensorPool::take(at::IntArrayRef shape, at::ScalarType dtype) {
  constexpr std::size_t large = 128 << 10;  // from here on malloc takes fresh pages
  constexpr std::size_t most = 16;          // a few columns times the batches in hand and read ahead
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(shape)) * c10::elementSize(dtype);
  if (bytes < large) return at::empty(shape, dtype);

  const std::lock_guard lock(mutex_);
  const auto is_free = [](const c10::Storage& storage) { return storage.use_count() == 1; };
  const auto fits = [&](const c10::Storage& storage) { return is_free(storage) && storage.nbytes() == bytes; };
  if (const auto found = std::find_if(storages_.begin(), storages_.end(), fits); found != storages_.end())
    return at::empty({0}, dtype).set_(*found, 0, shape);
  auto tensor = at::empty(shape, dtype);
  if (storages_.size() < most)
    storages_.push_back(tensor.storage());
  else if (const auto other = std::find_if(storages_.begin(), storages_.end(), is_free); other != storages_.end())
    *other = tensor.storage();
  return tensor;
}

}  // namespace muster::detail::data
