#include "soak/plain_reading.hpp"

#include "base/file.hpp"
#include "hdf5/file.hpp"

#include <ATen/ops/empty.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

namespace muster::soak {

std::uint64_t contiguous_offset(const std::string& path) {
  const auto file = detail::hdf5::open_file(path);
  const auto dataset = detail::hdf5::open_dataset(file.get(), "x", path);
  return detail::hdf5::contiguous_offset(dataset.get()).value();
}

void read_plainly(const std::string& path, std::uint64_t offset, const Order& order, std::size_t batch,
                  std::size_t sample_bytes) {
  const detail::File file(path, detail::File::Mode::read);
  const auto tensor = at::empty({static_cast<std::int64_t>(batch * sample_bytes / 4)}, at::kFloat);
  auto* const base = static_cast<char*>(tensor.mutable_data_ptr());
  for (std::size_t begin = 0; begin < order.size(); begin += batch) {
    std::vector<std::pair<std::int64_t, std::size_t>> samples;
    for (std::size_t i = begin; i < std::min(begin + batch, order.size()); ++i)
      samples.emplace_back(order[i], i - begin);
    std::ranges::sort(samples);
    for (const auto& [sample, slot] : samples) {
      const iovec piece{base + slot * sample_bytes, sample_bytes};
      if (::preadv(file.descriptor(), &piece, 1,
                   static_cast<off_t>(offset + static_cast<std::size_t>(sample) * sample_bytes)) !=
          static_cast<ssize_t>(sample_bytes))
        std::abort();
    }
  }
}

}  // namespace muster::soak
