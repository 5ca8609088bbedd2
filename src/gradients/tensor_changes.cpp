#include "gradients/tensor_changes.hpp"

#include "node/finite.hpp"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <utility>

namespace muster::detail::gradients {
namespace {

constexpr std::int64_t samples_per_tensor = 4;  ///< on the CPU, where reading them costs nothing; one on other devices
constexpr std::size_t line_bytes = 64, least_lines = 64;
/// In bytes; one cache line of each piece is read, so 1/64 of a large gradient.
constexpr std::size_t largest_piece = 4096;

std::uint64_t mix(std::uint64_t value) {
  value *= 0x9e3779b97f4a7c15;
  return value ^ value >> 32;
}

/// Returns the offset of the element at about `part` / samples_per_tensor of the way along every dimension.
std::int64_t offset_at(const at::Tensor& tensor, std::int64_t part) {
  std::int64_t offset = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    offset += tensor.size(d) * part / samples_per_tensor * tensor.stride(d);
  return offset;
}

/// Hashes the first cache line, the last one, and one of each piece between. The line's position in its piece varies,
/// since lines at equal distances could all lie in the same columns of a matrix.
std::uint64_t hash_of_samples(const char* bytes, std::size_t count) {
  constexpr std::size_t words = line_bytes / sizeof(std::uint64_t), ahead = 8;
  const auto lines = std::min(count / least_lines, largest_piece) / line_bytes;  // number of lines in a piece
  const auto piece = lines * line_bytes;
  const auto line_of = [&](std::size_t number) { return bytes + number * piece + mix(number) % lines * line_bytes; };
  std::uint64_t hashes[words] = {};  // several, so that the processor computes them in parallel
  const auto add = [&](const char* line) {
    std::uint64_t values[words];
    std::memcpy(values, line, line_bytes);
    for (std::size_t w = 0; w < words; ++w) hashes[w] = mix(hashes[w] ^ values[w]);
  };
  add(bytes);
  for (std::size_t number = 0; (number + 1) * piece <= count; ++number) {
    __builtin_prefetch(line_of(number + ahead));
    add(line_of(number));
  }
  add(bytes + count - line_bytes);
  return hash_of(hashes, sizeof hashes, count);
}

template <class T>
bool all_finite(const at::Tensor& dense) {
  constexpr std::int64_t of_a_thread = 1 << 16;
  const auto* const values = static_cast<const T*>(dense.const_data_ptr());
  std::atomic<bool> finite = true;
  at::parallel_for(0, dense.numel(), of_a_thread, [&](std::int64_t begin, std::int64_t end) {
    if (!node::all_finite(values + begin, static_cast<std::size_t>(end - begin))) finite = false;
  });
  return finite;
}

}  // namespace

ParameterSamples::ParameterSamples(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> elsewhere;
  for (const auto& tensor : parameters_) {
    if (tensor.numel() == 0) continue;
    if (tensor.is_cpu()) {
      const auto* values = static_cast<const char*>(tensor.const_data_ptr());
      const auto size = tensor.element_size();
      for (std::int64_t part = 0; part < samples_per_tensor; ++part)
        host_.append(values + offset_at(tensor, part) * static_cast<std::int64_t>(size), size);
    } else if (elsewhere.empty() || (tensor.scalar_type() == elsewhere.front().scalar_type() &&
                                     tensor.device() == elsewhere.front().device())) {
      elsewhere.push_back(
          tensor.detach().as_strided({}, {}, tensor.storage_offset() + offset_at(tensor, samples_per_tensor / 2)));
    }
  }
  if (!elsewhere.empty()) device_ = at::stack(elsewhere);
}

bool ParameterSamples::changed() const {
  const ParameterSamples now(parameters_);
  return now.host_ != host_ || now.device_.defined() != device_.defined() ||
         (device_.defined() && !at::equal(now.device_, device_));
}

GradientMark::GradientMark(const at::Tensor& gradient, std::size_t own_references)
    : data_(gradient.is_sparse() ? gradient.unsafeGetTensorImpl() : gradient.const_data_ptr()) {
  if (gradient.is_sparse()) {
    version_ = static_cast<std::uint32_t>(gradient._version());
    return;
  }
  if (gradient.storage().use_count() == 1 + own_references) version_ = static_cast<std::uint32_t>(gradient._version());
  if (!gradient.is_cpu() || !gradient.is_non_overlapping_and_dense()) return;
  const auto* const bytes = static_cast<const char*>(data_);
  const auto count = gradient.nbytes();
  if (count <= least_lines * line_bytes) {
    hash_ = hash_of(bytes, count);
    return;
  }
  hash_ = hash_of_samples(bytes, count);
}

bool GradientMark::operator==(const GradientMark& other) const {
  const bool same_version = !version_ || !other.version_ || *version_ == *other.version_;
  return data_ == other.data_ && hash_ == other.hash_ && same_version;
}

std::uint64_t hash_of(const void* memory, std::size_t bytes, std::uint64_t seed) {
  const auto* at = static_cast<const char*>(memory);
  auto hash = mix(seed + bytes);
  for (; bytes > 0;) {
    std::uint64_t word = 0;
    const auto n = std::min(bytes, sizeof word);
    std::memcpy(&word, at, n);
    hash = mix(hash ^ word);
    at += n;
    bytes -= n;
  }
  return hash;
}

bool any_nonzero(const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  return (gradient.layout() == at::kSparse ? gradient._values() : gradient).any().item<bool>();
}

bool all_finite(const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const auto values = gradient.layout() == at::kSparse ? gradient._values() : gradient;
  if (values.is_cpu() && values.is_non_overlapping_and_dense()) {
    if (values.scalar_type() == at::kFloat) return all_finite<float>(values);
    if (values.scalar_type() == at::kDouble) return all_finite<double>(values);
  }
  return at::isfinite(values).all().item<bool>();
}

}  // namespace muster::detail::gradients
