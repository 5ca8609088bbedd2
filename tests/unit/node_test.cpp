// The collectives within a node, with threads as ranks.
#include "muster/error.hpp"
#include "node/bucket_reduction.hpp"
#include "node/communicator.hpp"
#include "node/kernels.hpp"
#include "node/shared_segment.hpp"
#include "unit/node_threads.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using muster::Error;
using muster::ExitCode;
using muster::ReduceOp;
using muster::detail::node::Dtype;
using muster::detail::node::Isa;
using muster::detail::node::NodeCommunicator;
using muster::detail::node::Reduction;
using muster::detail::node::Region;
using muster::detail::node::size_of;
using muster::detail::node::slice_of;
using muster::test::on_ranks;
using muster::test::wait;
using Bytes = std::vector<std::byte>;

// A sanitizer or an emulated processor (tests/cross) makes everything slower by an order of magnitude.
#if defined(__SANITIZE_THREAD__) || defined(MUSTER_EMULATED)
constexpr bool brief = true;
#else
constexpr bool brief = false;
#endif

constexpr std::array all_types{Dtype::u8,   Dtype::i8,  Dtype::i16, Dtype::i32, Dtype::i64,  Dtype::f16,
                               Dtype::bf16, Dtype::f32, Dtype::f64, Dtype::c64, Dtype::c128, Dtype::boolean};
constexpr std::array all_ops{ReduceOp::sum,     ReduceOp::product, ReduceOp::min,    ReduceOp::max,
                             ReduceOp::bit_and, ReduceOp::bit_or,  ReduceOp::bit_xor};

/// Small integers, which every type holds exactly, so that results can be compared exactly; bit patterns of the halves
/// are written by hand.
int number(std::size_t i, int rank, ReduceOp op) {
  if (op == ReduceOp::product) return std::array{1, 2, 1, 1}[(i + static_cast<std::size_t>(rank)) % 4];
  return static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 3) % 5);
}

std::uint16_t half_bits(int value) {
  if (value == 0) return 0;
  const int exponent = std::bit_width(static_cast<unsigned>(value)) - 1;
  return static_cast<std::uint16_t>((exponent + 15) << 10 | ((value << 10 >> exponent) & 0x3ff));
}
std::uint16_t bfloat_bits(int value) {
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(value)) >> 16);
}

void put(std::byte* at, Dtype type, int value) {
  const auto write = [&](auto v) { std::memcpy(at, &v, sizeof v); };
  switch (type) {
    case Dtype::u8:
      return write(static_cast<std::uint8_t>(value));
    case Dtype::i8:
      return write(static_cast<std::int8_t>(value));
    case Dtype::i16:
      return write(static_cast<std::int16_t>(value));
    case Dtype::i32:
      return write(value);
    case Dtype::i64:
      return write(std::int64_t{value});
    case Dtype::f16:
      return write(half_bits(value));
    case Dtype::bf16:
      return write(bfloat_bits(value));
    case Dtype::f32:
      return write(static_cast<float>(value));
    case Dtype::f64:
      return write(static_cast<double>(value));
    case Dtype::c64:
      return write(std::complex<float>(static_cast<float>(value), 0));
    case Dtype::c128:
      return write(std::complex<double>(value, 0));
    case Dtype::boolean:
      return write(static_cast<std::uint8_t>(value != 0));
  }
}

int reduced(std::size_t i, int ranks, ReduceOp op, Dtype type) {
  int result = number(i, 0, op);
  const bool boolean = type == Dtype::boolean;
  if (boolean) result = result != 0;
  for (int r = 1; r < ranks; ++r) {
    int next = number(i, r, op);
    if (boolean) next = next != 0;
    switch (op) {
      case ReduceOp::sum:
        result += next;
        break;
      case ReduceOp::product:
        result *= next;
        break;
      case ReduceOp::min:
        result = std::min(result, next);
        break;
      case ReduceOp::max:
        result = std::max(result, next);
        break;
      case ReduceOp::bit_and:
        result &= next;
        break;
      case ReduceOp::bit_or:
        result |= next;
        break;
      case ReduceOp::bit_xor:
        result ^= next;
        break;
    }
  }
  return result;
}

