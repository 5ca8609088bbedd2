// Plays random collectives through several process groups at once and compares every tensor with a plain result.
//   mpirun -n RANKS groups --first SEED --count PROGRAMS
//   mpirun -n RANKS groups --seed SEED             one program, printed call by call
// Every rank computes from the seed what each rank contributes. Expected results are computed in double precision or in
// 64-bit integers. Ends with 1 if a tensor differs, and prints the command that repeats the program. A program that
// ends with an error or does not end also ends the programs after it; the last line says which one it was.
#include "muster/error.hpp"
#include "muster/process_group.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace muster::soak {
namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The groups that all programs use: of all ranks, of some ranks, on one node, and on several simulated nodes.

struct Group {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::vector<int> ranks;  ///< [size], as ranks of the world
  int rank = 0;

  int size() const { return static_cast<int>(ranks.size()); }
};

/// Collective.
std::vector<Group> make_groups(const Communicator& world) {
  const int me = world.rank();
  std::vector<Group> groups;
  const auto add = [&](const Communicator& ranks, std::size_t chunk = std::size_t{1} << 30) {
    Group made{make_process_group(ranks, {.timeout = patience, .chunk = chunk}), {}, ranks.rank()};
    for (const auto& rank : ranks.all_gather(std::to_string(me))) made.ranks.push_back(std::stoi(rank));
    groups.push_back(std::move(made));
  };
  const auto pairs = on_nodes(world, [](int r) { return r / 2; });
  const auto uneven = on_nodes(world, [](int r) { return r == 0 ? 0 : 1; });
  const auto apart = on_nodes(world, [](int r) { return r; });
  for (const auto* ranks : {&world, &world, &pairs, &uneven, &apart}) add(*ranks);
  add(world, 1000);
  add(apart, 777);
  add(world.split(me % 2));
  add(world.split(me == 0 ? 0 : 1, -me));
  add(pairs.split(me % 2, me));
  return groups;
}

// Tensors.

/// The memory layout of a tensor.
enum class MemoryLayout { plain, odd_offset, strided, transposed };

/// A tensor that is a part of a larger block of memory. The bytes around it must not change.
struct PlacedTensor {
  MemoryLayout lay = MemoryLayout::plain;
  at::Tensor memory;
  at::Tensor tensor;

  PlacedTensor(const at::Tensor& values, MemoryLayout how) : lay(how) {
    const auto n = values.numel();
    const auto filled = [&](at::IntArrayRef sizes) { return at::full(sizes, 3.0F).to(values.scalar_type()); };
    switch (lay) {
      case MemoryLayout::plain:
        memory = filled({n});
        break;
      case MemoryLayout::odd_offset:
        memory = filled({n + 2});
        break;
      case MemoryLayout::strided:
        memory = filled({n, 3});
        break;
      case MemoryLayout::transposed:
        memory = filled({n % 2 == 0 ? n / 2 : n, n % 2 == 0 ? 2 : 1});
        break;
    }
    tensor = part(memory, n);
    tensor.copy_(values.view(tensor.sizes()));
  }

  at::Tensor part(const at::Tensor& of, std::int64_t n) const {
    switch (lay) {
      case MemoryLayout::odd_offset:
        return of.narrow(0, 1, n);
      case MemoryLayout::strided:
        return of.select(1, 1);
      case MemoryLayout::transposed:
        return of.t();
      default:
        return of;
    }
  }
  at::Tensor flat() const { return tensor.reshape(-1); }
};

/// The type in which expected results are computed.
at::ScalarType exact_type(at::ScalarType type) {
  if (at::isComplexType(type)) return at::kComplexDouble;
  return at::isIntegralType(type, /*includeBool=*/true) ? at::kLong : at::kDouble;
}

at::Tensor widened(const at::Tensor& tensor) { return tensor.to(exact_type(tensor.scalar_type())); }

/// The relative error of one rounding to the type.
double rounding(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return 0x1p-11;
    case at::kBFloat16:
      return 0x1p-8;
    case at::kFloat:
    case at::kComplexFloat:
      return 0x1p-23;
    default:
      return 0x1p-52;
  }
}

