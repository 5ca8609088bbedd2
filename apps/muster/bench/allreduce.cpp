// muster bench allreduce: sums fp32 values over the ranks, in place.
#include "base/text.hpp"
#include "bench.hpp"
#include "rounds.hpp"

#include <muster/error.hpp>
#include <muster/mpi.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace muster::bench {
namespace {

struct Case {
  const char* name;
  std::size_t bytes;
};

constexpr std::array<Case, 5> cases{{{"4 KB", std::size_t{4} << 10},
                                     {"64 KB", std::size_t{64} << 10},
                                     {"1 MB", std::size_t{1} << 20},
                                     {"25 MB", std::size_t{25} << 20},
                                     {"100 MB", std::size_t{100} << 20}}};

/// Returns how often an operation is repeated in a round: often enough to process `volume` bytes, so that the time is
/// far above the clock's resolution and the differences between ranks at the barrier. At most `most` times.
int repeats(std::size_t bytes, std::size_t volume, std::size_t most) {
  return static_cast<int>(std::clamp<std::size_t>(volume / bytes, 1, most));
}

/// A candidate may take this long in a round; a slow candidate is repeated less often.
constexpr double longest_ms = 500;

/// Returns a value between -1 and 1 that depends on index, rank and round.
float value(std::size_t index, int rank, int round) {
  auto bits = static_cast<std::uint32_t>(index) * 2654435761U + static_cast<std::uint32_t>(rank) * 0x9E3779B9U +
              static_cast<std::uint32_t>(round) * 0x85EBCA6BU;
  bits ^= bits >> 15;
  bits *= 0x2C1B3C6DU;
  bits ^= bits >> 12;
  return static_cast<float>(static_cast<std::int32_t>(bits)) * 0x1p-31F;
}

/// One way to compute a sum, with its memory. Its results are checked twice. Before the timed part, it adds values with
/// a known sum. The timed part sums in place repeatedly, which would overflow, so its values have the sum zero; that is
/// checked after it.
class Reduction {
 public:
  using Sum = std::function<void(std::span<float>)>;
  Reduction(std::string name, const Communicator& communicator, std::span<float> values, Sum sum)
      : name_(std::move(name)), communicator_(communicator), values_(values), sum_(std::move(sum)) {}

  void before() {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = value(i, rank(), round_);
    sum_(values_);
    require_sum();
    ++round_;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const auto part = static_cast<float>(i % 251 + 1);
      values_[i] = rank() == 0 ? part * static_cast<float>(1 - communicator_.size()) : part;
    }
  }
  void run(int count) {
    for (int i = 0; i < count; ++i) sum_(values_);
  }
  void after() const {
    if (!std::all_of(values_.begin(), values_.end(), [](float value) { return value == 0; }))
      fail("values that add up to zero do not");
  }

 private:
  int rank() const { return communicator_.rank(); }

  void require_sum() const {
    const int size = communicator_.size();
    const double tolerance = size * size * 1.2e-7;
    for (std::size_t i = 0; i < values_.size(); ++i) {
      double exact = 0;
      for (int rank = 0; rank < size; ++rank) exact += static_cast<double>(value(i, rank, round_));
      if (!(std::abs(static_cast<double>(values_[i]) - exact) <= tolerance))
        fail(detail::str("value ", i, " is ", values_[i], ", not ", exact));
    }
    if (!same_on_all_ranks(communicator_, std::as_bytes(values_))) fail("the ranks have different sums");
  }
  [[noreturn]] void fail(const std::string& fact) const {
    throw Error(ExitCode::user_error, "checking the all-reduce of " + name_, fact,
                "Do not use the figures of this run");
  }

  std::string name_;
  Communicator communicator_;
  std::span<float> values_;
  Sum sum_;
  int round_ = 0;
};

Candidate candidate(const std::string& name, const Communicator& communicator, std::span<float> values,
                    Reduction::Sum sum) {
  const auto reduction = std::make_shared<Reduction>(name, communicator, values, std::move(sum));
  const int wanted = repeats(values.size_bytes(), std::size_t{8} << 20, 500);
  // If ranks share cores, a candidate may take a thousand times as long. So first measure how long one call takes.
  reduction->run(3);
  const double once = timed(communicator, [&] { reduction->run(3); }) / 3;
  const int count = std::clamp(static_cast<int>(longest_ms / once), 1, wanted);
  return {.name = name,
          .operations = count,
          .run = [=] { reduction->run(count); },
          .before = [=] { reduction->before(); },
          .after = [=] { reduction->after(); }};
}

void sum_with_mpi(std::span<float> values) {
  const int error =
      MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (error != MPI_SUCCESS)
    throw Error(ExitCode::retry, "running MPI_Allreduce", detail::str("it ended with error ", error));
}

Candidate memcpy_candidate(std::span<float> from, std::span<float> to) {
  const int count = repeats(from.size_bytes(), std::size_t{64} << 20, 20000);
  return {.name = "memcpy", .operations = count, .run = [=] {
            for (int i = 0; i < count; ++i) {
              std::memcpy(to.data(), from.data(), from.size_bytes());
              asm volatile("" : : "r"(to.data()) : "memory");  // keeps the compiler from removing the copies
            }
          }};
}

Row measure_size(Launch& launch, const std::string& name, const Options&, const Measurement& measurement) {
  const auto& wanted = *std::ranges::find(cases, name, &Case::name);
  const auto& communicator = launch.communicator();
  const auto memory = communicator.shared_memory(wanted.bytes);
  const auto shared = memory.as<float>();
  std::vector<float> first(shared.size()), second(shared.size());
  const auto sum = [&](std::span<float> values) { communicator.all_reduce(values); };
  const std::vector<Candidate> candidates{
      candidate(ours, communicator, shared, sum),
      candidate("mpi", communicator, first, sum_with_mpi),
      candidate("muster_private", communicator, first, sum),
      candidate(twin, communicator, shared, sum),
      memcpy_candidate(first, second),
  };
  return make_row(name, measure(communicator, candidates, measurement));
}

}  // namespace

Benchmark allreduce() {
  Benchmark benchmark{.measure_in_process = measure_size};
  for (const auto& entry : cases) benchmark.cases.emplace_back(entry.name);
  return benchmark;
}

}  // namespace muster::bench