void fill(std::byte* data, std::size_t count, Dtype type, ReduceOp op, int rank) {
  for (std::size_t i = 0; i < count; ++i) put(data + i * size_of(type), type, number(i, rank, op));
}

/// The first element that is not what the reduction of all ranks gives; count if there is none.
std::size_t first_wrong(const std::byte* data, std::size_t count, Dtype type, ReduceOp op, int ranks) {
  std::array<std::byte, 16> want{};
  for (std::size_t i = 0; i < count; ++i) {
    put(want.data(), type, reduced(i, ranks, op, type));
    if (std::memcmp(data + i * size_of(type), want.data(), size_of(type)) != 0) return i;
  }
  return count;
}

std::string described(Dtype type, ReduceOp op, int ranks, std::size_t count) {
  return "type " + std::to_string(static_cast<int>(type)) + ", operation " + std::to_string(static_cast<int>(op)) +
         ", " + std::to_string(ranks) + " ranks, " + std::to_string(count) + " elements";
}

TEST(Kernels, EveryTypeAndOperationOnEveryInstructionSet) {
  for (const auto isa : muster::detail::node::usable_isas()) {
    for (const auto type : all_types)
      for (const auto op : all_ops) {
        if (!muster::detail::node::is_reducible(type, op)) continue;
        for (const std::size_t count : {std::size_t{1}, std::size_t{7}, std::size_t{1024}, std::size_t{2051}}) {
          constexpr int ranks = 3;
          std::vector<Bytes> data(ranks, Bytes(count * size_of(type)));
          std::vector<const void*> sources;
          std::vector<void*> targets;
          for (int r = 0; r < ranks; ++r) {
            auto& bytes = data[static_cast<std::size_t>(r)];
            fill(bytes.data(), count, type, op, r);
            sources.push_back(bytes.data());
            targets.push_back(bytes.data());
          }
          muster::detail::node::reduce_arrays(targets, sources, count, {type, op}, isa);
          for (const auto& bytes : data)
            ASSERT_EQ(first_wrong(bytes.data(), count, type, op, ranks), count) << described(type, op, ranks, count);
        }
      }
  }
}

TEST(Kernels, RefuseWhatHasNoMeaning) {
  EXPECT_FALSE(muster::detail::node::is_reducible(Dtype::f32, ReduceOp::bit_and));
  EXPECT_FALSE(muster::detail::node::is_reducible(Dtype::c64, ReduceOp::max));
  EXPECT_TRUE(muster::detail::node::is_reducible(Dtype::boolean, ReduceOp::bit_xor));
}

/// Adds 0 to every pattern, so that it goes through float and back.
std::vector<std::uint16_t> round_trip(Dtype type, Isa isa) {
  std::vector<std::uint16_t> values(65536), zeroes(65536);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::uint16_t>(i);
  void* const target = values.data();
  const std::array<const void*, 2> sources{values.data(), zeroes.data()};
  muster::detail::node::reduce_arrays(std::span(&target, 1), sources, values.size(), {.type = type}, isa);
  return values;
}

TEST(Kernels, EveryHalfSurvivesTheWayThroughFloat) {
  for (const auto isa : muster::detail::node::usable_isas()) {
    for (const auto type : {Dtype::f16, Dtype::bf16}) {
      const auto values = round_trip(type, isa);
      const std::uint16_t infinity = type == Dtype::f16 ? 0x7c00 : 0x7f80;
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto magnitude = i & 0x7fff;
        if (magnitude > infinity)
          EXPECT_GT(values[i] & 0x7fff, infinity) << i;  // still a NaN
        else
          EXPECT_EQ(values[i], i == 0x8000 ? 0 : i) << i;  // -0 + 0 is 0
      }
    }
  }
}

TEST(Kernels, HalvesAreRoundedOnceToNearest) {
  // With three ranks 2048 + 1 + 1 is 2050 in half precision, but 2048 if each partial sum is rounded.
  const std::array<std::uint16_t, 3> ranks{half_bits(2048), half_bits(1), half_bits(1)};
  for (const auto isa : muster::detail::node::usable_isas()) {
    std::vector<std::vector<std::uint16_t>> data;
    for (const auto value : ranks) data.emplace_back(11, value);
    const std::array<const void*, 3> sources{data[0].data(), data[1].data(), data[2].data()};
    void* const target = data[0].data();
    muster::detail::node::reduce_arrays(std::span(&target, 1), sources, 11, {.type = Dtype::f16}, isa);
    for (const auto value : data[0]) EXPECT_EQ(value, half_bits(2050));
  }
}

