#include "state/fingerprint.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <isa-l/crc64.h>

#include <algorithm>
#include <map>
#include <utility>

namespace muster::detail::state {
namespace {

/// How many words are mixed at once; this limits the memory used on the device.
constexpr std::int64_t words_at_once = std::int64_t{1} << 22;

/// Returns the values as a flat tensor of integers as wide as an element, at most 64 bits each.
at::Tensor as_words(const at::Tensor& tensor) {
  const auto flat = tensor.detach().resolve_conj().resolve_neg().contiguous().flatten();
  const auto size = flat.element_size();
  return flat.view(size == 1 ? at::kByte : size == 2 ? at::kShort : size == 4 ? at::kInt : at::kLong);
}

/// Scrambles 64-bit integers in place, so that each bit affects most others. Shifts are arithmetic; products wrap.
at::Tensor& scramble(at::Tensor& x) {
  x.bitwise_xor_(x.bitwise_right_shift(32)).mul_(std::int64_t{-0x61c8864680b583eb});
  x.bitwise_xor_(x.bitwise_right_shift(29)).mul_(std::int64_t{-0x4b47d0c5e4bf4f6d});
  return x.bitwise_xor_(x.bitwise_right_shift(32));
}

}  // namespace

std::uint64_t fingerprint(std::string_view bytes, std::uint64_t before) noexcept {
  return ::crc64_ecma_refl(before, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

std::uint64_t fingerprint(const at::Tensor& tensor) { return fingerprint(Bytes(tensor).all()); }

at::Tensor mixed_sum(const at::Tensor& tensor) {
  const auto words = as_words(tensor);
  const auto options = at::TensorOptions(at::kLong).device(words.device());
  auto sum = at::zeros({}, options);
  for (std::int64_t begin = 0; begin < words.numel(); begin += words_at_once) {
    const auto end = std::min(begin + words_at_once, words.numel());
    auto indices = at::arange(begin, end, options);
    auto mixed = words.slice(0, begin, end).to(at::kLong).bitwise_xor(scramble(indices));
    sum.add_(scramble(mixed).sum());
  }
  return sum;
}

std::vector<std::uint64_t> fingerprints_on_devices(const std::vector<at::Tensor>& tensors) {
  std::vector<std::uint64_t> sums(tensors.size());
  std::map<std::string, std::vector<std::pair<std::size_t, at::Tensor>>> by_device;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    by_device[tensors[i].device().str()].emplace_back(i, mixed_sum(tensors[i]));
  for (const auto& [device, there] : by_device) {
    std::vector<at::Tensor> numbers;
    for (const auto& [index, number] : there) numbers.push_back(number);
    const auto here = at::stack(numbers).cpu();
    for (std::size_t i = 0; i < there.size(); ++i)
      sums[there[i].first] = static_cast<std::uint64_t>(here.const_data_ptr<std::int64_t>()[i]);
  }
  return sums;
}

}  // namespace muster::detail::state