/// Marks the elements that differ by more than `allowed` [same shape], or at all if it is undefined. NaN equals NaN.
at::Tensor different(const at::Tensor& a, const at::Tensor& b, const at::Tensor& allowed = {}) {
  const auto apart = at::logical_and(a.ne(b), at::logical_or(a.eq(a), b.eq(b)));
  return allowed.defined() ? at::logical_and(apart, (a - b).abs().le(allowed).logical_not()) : apart;
}

/// A tensor and the values that it must hold in the end.
struct Expected {
  PlacedTensor placed;
  at::Tensor values;        ///< [elements] of exact_type()
  at::Tensor allowed = {};  ///< the largest difference allowed; undefined: exact

  std::optional<std::string> difference() const {
    const auto have = widened(placed.flat());
    const auto want = values.to(placed.tensor.scalar_type()).to(have.scalar_type());
    if (const auto apart = different(have, want, allowed).nonzero().view(-1); apart.numel() > 0) {
      const auto i = apart[0].item<std::int64_t>();
      return "element " + std::to_string(i) + " of " + std::to_string(have.numel()) + " is " +
             c10::str(have[i].item()) + " instead of " + c10::str(want[i].item());
    }
    const PlacedTensor untouched(placed.flat(), placed.lay);
    if (different(widened(untouched.memory), widened(placed.memory)).any().item<bool>())
      return "memory beside a tensor was written";
    return std::nullopt;
  }
};

/// The sets from which values are drawn, chosen so that a result is exact or its rounding error is known.
enum class Range { small, bits, factors, reals, large };