/// The half-precision number nearest to x, computed without bits: `digits` of fraction, exponents from `lowest` on.
float rounded_to_half(float x, Dtype type) {
  const int digits = type == Dtype::f16 ? 10 : 7, lowest = type == Dtype::f16 ? -14 : -126;
  if (x == 0 || !std::isfinite(x)) return x;
  const float unit = std::ldexp(1.0F, std::max(std::ilogb(x), lowest) - digits);
  const auto nearest = static_cast<double>(std::nearbyint(x / unit)) * unit;
  const double largest = type == Dtype::f16 ? 65504 : std::ldexp(255.0, 120);
  return static_cast<float>(std::abs(nearest) > largest ? std::copysign(INFINITY, nearest) : nearest);
}

float float_of_half(std::uint16_t bits, Dtype type) {
  if (type == Dtype::bf16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  const float magnitude = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                          : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                          : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

TEST(Kernels, HalvesAreWhatPlainArithmeticGives) {
  // Every number of the type with a random one, so that results lie between two numbers, are subnormal and overflow.
  std::mt19937 random(1);
  std::vector<std::uint16_t> all(65536), others(65536), results(65536);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::uint16_t>(i);
    others[i] = static_cast<std::uint16_t>(random());
  }
  for (const auto isa : muster::detail::node::usable_isas())
    for (const auto type : {Dtype::f16, Dtype::bf16})
      for (const auto op : {ReduceOp::sum, ReduceOp::product})
        for (const double scale : {1.0, 1.0 / 3}) {
          const std::array<const void*, 2> sources{all.data(), others.data()};
          void* const target = results.data();
          muster::detail::node::reduce_arrays(std::span(&target, 1), sources, all.size(), {type, op, scale}, isa);
          for (std::size_t i = 0; i < all.size(); ++i) {
            const float a = float_of_half(all[i], type), b = float_of_half(others[i], type);
            const float exact = (op == ReduceOp::sum ? a + b : a * b) * static_cast<float>(scale);
            const float want = rounded_to_half(exact, type), got = float_of_half(results[i], type);
            ASSERT_TRUE(got == want || (std::isnan(got) && std::isnan(want)))
                << a << " with " << b << " is " << got << " instead of " << want << ", instruction set "
                << static_cast<int>(isa) << ", type " << static_cast<int>(type);
          }
        }
}

TEST(Kernels, ANumberThatIsNoneIsKept) {
  const float nan = std::nanf("");
  for (const auto op : {ReduceOp::min, ReduceOp::max, ReduceOp::sum}) {
    std::array<float, 2> a{nan, 1}, b{2, nan};
    const std::array<const void*, 2> sources{a.data(), b.data()};
    void* const target = a.data();
    muster::detail::node::reduce_arrays(std::span(&target, 1), sources, 2, {.type = Dtype::f32, .op = op});
    EXPECT_TRUE(std::isnan(a[0]) && std::isnan(a[1]));
  }
}

TEST(NodeCommunicator, SlicesCoverEverythingOnce) {
  for (const std::size_t count : {0, 1, 15, 16, 17, 1000, 4097})
    for (int owners = 1; owners <= 8; ++owners) {
      std::size_t next = 0;
      for (int o = 0; o < owners; ++o) {
        const auto slice = slice_of(count, owners, o, Dtype::f32);
        EXPECT_EQ(slice.first, next);
        next += slice.count;
      }
      EXPECT_EQ(next, count);
    }
}

/// An all-reduce, a broadcast and a reduction of that type and size; with registered memory where `registered` says so
/// for the rank.
void check_collectives(int ranks, Dtype type, ReduceOp op, std::size_t count,
                       const std::function<bool(int)>& registered) {
  const auto bytes = count * size_of(type);
  const std::size_t odd = size_of(type);  // data begin one element into the memory
  on_ranks(ranks, bytes + odd + 64, [&](NodeCommunicator& local, const Region& region) {
    Bytes own(bytes + odd);
    std::byte* data = (registered(local.rank()) ? region.of(local.rank()) : own.data()) + odd;
    fill(data, count, type, op, local.rank());
    wait(local, local.all_reduce(data, count, {type, op}));
    EXPECT_EQ(first_wrong(data, count, type, op, ranks), count) << "all-reduce, " << described(type, op, ranks, count);

    const int root = ranks - 1;
    fill(data, count, type, op, local.rank());
    wait(local, local.reduce(data, count, {type, op}, root));
    if (local.rank() == root) {
      EXPECT_EQ(first_wrong(data, count, type, op, ranks), count) << "reduce, " << described(type, op, ranks, count);
    }
    wait(local, local.broadcast(data, bytes, root));
    EXPECT_EQ(first_wrong(data, count, type, op, ranks), count) << "broadcast, " << described(type, op, ranks, count);

    for (int owners = 1; owners <= ranks; owners += ranks) {
      fill(data, count, type, op, local.rank());
      wait(local, local.reduce_scatter(data, count, owners, {type, op}));
      const auto shared = local.all_gather(data, count, owners, type, NodeCommunicator::Start::closed);
      EXPECT_FALSE(local.done(shared));
      local.open(shared);
      wait(local, shared);
      EXPECT_EQ(first_wrong(data, count, type, op, ranks), count) << "slices, " << described(type, op, ranks, count);
    }
  });
}

TEST(NodeCommunicator, EveryCollectiveOfEveryTypeAndOperation) {
  for (int ranks = 1; ranks <= (brief ? 3 : 5); ++ranks)
    for (const auto type : all_types)
      for (const auto op : all_ops) {
        if (!muster::detail::node::is_reducible(type, op)) continue;
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1001}, std::size_t{9001}}) {
          if (brief && count > 5000) continue;
          check_collectives(ranks, type, op, count, [](int) { return false; });
          check_collectives(ranks, type, op, count, [](int) { return true; });
        }
      }
}

