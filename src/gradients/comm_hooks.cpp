#include "gradients/comm_hooks.hpp"

#include "muster/error.hpp"

#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <c10/util/irange.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <span>

namespace muster {
namespace detail::gradients {
namespace {

using Row = std::span<double>;

double dot(Row a, Row b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double norm(Row a) { return std::sqrt(dot(a, a)); }

/// Fills the row with random numbers in [-1, 1), the same on every machine.
void draw(Row row, std::mt19937_64& generator) {
  for (auto& x : row) x = static_cast<double>(static_cast<std::int64_t>(generator())) * 0x1p-63;
}

/// Removes the components along `basis` and normalises the rest; false if the rest is too small.
bool make_unit(Row row, const std::vector<Row>& basis) {
  const double before = norm(row);
  for (int round = 0; round < 2; ++round)  // the second round removes the rounding errors of the first
    for (const auto& other : basis) {
      const double along = dot(row, other);
      for (std::size_t i = 0; i < row.size(); ++i) row[i] -= along * other[i];
    }
  const double rest = norm(row);
  if (!(rest > 1e-9 * before) || !std::isfinite(rest)) return false;
  for (auto& x : row) x /= rest;
  return true;
}

}  // namespace

bool saves_traffic(std::int64_t rows, std::int64_t columns, std::int64_t rank, double min_compression_rate) {
  const auto smaller = static_cast<double>(rows + columns) * static_cast<double>(rank);
  return smaller > 0 && smaller * min_compression_rate < static_cast<double>(rows) * static_cast<double>(columns);
}

void orthonormalise(const at::Tensor& rows, std::uint64_t seed) {
  auto values = rows.to(at::kCPU, at::kDouble).contiguous();
  const auto length = static_cast<std::size_t>(rows.size(1));
  // Scaled so that no square underflows or overflows.
  const double largest = values.abs().max().item<double>();
  if (largest > 0) values = values / largest;
  std::mt19937_64 generator(seed);
  std::vector<Row> basis;
  for (const auto r : c10::irange(rows.size(0))) {
    const Row row(values.mutable_data_ptr<double>() + static_cast<std::size_t>(r) * length, length);
    while (!make_unit(row, basis)) draw(row, generator);
    basis.push_back(row);
  }
  rows.copy_(values);
}

namespace {

/// The type of all numbers that compress() sends: the type of the bucket's gradients, or float for half types.
at::ScalarType type_of_factors(const GradBucket& bucket) { return at::toOpMathType(bucket.gradients.scalar_type()); }

void all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  group.allreduce(tensors)->wait();
}

/// Sums the tensor over the ranks, in place. True if the sum is finite; the same on all ranks. Collective.
bool all_reduce_finite(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  all_reduce(group, tensor);
  return at::isfinite(tensor).all().item<bool>();
}

PowerSgdMemory begin(const GradBucket& bucket, const PowerSgdOptions& options) {
  PowerSgdMemory memory;
  std::mt19937_64 generator(options.seed);
  for (std::size_t i = 0; i < bucket.views.size(); ++i) {
    const auto& view = bucket.views[i];
    const auto rows = view.dim() > 1 && !view.is_complex() ? view.size(0) : 0;
    const auto columns = rows > 0 ? view.numel() / rows : 0;
    const auto rank = std::min({std::int64_t{options.rank}, rows, columns});
    if (!saves_traffic(rows, columns, rank, options.min_compression_rate)) {
      memory.others.push_back(view);
      continue;
    }
    auto q = at::empty({rank, columns}, at::kDouble);
    draw({q.mutable_data_ptr<double>(), static_cast<std::size_t>(q.numel())}, generator);
    memory.matrices.push_back(
        {i, rows, columns, rank, q.to(bucket.gradients.options().dtype(type_of_factors(bucket)))});
  }
  return memory;
}

/// Returns the next rows · columns elements of `flat`, from `offset` on, as a matrix, and advances `offset`.
at::Tensor part(const at::Tensor& flat, std::int64_t& offset, std::int64_t rows, std::int64_t columns) {
  const auto piece = flat.narrow(0, offset, rows * columns).view({rows, columns});
  offset += rows * columns;
  return piece;
}

/// Returns Σ over k of the outer product of the k-th rows of p and q.
at::Tensor product(const at::Tensor& p, const at::Tensor& q) {
  auto sum = at::mul(p[0].unsqueeze(1), q[0].unsqueeze(0));
  for (const auto k : c10::irange(std::int64_t{1}, p.size(0))) sum += at::mul(p[k].unsqueeze(1), q[k].unsqueeze(0));
  return sum;
}

/// Averages a bucket that has matrices to compress. Collective.
void compress(GradBucket& bucket, c10d::ProcessGroup& group, const PowerSgdOptions& options, PowerSgdMemory& memory) {
  const auto type = type_of_factors(bucket);
  const auto seed = options.seed + static_cast<std::uint64_t>(memory.iteration);

  // Gradients that are not compressed are sent together with P. Matrices that no rank has used are skipped; their
  // errors are kept for a later round.
  std::vector<LowRank*> matrices;
  std::int64_t others = 0, elements_of_p = 0, elements_of_q = 0;
  for (const auto& other : memory.others) others += other.numel();
  for (auto& m : memory.matrices) {
    if (!bucket.used.empty() && !bucket.used[m.view]) continue;
    matrices.push_back(&m);
    elements_of_p += m.rank * m.rows;
    elements_of_q += m.rank * m.columns;
  }
  if (matrices.empty()) return all_reduce(group, bucket.gradients);
  const auto numbers = bucket.gradients.options().dtype(type);
  const auto first = at::empty({others + elements_of_p}, numbers), second = at::empty({elements_of_q}, numbers);
  std::int64_t offset = 0;
  for (const auto& other : memory.others) part(first, offset, 1, other.numel()).copy_(other.reshape({1, -1}));

  struct Factors {
    at::Tensor input, p, q;
  };
  std::vector<Factors> factors;
  std::int64_t offset_of_q = 0;
  for (auto* const matrix : matrices) {
    auto& m = *matrix;
    auto input = bucket.views[m.view].reshape({m.rows, m.columns}).to(type);
    if (options.error_feedback) input = m.error.defined() ? input + m.error : input.clone();
    factors.push_back({input, part(first, offset, m.rank, m.rows), part(second, offset_of_q, m.rank, m.columns)});
    auto& one = factors.back();
    orthonormalise(m.q, seed);
    at::mm_out(one.p, m.q, input.t());
  }
  bool finite = all_reduce_finite(group, first);
  if (finite) {
    for (auto& one : factors) {
      orthonormalise(one.p, seed);
      at::mm_out(one.q, one.p, one.input);
    }
    finite = all_reduce_finite(group, second);
  }
  if (!finite) {
    bucket.gradients.fill_(std::numeric_limits<double>::quiet_NaN());
    return;
  }

  for (std::size_t i = 0; i < factors.size(); ++i) {
    const auto& [input, p, q] = factors[i];
    auto& m = *matrices[i];
    const auto& view = bucket.views[m.view];
    view.copy_(product(p, q).view(view.sizes()));
    m.q.copy_(q);
    // The average holds 1 / ranks of the approximation for each rank; this rank keeps the rest of its own input as its
    // error.
    if (options.error_feedback) m.error = input.sub_(view.reshape({m.rows, m.columns}), 1.0 / group.getSize());
  }
  offset = 0;
  for (const auto& other : memory.others) other.copy_(part(first, offset, 1, other.numel()).view(other.sizes()));
}

}  // namespace

void SendAs::operator()(GradBucket& bucket, c10d::ProcessGroup& group) const {
  const auto& gradients = bucket.gradients;
  const bool as_it_is = gradients.is_complex() || gradients.element_size() <= 2;
  const auto sent = as_it_is ? gradients : gradients.to(type);
  all_reduce(group, sent);
  if (!as_it_is) gradients.copy_(sent);
}

}  // namespace detail::gradients

CommHook bf16_compress_hook() { return detail::gradients::SendAs{at::kBFloat16}; }
CommHook fp16_compress_hook() { return detail::gradients::SendAs{at::kHalf}; }

CommHook powersgd_hook(const PowerSgdOptions& options) {
  if (options.rank < 1 || options.start_iteration < 0 || !(options.min_compression_rate > 0))
    throw Error(ExitCode::usage, "making a PowerSGD hook",
                "the rank is less than 1, start_iteration is negative or min_compression_rate is not positive",
                "Give a rank of at least 1, and rates above 0");
  return [options](GradBucket& bucket, c10d::ProcessGroup& group) {
    if (!bucket.memory.has_value()) bucket.memory = detail::gradients::begin(bucket, options);
    auto& memory = std::any_cast<detail::gradients::PowerSgdMemory&>(bucket.memory);
    if (memory.matrices.empty() || memory.iteration < options.start_iteration)
      detail::gradients::all_reduce(group, bucket.gradients);
    else
      detail::gradients::compress(bucket, group, options, memory);
    ++memory.iteration;
  };
}

}  // namespace muster
