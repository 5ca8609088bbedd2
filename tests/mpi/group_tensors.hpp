// Tensors and groups for the tests of the process group.
#pragma once

#include "muster/process_group.hpp"
#include "support/world.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <string>
#include <vector>

namespace muster::test {

inline int rank() { return world().rank(); }
inline int size() { return world().size(); }

inline constexpr std::size_t one_call = std::size_t{1} << 30;

/// A group of all ranks, one for each chunk. Collective at its first call.
inline c10d::ProcessGroup& group(std::size_t chunk = one_call) {
  static std::map<std::size_t, c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  auto& group = groups[chunk];
  if (!group) group = make_process_group(world(), {.chunk = chunk});
  return *group;
}

inline c10d::Backend& backend(std::size_t chunk = one_call) { return *group(chunk).getBackend(c10::DeviceType::CPU); }

/// How a tensor lies in memory.
enum class Lay { plain, odd_offset, strided, turned };
inline constexpr Lay lays[] = {Lay::plain, Lay::odd_offset, Lay::strided, Lay::turned};

/// What two tensors are compared in.
inline at::Tensor wide(const at::Tensor& tensor) {
  return tensor.to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
}

inline double rounding(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return 1e-3;
    case at::kBFloat16:
      return 8e-3;
    case at::kFloat:
    case at::kComplexFloat:
      return 1e-6;
    default:
      return 1e-15;
  }
}

/// A tensor inside memory that belongs to nobody.
struct Placed {
  at::Tensor memory;
  at::Tensor tensor;

  Placed(const at::Tensor& values, Lay lay) {
    const auto n = values.numel();
    switch (lay) {
      case Lay::plain:
        memory = tensor = at::zeros({n}, values.options());
        break;
      case Lay::odd_offset:
        memory = at::zeros({n + 2}, values.options());
        tensor = memory.narrow(0, 1, n);
        break;
      case Lay::strided:
        memory = at::zeros({n, 3}, values.options());
        tensor = memory.select(1, 1);
        break;
      case Lay::turned:
        memory = at::zeros({n % 2 == 0 ? n / 2 : n, n % 2 == 0 ? 2 : 1}, values.options());
        tensor = memory.t();
        break;
    }
    tensor.copy_(values.view(tensor.sizes()));
  }

  /// Whether the tensor holds `want`, and the memory around it is untouched.
  testing::AssertionResult holds(const at::Tensor& want) const {
    // The numbers are small and whole: only the quotient of an average is rounded.
    if (!at::allclose(wide(tensor).reshape(-1), wide(want).reshape(-1), rounding(tensor.scalar_type()), 0.0))
      return testing::AssertionFailure() << "values differ: " << wide(tensor).reshape(-1).slice(0, 0, 8)
                                         << " instead of " << wide(want).reshape(-1).slice(0, 0, 8);
    auto around = wide(memory).abs().sum(), inside = wide(tensor).abs().sum();
    if (!at::allclose(around, inside)) return testing::AssertionFailure() << "memory around the tensor was written";
    return testing::AssertionSuccess();
  }
};

/// What rank `of` gives: small whole numbers from 1 to `top`, exact in every type, other ones on other ranks.
inline at::Tensor values(int of, std::int64_t n, at::ScalarType type, int top = 5) {
  const auto numbers = (at::arange(n, at::kLong) * 7 + of * 3 + at::arange(n, at::kLong).div(5, "floor")) % top;
  return type == at::kBool ? (numbers % 2).to(type) : (numbers + 1).to(at::kFloat).to(type);
}

inline std::string about(at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
  return std::string(c10::toString(type)) + " x " + std::to_string(n) + ", lay " +
         std::to_string(static_cast<int>(lay)) + ", chunk " + std::to_string(chunk);
}

/// Calls body(type, n, lay, chunk) over types, sizes, lays and chunks.
template <class Body>
void each_case(const std::vector<at::ScalarType>& types, Body&& body) {
  const std::map<std::size_t, std::vector<std::int64_t>> lengths{{7, {0, 1, 20}}, {one_call, {0, 7, 1000}}};
  for (const auto& [chunk, some] : lengths)
    for (const auto type : types)
      for (const auto n : some)
        for (const auto lay : lays) {
          SCOPED_TRACE(about(type, n, lay, chunk));
          body(type, n, lay, chunk);
        }
}

}  // namespace muster::test