TEST(NodeCommunicator, EverySizeAndNumberOfRanks) {
  for (int ranks = 1; ranks <= 8; ++ranks)
    for (const std::size_t count : {2UL, 63UL, 2049UL, 16'385UL, 70'001UL, 300'007UL, 700'001UL}) {
      if (brief && (count > 80'000 || ranks % 3 == 1)) continue;
      check_collectives(ranks, Dtype::f32, ReduceOp::sum, count, [](int) { return false; });
      check_collectives(ranks, Dtype::f32, ReduceOp::sum, count, [](int) { return true; });
      check_collectives(ranks, Dtype::bf16, ReduceOp::sum, count, [](int rank) { return rank == 0; });
    }
}

TEST(NodeCommunicator, TenMillionElements) {
  if (brief) GTEST_SKIP() << "too slow under the thread sanitizer or an emulator";
  check_collectives(2, Dtype::f32, ReduceOp::sum, 10'000'000, [](int) { return false; });
  check_collectives(2, Dtype::f32, ReduceOp::sum, 10'000'000, [](int) { return true; });
  check_collectives(3, Dtype::f16, ReduceOp::sum, 10'000'000, [](int) { return true; });
}

TEST(NodeCommunicator, SameBitsOnEveryRankOnEveryPathAndCloseToASumInDouble) {
  for (int ranks = 1; ranks <= 4; ++ranks)
    for (const std::size_t count : {1000UL, 50'001UL, brief ? 60'000UL : 1'000'003UL}) {
      const auto value = [&](std::size_t i, int rank) {
        return std::sin(static_cast<float>(i) + 1.7f * static_cast<float>(rank)) * 1e3f;
      };
      std::vector<std::vector<float>> results(static_cast<std::size_t>(2 * ranks));
      on_ranks(ranks, count * 4, [&](NodeCommunicator& local, const Region& region) {
        std::vector<float> own(count);
        float* registered = reinterpret_cast<float*>(region.of(local.rank()));
        for (std::size_t i = 0; i < count; ++i) own[i] = registered[i] = value(i, local.rank());
        wait(local, local.all_reduce(own.data(), count, {.scale = 1.0 / ranks}));
        wait(local, local.all_reduce(registered, count, {.scale = 1.0 / ranks}));
        const auto r = static_cast<std::size_t>(local.rank());
        results[2 * r] = own;
        results[2 * r + 1].assign(registered, registered + count);
      });
      for (const auto& result : results) ASSERT_EQ(std::memcmp(result.data(), results[0].data(), count * 4), 0);
      for (std::size_t i = 0; i < count; ++i) {
        double sum = 0;
        for (int r = 0; r < ranks; ++r) sum += value(i, r);
        ASSERT_NEAR(results[0][i], sum / ranks, 1e3 * 1.2e-7 * ranks);
      }
    }
}

TEST(NodeCommunicator, AClosedOperationHoldsUpThoseBehindIt) {
  constexpr int ranks = 3;
  constexpr std::size_t count = 1000;
  on_ranks(ranks, 1, [&](NodeCommunicator& local, const Region&) {
    Bytes data(count * 4), other(count * 4);
    fill(data.data(), count, Dtype::f32, ReduceOp::sum, local.rank());
    fill(other.data(), count, Dtype::f32, ReduceOp::sum, local.rank());
    wait(local, local.reduce_scatter(data.data(), count, 2, {}));
    const bool owner = local.rank() < 2;
    const auto shared = local.all_gather(data.data(), count, 2, Dtype::f32,
                                         owner ? NodeCommunicator::Start::closed : NodeCommunicator::Start::open);
    const auto behind = local.all_reduce(other.data(), count, {});
    if (owner) {
      for (int i = 0; i < 100; ++i) ASSERT_FALSE(local.done(behind));
      local.open(shared);
    }
    wait(local, behind);
    EXPECT_TRUE(local.is_finished(shared));
    for (const auto* sum : {&data, &other})
      EXPECT_EQ(first_wrong(sum->data(), count, Dtype::f32, ReduceOp::sum, ranks), count);
  });
}

/// Several operations at once, of all kinds, memory and sizes.
TEST(NodeCommunicator, AThousandRandomOperations) {
  for (int ranks = 1; ranks <= 4; ++ranks) {
    constexpr std::size_t most = 40'000;
    constexpr std::size_t places = 4;
    on_ranks(ranks, places * most * 8, [&](NodeCommunicator& local, const Region& region) {
      std::mt19937 same(7);  // what all ranks do alike
      std::mt19937 mine(static_cast<unsigned>(local.rank()));
      struct Running {
        NodeCommunicator::Ticket ticket;
        std::function<void()> check;
      };
      std::deque<Running> running;
      std::vector<Bytes> own(places, Bytes(most * 8));
      const int rounds = brief ? 200 : 1000;
      for (int i = 0; i < rounds; ++i) {
        if (running.size() == places || (!running.empty() && same() % 3 == 0)) {
          wait(local, running.front().ticket);
          running.front().check();
          running.pop_front();
        }
        if (running.size() == places) continue;
        const auto place = static_cast<std::size_t>(i) % places;
        if (!running.empty() && running.size() >= places - 1) {
          wait(local, running.front().ticket);
          running.front().check();
          running.pop_front();
        }
        const auto type = std::array{Dtype::f32, Dtype::f64, Dtype::i32, Dtype::bf16}[same() % 4];
        const std::size_t count = same() % (same() % 4 == 0 ? most : 700);
        std::byte* data = mine() % 4 != 0 ? region.of(local.rank()) + place * most * 8 : own[place].data();
        const int root = static_cast<int>(same() % static_cast<unsigned>(ranks));
        const auto kind = same() % 8;
        const auto right = [=] { EXPECT_EQ(first_wrong(data, count, type, ReduceOp::sum, ranks), count) << i; };
        fill(data, count, type, ReduceOp::sum, local.rank());
        if (kind == 0) {
          running.push_back({local.barrier(), [] {}});
        } else if (kind == 1) {
          const bool root_here = local.rank() == root;
          running.push_back({local.reduce(data, count, {.type = type}, root), [=] {
                               if (root_here) right();
                             }});
        } else if (kind == 2) {
          running.push_back({local.broadcast(data, count * size_of(type), root), [=] {
                               Bytes want(count * size_of(type));
                               fill(want.data(), count, type, ReduceOp::sum, root);
                               EXPECT_TRUE(std::equal(want.begin(), want.end(), data)) << i;
                             }});
        } else {
          running.push_back({local.all_reduce(data, count, {.type = type}), right});
        }
      }
      while (!running.empty()) {
        wait(local, running.front().ticket);
        running.front().check();
        running.pop_front();
      }
    });
  }
}

using muster::detail::node::BucketReduction;

TEST(BucketReduction, SumsEveryRoundAndCarriesTheWords) {
  const std::vector<BucketReduction::Bucket> buckets{
      {70'000, Dtype::f32}, {1, Dtype::f32}, {0, Dtype::f32}, {300'001, Dtype::f32}, {513, Dtype::bf16}};
  const std::size_t bytes = 400'000 * 4;
  for (int ranks = 1; ranks <= 5; ++ranks) {
    const auto control =
        muster::test::shared_bytes(BucketReduction::memory_bytes(ranks, buckets.size(), buckets.size()));
    on_ranks(ranks, 2 * bytes, [&](NodeCommunicator& local, const Region& region) {
      BucketReduction reduction(control.get(), region, local.rank(), ranks, buckets, buckets.size());
      const auto sum = muster::detail::node::in_place_sum(buckets, 1.0);
      for (int round = 0; round < (brief ? 5 : 20); ++round) {
        reduction.begin();
        std::byte* data = region.of(local.rank()) + (round + local.rank()) % 2 * bytes;  // where they lie may change
        std::vector<std::byte*> at;
        for (std::size_t b = 0; b < buckets.size(); ++b) {
          fill(data, buckets[b].count, buckets[b].type, ReduceOp::sum, local.rank());
          at.push_back(data);
          reduction.write_word(
              b, static_cast<std::uint32_t>(1000 * round + 10 * local.rank()) + static_cast<std::uint32_t>(b));
          reduction.announce(data);
          data += (buckets[b].count * size_of(buckets[b].type) + 63) / 64 * 64;
          reduction.advance(sum);
        }
        muster::test::wait_for([&] { return reduction.advance(sum); });
        for (std::size_t b = 0; b < buckets.size(); ++b) {
          ASSERT_EQ(first_wrong(at[b], buckets[b].count, buckets[b].type, ReduceOp::sum, ranks), buckets[b].count);
          for (int r = 0; r < ranks; ++r)
            ASSERT_EQ(reduction.word(r, b), 1000U * static_cast<unsigned>(round) + 10U * static_cast<unsigned>(r) + b);
        }
      }
    });
  }
}

TEST(BucketReduction, WithASecondThreadPerRankAndAnotherOrder) {
  const std::vector<BucketReduction::Bucket> buckets{{70'000, Dtype::f32}, {5, Dtype::f32}, {300'001, Dtype::f32}};
  const std::vector<std::vector<std::size_t>> orders{{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
  const std::size_t bytes = 400'000 * 4;
  for (int ranks = 1; ranks <= 3; ++ranks) {
    const auto control = muster::test::shared_bytes(BucketReduction::memory_bytes(ranks, buckets.size(), 0));
    std::atomic<int> chunks{0};
    on_ranks(ranks, bytes, [&](NodeCommunicator& local, const Region& region) {
      BucketReduction reduction(control.get(), region, local.rank(), ranks, buckets, 0);
      const auto sum = muster::detail::node::in_place_sum(buckets, 1.0);
      const auto count = [&chunks](BucketReduction::OnChunk work) -> BucketReduction::OnChunk {
        return
            [&chunks, work = std::move(work)](const BucketReduction::Chunk& chunk, std::span<std::byte* const> data) {
              ++chunks;
              work(chunk, data);
            };
      };
      for (int round = 0; round < (brief ? 6 : 30); ++round) {
        reduction.reorder(orders[static_cast<std::size_t>(round) % orders.size()]);
        reduction.begin();
        std::atomic<bool> computing{true};
        std::thread helper([&, work = count(sum)] {
          while (computing) reduction.process_chunk(work);
        });
        std::vector<std::byte*> at(buckets.size());
        std::byte* data = region.of(local.rank());
        for (const auto b : reduction.order()) {
          fill(data, buckets[b].count, buckets[b].type, ReduceOp::sum, local.rank());
          at[b] = data;
          reduction.announce(data);
          data += (buckets[b].count * size_of(buckets[b].type) + 63) / 64 * 64;
        }
        computing = false;
        helper.join();
        const auto work = count(sum);
        muster::test::wait_for([&] { return reduction.advance(work); });
        for (std::size_t b = 0; b < buckets.size(); ++b)
          ASSERT_EQ(first_wrong(at[b], buckets[b].count, buckets[b].type, ReduceOp::sum, ranks), buckets[b].count);
      }
      EXPECT_EQ(reduction.chunks(), 8U);
    });
    EXPECT_EQ(chunks, (brief ? 6 : 30) * 8) << "each chunk once a round";
  }
}

TEST(BucketReduction, EveryChunkIsWorkedOnOnce) {
  constexpr int ranks = 3;
  const std::vector<BucketReduction::Bucket> buckets{{200'000, Dtype::f32}, {5, Dtype::f32}, {100'000, Dtype::f64}};
  const auto control = muster::test::shared_bytes(BucketReduction::memory_bytes(ranks, buckets.size(), buckets.size()));
  std::vector<std::atomic<int>> touched(300'005);
  on_ranks(ranks, 4096, [&](NodeCommunicator& local, const Region& region) {
    BucketReduction reduction(control.get(), region, local.rank(), ranks, buckets, 0);
    const BucketReduction::OnChunk touch = [&](const BucketReduction::Chunk& chunk, std::span<std::byte* const> data) {
      ASSERT_EQ(data.size(), static_cast<std::size_t>(ranks));
      const std::size_t before = chunk.bucket == 0 ? 0 : chunk.bucket == 1 ? 200'000 : 200'005;
      for (std::size_t i = 0; i < chunk.count; ++i) ++touched[before + chunk.first + i];
    };
    for (int round = 0; round < 2; ++round) {
      reduction.begin();
      for (std::size_t b = 0; b < buckets.size(); ++b) reduction.announce(region.of(local.rank()));
      muster::test::wait_for([&] { return reduction.advance(touch); });
    }
  });
  for (const auto& count : touched) ASSERT_EQ(count, 2);
}

using muster::detail::node::SharedSegment;

std::filesystem::path path_of(const std::string& name) { return "/dev/shm" + name; }

TEST(SharedSegment, ItsNameGoesWithWhoCreatedIt) {
  std::filesystem::path path;
  {
    auto segment = SharedSegment::create(4096);
    path = path_of(segment.name());
    {
      const auto other = SharedSegment::open(segment.name(), 4096);
      segment.reserve(0, 4096);
      segment.data()[7] = std::byte{7};
      EXPECT_EQ(other.data()[7], std::byte{7});
    }
    EXPECT_TRUE(std::filesystem::exists(path));
    auto moved = std::move(segment);
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

/// True if a child of fork() succeeds with the first function and then its own child with the second.
bool in_child(const std::function<bool()>& work, const std::function<bool()>& then) {
  const auto forked = [](const std::function<bool()>& body) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(body() ? 0 : 1);
    int status = -1;
    ::waitpid(child, &status, 0);
    return status == 0;
  };
  return forked([&] { return work() && forked(then); });
}

TEST(SharedSegment, AChildOfForkWritesToMemoryOfItsOwn) {
  constexpr std::size_t bytes = 3 << 20;
  auto segment = SharedSegment::create(bytes);
  const auto other = SharedSegment::open(segment.name(), bytes);
  segment.unlink();
  segment.reserve(0, bytes);
  segment.data()[7] = segment.data()[bytes - 1] = std::byte{7};
  const auto view = segment.private_view(0, bytes);
  view.get()[8] = std::byte{8};
  auto moved = std::move(segment);
  const auto child = [&] {
    if (moved.data()[7] != std::byte{7} || other.data()[bytes - 1] != std::byte{7}) return false;
    moved.data()[7] = other.data()[bytes - 1] = view.get()[9] = std::byte{1};
    moved.discard(0, bytes);
    return view.get()[8] == std::byte{8};
  };
  const auto grandchild = [&] {
    if (moved.data()[7] != std::byte{1} || other.data()[bytes - 1] != std::byte{1}) return false;
    moved.data()[7] = std::byte{2};
    return view.get()[9] == std::byte{1};
  };
  EXPECT_TRUE(in_child(child, grandchild));
  EXPECT_EQ(moved.data()[7], std::byte{7});
  EXPECT_EQ(other.data()[7], std::byte{7});
  EXPECT_EQ(moved.data()[bytes - 1], std::byte{7});
  EXPECT_EQ(view.get()[9], std::byte{0});
  other.data()[5] = std::byte{5};
  EXPECT_EQ(moved.data()[5], std::byte{5}) << "here it is shared as before";
}

/// A process that has created a segment and not yet removed its name.
struct Maker {
  Maker() {
    int ends[2];
    if (::pipe(ends) != 0) return;
    pid = ::fork();
    if (pid == 0) {
      const auto segment = SharedSegment::create(1 << 20);
      if (::write(ends[1], segment.name().data(), segment.name().size()) > 0)
        for (;;) ::pause();
      ::_exit(1);
    }
    char text[64] = {};
    if (::read(ends[0], text, sizeof text - 1) > 0) path = path_of(text);
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~Maker() {
    kill();
    std::filesystem::remove(path);
  }
  void kill() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    pid = 0;
  }
  void make_old() const {
    const timespec times[] = {{std::time(nullptr) - 3600, 0}, {std::time(nullptr) - 3600, 0}};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  }
  pid_t pid = 0;
  std::filesystem::path path;
};

TEST(SharedSegment, OnlyWhatADeadProcessHasLeftIsRemoved) {
  Maker living, dead, recent, of_another;
  for (const auto* maker : {&living, &dead, &of_another}) maker->make_old();
  const bool root = ::geteuid() == 0;
  if (root) {
    ASSERT_EQ(::chown(of_another.path.c_str(), 65534, 65534), 0);
  }
  for (auto* maker : {&dead, &recent, &of_another}) maker->kill();

  SharedSegment::remove_leftovers();
  EXPECT_FALSE(std::filesystem::exists(dead.path));
  EXPECT_TRUE(std::filesystem::exists(living.path)) << "its job is under way";
  EXPECT_TRUE(std::filesystem::exists(recent.path)) << "it may be about to take the lock";
  EXPECT_EQ(std::filesystem::exists(of_another.path), root);
  living.kill();
  SharedSegment::remove_leftovers();
  EXPECT_FALSE(std::filesystem::exists(living.path));
}

TEST(NodeCommunicator, SaysThatRanksAreInDifferentCalls) {
  for (int size = 2; size <= 4; ++size)
    for (int other = 0; other < size; ++other) {
      std::atomic<int> seen{0};
      on_ranks(size, 0, [&](NodeCommunicator& local, const Region&) {
        local.set_call_number(16);
        wait(local, local.barrier());
        local.set_call_number(17);
        float values[1024] = {};
        try {
          wait(local, local.rank() == other ? local.barrier() : local.all_reduce(values, 1024, {}));
          ADD_FAILURE() << "they differ";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ExitCode::user_error);
          const std::string text = error.what();
          const auto says = [&](const std::string& what) { return text.find(what) != std::string::npos; };
          EXPECT_TRUE(says("rank " + std::to_string(other) + " ")) << text;
          EXPECT_TRUE(says("barrier() as its 17th") && says("all_reduce(float32 [1024], sum) as its 17th")) << text;
          ++seen;
        }
      });
      EXPECT_EQ(seen, size);
    }
}

TEST(NodeCommunicator, SaysThatLengthsDiffer) {
  std::atomic<int> seen{0};
  on_ranks(2, 0, [&](NodeCommunicator& local, const Region&) {
    std::vector<float> values(100'000 + static_cast<std::size_t>(local.rank()));
    try {
      wait(local, local.all_reduce(values.data(), values.size(), {}));
    } catch (const Error&) {
      ++seen;
    }
  });
  EXPECT_EQ(seen, 2);
}

}  // namespace