std::uint64_t mixed(std::uint64_t a, std::uint64_t b) {
  auto x = a * 0x9e3779b97f4a7c15 + b + 0x632be59bd9b4e019;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// [n] values of exact_type(type) that `type` represents exactly.
at::Tensor drawn(std::uint64_t seed, std::int64_t n, at::ScalarType type, Range range) {
  const auto odd = static_cast<std::int64_t>(mixed(seed, 1) | 1), first = static_cast<std::int64_t>(mixed(seed, 2));
  const auto words = [&](std::int64_t turn) {
    const auto x = at::arange(n, at::kLong) * odd + (first + turn);
    return x.bitwise_xor(at::bitwise_right_shift(x, 29)) * 0x2545f4914f6cdd1d;
  };
  const auto below = [&](std::int64_t count, std::int64_t turn = 0) {
    return at::bitwise_right_shift(words(turn), 13).remainder(count);
  };
  const auto wide = exact_type(type);
  if (type == at::kBool) return below(2);
  const bool natural = type == at::kByte || type == at::kUInt16;
  if (at::isComplexType(type)) return at::complex((below(5) - 2).to(at::kDouble), (below(5, 7) - 2).to(at::kDouble));
  switch (range) {
    case Range::small:
      return (natural ? below(9) : below(9) - 4).to(wide);
    case Range::bits:
      return words(0).to(type).to(wide);
    case Range::factors:
      return (natural ? below(2) + 1 : below(4) - 1 + below(4).eq(1).to(at::kLong)).to(wide);
    case Range::reals: {
      const auto x = (below(1 << 20).to(at::kDouble) / (1 << 19) - 1).to(type).to(wide);
      return at::where(below(64, 3).eq(0), at::full({}, std::numeric_limits<double>::quiet_NaN(), wide), x);
    }
    case Range::large:
      return (type == at::kHalf ? below(500).to(at::kDouble) * 32 + 30'720
                                : (below(128).to(at::kDouble) / 128 + 1) * 0x1p124)
          .to(type)
          .to(wide);
  }
  return {};
}

// Reductions.

constexpr std::array reducible_types{at::kBool,  at::kByte,   at::kChar,         at::kShort,
                                     at::kInt,   at::kLong,   at::kHalf,         at::kBFloat16,
                                     at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble};
constexpr std::array copy_only_types{at::kFloat8_e4m3fn, at::kUInt16, at::kComplexHalf};
constexpr double premultiplied = 0.5;

struct Reduction {
  ReduceOp op;
  Range range = Range::small;
};

ReduceOp operation(ReduceOp::RedOpType type) {
  ReduceOp op;
  op.op_ = type;
  if (type == ReduceOp::PREMUL_SUM) op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(premultiplied);
  return op;
}

bool supports(ReduceOp::RedOpType op, at::ScalarType type) {
  const bool whole = at::isIntegralType(type, /*includeBool=*/true), complex = at::isComplexType(type);
  switch (op) {
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return !whole;
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      return !complex;
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      return whole;
    default:
      return true;
  }
}

constexpr std::array operations{ReduceOp::SUM,  ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN,       ReduceOp::MAX,
                                ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR,    ReduceOp::PREMUL_SUM};

Reduction draw_reduction(Dice& dice, at::ScalarType type) {
  auto op = operations[static_cast<std::size_t>(dice.below(static_cast<int>(operations.size())))];
  if (!supports(op, type)) op = ReduceOp::SUM;
  const bool whole = at::isIntegralType(type, true), fractional = at::isFloatingType(type);
  auto range = Range::small;
  if (op == ReduceOp::PRODUCT)
    range = Range::factors;
  else if (whole && dice.chance(0.5))
    range = Range::bits;
  else if (fractional && dice.chance(0.4))
    range = Range::reals;
  else if (op == ReduceOp::AVG && (type == at::kHalf || type == at::kBFloat16))
    range = Range::large;
  return {operation(op), range};
}

/// Reduces tensors of [n] elements of exact_type(). Returns the result, and the largest allowed difference if the
/// result is rounded.
std::pair<at::Tensor, at::Tensor> reduced(const Reduction& reduction, at::ScalarType type, const Tensors& parts) {
  auto total = parts[0].clone(), sizes = parts[0].abs();
  for (std::size_t r = 1; r < parts.size(); ++r) {
    const auto& part = parts[r];
    sizes = sizes + part.abs();
    switch (reduction.op.op_) {
      case ReduceOp::PRODUCT:
        total = total * part;
        break;
      case ReduceOp::MIN:
        total = at::minimum(total, part);
        break;
      case ReduceOp::MAX:
        total = at::maximum(total, part);
        break;
      case ReduceOp::BAND:
        total = total.bitwise_and(part);
        break;
      case ReduceOp::BOR:
        total = total.bitwise_or(part);
        break;
      case ReduceOp::BXOR:
        total = total.bitwise_xor(part);
        break;
      default:
        total = total + part;
    }
  }
  if (type == at::kBool) total = total.ne(0).to(at::kLong);
  const auto ranks = static_cast<double>(parts.size());
  double scale = 1;
  if (reduction.op.op_ == ReduceOp::AVG) scale = 1 / ranks;
  if (reduction.op.op_ == ReduceOp::PREMUL_SUM) scale = premultiplied;
  if (scale != 1) total = total * scale;
  const bool exact = at::isIntegralType(type, true) || reduction.op.op_ == ReduceOp::MIN ||
                     reduction.op.op_ == ReduceOp::MAX ||
                     (reduction.range != Range::reals && reduction.op.op_ != ReduceOp::AVG);
  if (exact) return {total, {}};
  // Of an average the sum is divided; where it is not exact, each addition rounds once more.
  const double roundings = reduction.range == Range::reals ? ranks + 2 : 2;
  return {total, sizes.to(at::kDouble) * (scale * roundings * rounding(type))};
}

// Calls.

enum class Kind {
  allreduce,
  allreduce_coalesced,
  reduce,
  broadcast,
  allgather,
  allgather_base,
  allgather_coalesced,
  allgather_into_tensor_coalesced,
  gather,
  scatter,
  reduce_scatter,
  reduce_scatter_base,
  reduce_scatter_tensor_coalesced,
  alltoall,
  alltoall_base,
  ring,
  any_source,
  barrier,
  refused,
};
constexpr int num_kinds = static_cast<int>(Kind::refused) + 1;
constexpr std::array names{"allreduce",
                           "allreduce_coalesced",
                           "reduce",
                           "broadcast",
                           "allgather",
                           "_allgather_base",
                           "allgather_coalesced",
                           "allgather_into_tensor_coalesced",
                           "gather",
                           "scatter",
                           "reduce_scatter",
                           "_reduce_scatter_base",
                           "reduce_scatter_tensor_coalesced",
                           "alltoall",
                           "alltoall_base",
                           "send and recv",
                           "send and recvAnysource",
                           "barrier",
                           "what is refused"};
static_assert(names.size() == num_kinds);

/// The same on all ranks of a group, whichever it is.
struct Call {
  Kind kind = Kind::barrier;
  std::size_t group = 0;
  at::ScalarType type = at::kFloat;
  Reduction reduction = {ReduceOp::SUM};
  std::int64_t count = 0;
  MemoryLayout lay = MemoryLayout::plain;
  int choice = 0;  ///< of a root, or of what is refused
  bool in_place = false;
  std::uint64_t seed = 0;
  std::vector<bool> dropped;  ///< [ranks of the world]: not waited for there
};

/// A call under way on this rank.
struct PendingCall {
  const Call* call = nullptr;
  std::vector<WorkPtr> works;
  std::vector<Expected> expected;
};

std::int64_t draw_count(Dice& dice, bool alone) {
  const auto share = dice.real();
  if (share < 0.1) return 0;
  if (share < 0.3) return dice.between(1, 9);
  if (share < 0.75 || !alone) return dice.between(1, 3000);
  if (share < 0.95) return dice.between(1, 60'000);
  if (share < 0.995) return dice.between(1, 500'000);
  return dice.between(1, 1 << 22);
}

std::vector<Call> draw(std::uint64_t seed, int size, std::size_t num_groups) {
  Dice dice(seed);
  std::vector<std::size_t> used;  // several at once, but not all
  for (int i = dice.between(1, 4); i > 0; --i) used.push_back(dice.word() % num_groups);
  std::vector<Call> calls(static_cast<std::size_t>(dice.between(1, 12)));
  for (auto& call : calls) {
    call.kind = static_cast<Kind>(dice.below(num_kinds));
    if (dice.chance(0.25)) call.kind = Kind::allreduce;
    call.group = used[dice.word() % used.size()];
    const bool reduces = call.kind <= Kind::reduce ||
                         (call.kind >= Kind::reduce_scatter && call.kind <= Kind::reduce_scatter_tensor_coalesced);
    const auto type = dice.word();
    call.type = !reduces && type % 4 == 0 ? copy_only_types[type / 4 % copy_only_types.size()]
                                          : reducible_types[type / 4 % reducible_types.size()];
    if (reduces)
      call.reduction = draw_reduction(dice, call.type);
    else if (at::isIntegralType(call.type, true))
      call.reduction.range = Range::bits;
    call.count =
        draw_count(dice, call.kind == Kind::allreduce || call.kind == Kind::reduce || call.kind == Kind::broadcast);
    if (dice.chance(0.4))
      call.lay = dice.one_of({MemoryLayout::odd_offset, MemoryLayout::strided, MemoryLayout::transposed});
    call.choice = dice.below(1 << 20);
    call.in_place = dice.chance(0.2);
    call.seed = dice.word();
    const bool drops = call.count <= 3000 && dice.chance(0.15), everywhere = dice.chance(0.3);
    for (int r = 0; r < size; ++r) call.dropped.push_back(drops && (everywhere || dice.chance(0.5)));
  }
  return calls;
}

/// Starts calls on this rank.
class Starter {
 public:
  Starter(const Call& call, const Group& group, int tag) : call_(call), group_(group), tag_(tag) { live_.call = &call; }

  PendingCall start() {
    auto& pg = *group_.group;
    auto& backend = *pg.getBackend(c10::DeviceType::CPU);
    const int size = group_.size(), me = group_.rank, root = call_.choice % size;
    const auto n = call_.count;
    const auto length = [&](int of) { return n * (1 + of % 3) / 2; };  // another one on some ranks
    const auto& op = call_.reduction.op;
    switch (call_.kind) {
      case Kind::allreduce: {
        Tensors tensors{reduces_to_all(0, n)};
        add(pg.allreduce(tensors, {.reduceOp = op}));
        break;
      }
      case Kind::allreduce_coalesced: {
        Tensors tensors;
        for (int k = 0; k < 3; ++k) tensors.push_back(reduces_to_all(k, k == 1 ? n / 3 : n));
        c10d::AllreduceCoalescedOptions options;
        options.reduceOp = op;
        add(pg.allreduce_coalesced(tensors, options));
        break;
      }
      case Kind::reduce: {
        Tensors tensors{placed(me == root ? sum(0, n) : given(me, 0, n), given(me, 0, n))};
        add(pg.reduce(tensors, {.reduceOp = op, .rootRank = root}));
        break;
      }
      case Kind::broadcast: {
        Tensors tensors{placed({given(root, 0, n), {}}, given(me, 0, n))};
        add(pg.broadcast(tensors, {.rootRank = root}));
        break;
      }
      case Kind::allgather:
      case Kind::gather: {
        std::vector<Tensors> outputs;
        if (call_.kind == Kind::allgather || me == root) {
          outputs.emplace_back();
          for (int r = 0; r < size; ++r) outputs[0].push_back(filled_with({given(r, 0, length(r)), {}}));
        }
        Tensors inputs{kept(given(me, 0, length(me)))};
        add(call_.kind == Kind::gather ? pg.gather(outputs, inputs, {.rootRank = root})
                                       : pg.allgather(outputs, inputs));
        break;
      }
      case Kind::allgather_base: {
        if (call_.in_place) {
          auto output = placed({all_of(0, n), {}}, at::zeros({n * size}, exact_type(call_.type)), MemoryLayout::plain);
          auto input = output.narrow(0, n * me, n);
          input.copy_(given(me, 0, n));
          add(backend._allgather_base(output, input));
          break;
        }
        auto output = filled_with({all_of(0, n), {}}), input = kept(given(me, 0, n));
        add(backend._allgather_base(output, input));
        break;
      }
      case Kind::allgather_coalesced: {
        std::vector<Tensors> outputs;
        for (int r = 0; r < size; ++r)
          outputs.push_back({filled_with({given(r, 0, n), {}}), filled_with({given(r, 1, n / 2), {}})});
        Tensors inputs{kept(given(me, 0, n)), kept(given(me, 1, n / 2))};
        add(pg.allgather_coalesced(outputs, inputs));
        break;
      }
      case Kind::allgather_into_tensor_coalesced: {
        Tensors outputs{filled_with({all_of(0, n), {}}), filled_with({all_of(1, n / 2), {}})};
        Tensors inputs{kept(given(me, 0, n)), kept(given(me, 1, n / 2))};
        add(backend.allgather_into_tensor_coalesced(outputs, inputs));
        break;
      }
      case Kind::scatter: {
        std::vector<Tensors> inputs;
        if (me == root) {
          inputs.emplace_back();
          for (int to = 0; to < size; ++to) inputs[0].push_back(kept(given(root, to, length(to))));
        }
        Tensors outputs{filled_with({given(root, me, length(me)), {}})};
        add(pg.scatter(outputs, inputs, {.rootRank = root}));
        break;
      }
      case Kind::reduce_scatter: {
        std::vector<Tensors> inputs(1);
        for (int to = 0; to < size; ++to) inputs[0].push_back(kept(given(me, to, length(to))));
        Tensors outputs{filled_with(sum(me, length(me)))};
        add(pg.reduce_scatter(outputs, inputs, {.reduceOp = op}));
        break;
      }
      case Kind::reduce_scatter_base: {
        if (call_.in_place) {
          // What the rest of the input holds afterwards is as it was.
          const auto [want, allowed] = sum(me, n);
          auto all = blocks_of(me, n), within = at::zeros({n * size}, at::kDouble);
          const auto input_values = all.clone();
          all.narrow(0, n * me, n).copy_(want);
          if (allowed.defined()) within.narrow(0, n * me, n).copy_(allowed);
          auto input = placed({all, within}, input_values, MemoryLayout::plain);
          auto output = input.narrow(0, n * me, n);
          add(backend._reduce_scatter_base(output, input, {.reduceOp = op}));
          break;
        }
        auto output = filled_with(sum(me, n)), input = kept(blocks_of(me, n));
        add(backend._reduce_scatter_base(output, input, {.reduceOp = op}));
        break;
      }
      case Kind::reduce_scatter_tensor_coalesced: {
        Tensors outputs{filled_with(sum(me, n)), filled_with(sum(size + me, n / 2))};
        Tensors inputs{kept(blocks_of(me, n)), kept(blocks_of(me, n / 2, size))};
        add(backend.reduce_scatter_tensor_coalesced(outputs, inputs, {.reduceOp = op}));
        break;
      }
      case Kind::alltoall: {
        const auto between = [&](int from, int to) { return n * ((from + 2 * to) % 3) / 2; };
        Tensors inputs, outputs;
        for (int r = 0; r < size; ++r) {
          inputs.push_back(kept(given(me, r, between(me, r))));
          outputs.push_back(filled_with({given(r, me, between(r, me)), {}}));
        }
        add(pg.alltoall(outputs, inputs));
        break;
      }
      case Kind::alltoall_base: {
        const std::int64_t columns = 1 + call_.choice % 4;
        const auto rows = [&](int from, int to) {
          return call_.in_place ? n / 4 : n * ((from + to) % 3) / (2 * columns);  // in place of splits, even ones
        };
        std::vector<std::int64_t> give, take;
        Tensors given_rows, taken_rows;
        for (int r = 0; r < size; ++r) {
          give.push_back(rows(me, r));
          take.push_back(rows(r, me));
          given_rows.push_back(given(me, r, rows(me, r) * columns));
          taken_rows.push_back(given(r, me, rows(r, me) * columns));
        }
        auto input = kept(at::cat(given_rows), MemoryLayout::plain).view({-1, columns});
        auto output = filled_with({at::cat(taken_rows), {}}, MemoryLayout::plain).view({-1, columns});
        if (call_.in_place) give = take = {};
        add(backend.alltoall_base(output, input, take, give));
        break;
      }
      case Kind::ring: {
        const int next = (me + 1) % size, before = (me + size - 1) % size;
        Tensors out{kept(given(me, 0, n))}, in{filled_with({given(before, 0, n), {}})};
        const auto receive = [&] { add(pg.recv(in, before, tag_)); };
        if (call_.in_place) receive();
        add(pg.send(out, next, tag_));
        if (!call_.in_place) receive();
        break;
      }
      case Kind::any_source: {
        if (me != root) {
          Tensors out{kept(given(root, 0, n))};  // the same from all, as nobody knows who comes first
          add(pg.send(out, root, tag_));
          break;
        }
        const bool within_one_message = n <= 190;  // in bytes, and in the smallest chunk of a group
        for (int r = 1; r < size && within_one_message; ++r) {
          Tensors in{filled_with({given(root, 0, n), {}})};
          add(pg.recvAnysource(in, tag_));
        }
        for (int r = 0; r < size; ++r) {
          if (r == me || within_one_message) continue;
          Tensors in{filled_with({given(root, 0, n), {}})};
          add(pg.recv(in, r, tag_));
        }
        break;
      }
      case Kind::barrier:
        add(pg.barrier());
        break;
      case Kind::refused:
        refuse(pg, backend);
        break;
    }
    return std::move(live_);
  }

 private:
  /// What that rank of the group gives as its k-th tensor.
  at::Tensor given(int rank, int k, std::int64_t n) const {
    const auto of = static_cast<std::uint64_t>(group_.ranks[static_cast<std::size_t>(rank)]);
    return drawn(mixed(call_.seed, of * 64 + static_cast<std::uint64_t>(k)), n, call_.type, call_.reduction.range);
  }
  at::Tensor all_of(int k, std::int64_t n) const {
    Tensors parts;
    for (int r = 0; r < group_.size(); ++r) parts.push_back(given(r, k, n));
    return at::cat(parts);
  }
  /// That rank's blocks for each.
  at::Tensor blocks_of(int rank, std::int64_t n, int first = 0) const {
    Tensors parts;
    for (int to = 0; to < group_.size(); ++to) parts.push_back(given(rank, first + to, n));
    return at::cat(parts);
  }
  struct Result {
    at::Tensor values, allowed;
    Result(at::Tensor all) : values(std::move(all)) {}
    Result(at::Tensor all, at::Tensor within) : values(std::move(all)), allowed(std::move(within)) {}
  };
  Result sum(int k, std::int64_t n) const {
    Tensors parts;
    for (int r = 0; r < group_.size(); ++r) parts.push_back(given(r, k, n));
    auto [values, allowed] = reduced(call_.reduction, call_.type, parts);
    return {values, allowed};
  }

  /// A tensor that holds `now` and is to hold `then`.
  at::Tensor placed(const Result& then, const at::Tensor& now, std::optional<MemoryLayout> lay = {}) {
    live_.expected.push_back({PlacedTensor(now.to(call_.type), lay.value_or(call_.lay)), then.values, then.allowed});
    return live_.expected.back().placed.tensor;
  }
  at::Tensor kept(const at::Tensor& values, std::optional<MemoryLayout> lay = {}) {
    return placed(values, values, lay);
  }
  at::Tensor filled_with(const Result& then, std::optional<MemoryLayout> lay = {}) {
    return placed(then, at::full_like(then.values, 1), lay);
  }
  at::Tensor reduces_to_all(int k, std::int64_t n) { return placed(sum(k, n), given(group_.rank, k, n)); }
  void add(WorkPtr work) { live_.works.push_back(std::move(work)); }

  /// What all ranks have to refuse, before anything is sent or written.
  void refuse(c10d::ProcessGroup& pg, c10d::Backend& backend) {
    const auto n = std::min<std::int64_t>(call_.count, 10);
    auto floats = at::ones({n}), whole = at::ones({n}, at::kLong), other = at::ones({n * group_.size() + 1});
    auto eighth = floats.to(at::kFloat8_e4m3fn), complex = floats.to(at::kComplexFloat);
    const int size = group_.size();
    Tensors one{floats}, two{floats, eighth}, ints{whole}, numbers{complex};
    std::vector<Tensors> lists{Tensors(static_cast<std::size_t>(size) + 1, floats)},
        blocks{Tensors(static_cast<std::size_t>(size), floats)},
        lengths{Tensors(static_cast<std::size_t>(size), other)};
    const std::vector<std::function<void()>> calls{
        [&] { pg.allreduce(one, {.reduceOp = ReduceOp::BXOR}); },
        [&] { pg.allreduce(ints, {.reduceOp = ReduceOp::AVG}); },
        [&] { pg.allreduce(numbers, {.reduceOp = ReduceOp::MAX}); },
        [&] { pg.allreduce(one, {.reduceOp = ReduceOp::PREMUL_SUM}); },
        [&] { pg.allreduce_coalesced(two); },
        [&] { pg.reduce(one, {.rootRank = size}); },
        [&] { pg.reduce(one, {.reduceOp = ReduceOp::BAND}); },
        [&] { pg.broadcast(one, {.rootRank = -1}); },
        [&] { pg.gather(blocks, one, {.rootRank = size}); },
        [&] { pg.scatter(one, blocks, {.rootRank = -1}); },
        [&] { pg.allgather(lists, one); },
        [&] { pg.allgather(lengths, one); },
        [&] { backend._allgather_base(other, floats); },
        [&] { pg.reduce_scatter(one, lists); },
        [&] { pg.reduce_scatter(one, blocks, {.reduceOp = ReduceOp::BOR}); },
        [&] { pg.reduce_scatter(one, lengths); },
        [&] { pg.alltoall(one, lists[0]); },
        [&] { pg.send(one, size, 0); },
        [&] { pg.recv(one, -1, 0); },
        [&] { backend.allreduce_sparse(one); },
        [&] { backend.startCoalescing(); },
        [&] { backend.monitoredBarrier({}); },
    };
    const auto& call = calls[static_cast<std::size_t>(call_.choice) % calls.size()];
    try {
      call();
    } catch (const Error& error) {
      if (error.code() == ExitCode::usage) return check_untouched({floats, whole, other, complex});
      throw;
    } catch (const c10::Error&) {
      return check_untouched({floats, whole, other, complex});
    }
    throw std::logic_error("what cannot be done was not refused: number " +
                           std::to_string(static_cast<std::size_t>(call_.choice) % calls.size()));
  }
  static void check_untouched(const Tensors& ones) {
    for (const auto& tensor : ones)
      if (!tensor.eq(1).all().item<bool>()) throw std::logic_error("what was refused has written");
  }

  const Call& call_;
  const Group& group_;
  const int tag_;
  PendingCall live_;
};

std::string describe(const Call& call) {
  return std::string(names[static_cast<std::size_t>(call.kind)]) + " in group " + std::to_string(call.group) + ": " +
         c10::toString(call.type) + " [" + std::to_string(call.count) + "], operation " +
         std::to_string(static_cast<int>(call.reduction.op.op_)) + ", range " +
         std::to_string(static_cast<int>(call.reduction.range)) + ", lay " +
         std::to_string(static_cast<int>(call.lay)) + ", choice " + std::to_string(call.choice) +
         (call.in_place ? ", in place" : "");
}

/// In one of the ways there are.
void finish(PendingCall& live, Dice& dice) {
  for (auto& work : live.works) {
    switch (dice.below(5)) {
      case 0:
        while (!work->isCompleted()) std::this_thread::yield();
        work->wait();
        break;
      case 1:
        work->synchronize();
        break;
      case 2:
        work->getFuture()->value();
        break;
      case 3:
        try {
          work->wait(1ms);
          break;
        } catch (const Error& error) {
          if (error.code() != ExitCode::retry) throw;
        }
        [[fallthrough]];
      default:
        work->wait();
    }
    if (!work->isSuccess()) throw std::logic_error("a work has not succeeded");
  }
}

/// The first difference on this rank.
std::optional<std::string> play(std::uint64_t seed, const Communicator& world, const std::vector<Group>& groups,
                                bool aloud) {
  const auto calls = draw(seed, world.size(), groups.size());
  Dice rank_dice(mixed(seed, static_cast<std::uint64_t>(world.rank())));
  std::vector<PendingCall> under_way;
  std::optional<std::string> difference;
  const auto tell = [&](const std::string& text) {
    if (aloud) std::fprintf(stderr, "rank %d: %s\n", world.rank(), text.c_str());
  };
  const auto finish_one = [&] {
    const auto i = rank_dice.word() % under_way.size();
    auto live = std::move(under_way[i]);
    under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(i));
    tell("waiting for " + describe(*live.call));
    finish(live, rank_dice);
    for (const auto& expected : live.expected)
      if (const auto found = difference ? std::nullopt : expected.difference())
        difference = *found + " after " + describe(*live.call);
  };
  int number = 0;
  for (const auto& call : calls) {
    tell("starting " + describe(call));
    auto live = Starter(call, groups[call.group], static_cast<int>(seed % 1000) * 16 + number++).start();
    if (!call.dropped[static_cast<std::size_t>(world.rank())]) under_way.push_back(std::move(live));
    while (!under_way.empty() && rank_dice.chance(0.3)) finish_one();
  }
  while (!under_way.empty()) finish_one();
  return difference;
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "groups", [](const Communicator& world) {
    return [&world, groups = soak::make_groups(world)](const soak::Round& round) {
      return soak::play(round.seed, world, groups, round.aloud).value_or("");
    };
  });
}
