// Compares every collective of the process group with a reference, over types, sizes, layouts and chunks.
#include "group_tensors.hpp"
#include "muster/error.hpp"

#include <functional>
#include <optional>

namespace muster::group_test {
namespace {

using namespace test;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

const std::vector<at::ScalarType> whole{at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong};
const std::vector<at::ScalarType> fractional{at::kHalf,   at::kBFloat16,     at::kFloat,
                                             at::kDouble, at::kComplexFloat, at::kComplexDouble};
const std::vector<at::ScalarType> moved{at::kBool,     at::kByte,       at::kShort,         at::kLong,
                                        at::kBFloat16, at::kFloat,      at::kComplexDouble, at::kFloat8_e4m3fn,
                                        at::kUInt16,   at::kComplexHalf};

const std::vector<at::ScalarType> some_reducible{at::kByte, at::kLong, at::kBFloat16, at::kFloat, at::kComplexDouble};

std::vector<at::ScalarType> all_reducible() {
  auto types = whole;
  types.insert(types.end(), fractional.begin(), fractional.end());
  return types;
}

ReduceOp premultiplied(double factor) {
  ReduceOp op;
  op.op_ = ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(factor);
  return op;
}

int top_of(const ReduceOp& op) { return op.op_ == ReduceOp::PRODUCT ? 2 : 5; }

bool applies(const ReduceOp& op, at::ScalarType type) {
  switch (op.op_) {
    case ReduceOp::AVG:
    case ReduceOp::PREMUL_SUM:
      return at::isFloatingType(type) || at::isComplexType(type);
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      return !at::isComplexType(type);
    case ReduceOp::BAND:
    case ReduceOp::BOR:
    case ReduceOp::BXOR:
      return at::isIntegralType(type, true);
    default:
      return true;
  }
}

std::vector<ReduceOp> operations() {
  return {ReduceOp::SUM,  ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN,     ReduceOp::MAX,
          ReduceOp::BAND, ReduceOp::BOR, ReduceOp::BXOR,    premultiplied(0.5)};
}

/// The reference in double precision, from every rank's input give(rank).
at::Tensor reduced(const ReduceOp& op, at::ScalarType type, const std::function<at::Tensor(int)>& give) {
  Tensors parts;
  for (int r = 0; r < size(); ++r) parts.push_back(give(r));
  const bool bits = op.op_ == ReduceOp::BAND || op.op_ == ReduceOp::BOR || op.op_ == ReduceOp::BXOR;
  auto total = bits ? parts[0].clone() : wide(parts[0]).clone();
  for (std::size_t r = 1; r < parts.size(); ++r) {
    const auto part = bits ? parts[r] : wide(parts[r]);
    switch (op.op_) {
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
        total = at::bitwise_and(total, part);
        break;
      case ReduceOp::BOR:
        total = at::bitwise_or(total, part);
        break;
      case ReduceOp::BXOR:
        total = at::bitwise_xor(total, part);
        break;
      default:
        total = total + part;
    }
  }
  if (op.op_ == ReduceOp::AVG) total = total / size();
  if (op.op_ == ReduceOp::PREMUL_SUM) total = total * 0.5;
  return total.to(type);
}

TEST(Group, ReducesOntoAll) {
  each_case(all_reducible(), [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    for (const auto& op : operations()) {
      if (!applies(op, type)) continue;
      const Placed placed(values(rank(), n, type, top_of(op)), lay);
      Tensors tensors{placed.tensor};
      group(chunk).allreduce(tensors, {.reduceOp = op})->wait();
      EXPECT_TRUE(placed.holds(reduced(op, type, [&](int r) { return values(r, n, type, top_of(op)); })))
          << "operation " << static_cast<int>(op.op_);
    }
  });
}

TEST(Group, ReducesALargeTensor) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    auto tensor = values(rank(), 100'003, type);
    Tensors tensors{tensor};
    group().allreduce(tensors, {.reduceOp = ReduceOp::AVG})->wait();
    const auto want = reduced(ReduceOp::AVG, type, [&](int r) { return values(r, 100'003, type); });
    EXPECT_TRUE(at::equal(tensor, want)) << c10::toString(type);
  }
}

TEST(Group, ReducesSeveralTensorsOfSeveralTypes) {
  const Placed a(values(rank(), 7, at::kFloat), Lay::strided), b(values(rank(), 0, at::kLong), Lay::plain),
      c(values(rank(), 20, at::kLong), Lay::odd_offset);
  Tensors tensors{a.tensor, b.tensor, c.tensor};
  group(7).allreduce_coalesced(tensors)->wait();
  EXPECT_TRUE(a.holds(reduced(ReduceOp::SUM, at::kFloat, [](int r) { return values(r, 7, at::kFloat); })));
  EXPECT_TRUE(c.holds(reduced(ReduceOp::SUM, at::kLong, [](int r) { return values(r, 20, at::kLong); })));
}

TEST(Group, ReducesOntoOne) {
  each_case(some_reducible, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    for (const auto& op : {ReduceOp(ReduceOp::SUM), ReduceOp(ReduceOp::AVG), premultiplied(0.5)}) {
      if (!applies(op, type)) continue;
      const int root = size() - 1;
      const auto mine = values(rank(), n, type);
      const Placed placed(mine, lay);
      Tensors tensors{placed.tensor};
      group(chunk).reduce(tensors, {.reduceOp = op, .rootRank = root})->wait();
      EXPECT_TRUE(placed.holds(rank() == root ? reduced(op, type, [&](int r) { return values(r, n, type); }) : mine));
    }
  });
}

TEST(Group, ReducesAndScatters) {
  each_case(some_reducible, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    for (const auto& op : {ReduceOp(ReduceOp::SUM), ReduceOp(ReduceOp::AVG), premultiplied(0.5)}) {
      if (!applies(op, type)) continue;
      const auto want = reduced(op, type, [&](int r) { return values(r + rank(), n, type); });
      // Rank r sends values(r + to) to rank `to`.
      std::vector<Placed> inputs;
      std::vector<Tensors> lists(1);
      for (int to = 0; to < size(); ++to) {
        inputs.emplace_back(values(rank() + to, n, type), lay);
        lists[0].push_back(inputs.back().tensor);
      }
      const Placed output(at::zeros({n}, type), lay);
      Tensors outputs{output.tensor};
      group(chunk).reduce_scatter(outputs, lists, {.reduceOp = op})->wait();
      EXPECT_TRUE(output.holds(want));
      for (int to = 0; to < size(); ++to)
        EXPECT_TRUE(inputs[static_cast<std::size_t>(to)].holds(values(rank() + to, n, type))) << "inputs are kept";

      Tensors blocks;
      for (int to = 0; to < size(); ++to) blocks.push_back(values(rank() + to, n, type));
      const Placed flat_input(at::cat(blocks), lay);
      const Placed flat_output(at::zeros({n}, type), lay);
      auto out = flat_output.tensor, in = flat_input.tensor;
      backend(chunk)._reduce_scatter_base(out, in, {.reduceOp = op})->wait();
      EXPECT_TRUE(flat_output.holds(want));
    }
  });
}

TEST(Group, ReducesAndScattersBlocksOfDifferentSizes) {
  const auto length = [](int of) { return std::int64_t{3} * of + 1; };
  std::vector<Tensors> inputs(1);
  for (int to = 0; to < size(); ++to) inputs[0].push_back(values(rank() + to, length(to), at::kInt));
  auto output = at::zeros({length(rank())}, at::kInt);
  Tensors outputs{output};
  group(7).reduce_scatter(outputs, inputs)->wait();
  EXPECT_TRUE(at::equal(
      output, reduced(ReduceOp::SUM, at::kInt, [&](int r) { return values(r + rank(), length(rank()), at::kInt); })));
}

TEST(Group, ReducesAndScattersInPlace) {
  auto input = values(rank(), 5 * size(), at::kFloat);
  auto output = input.narrow(0, 5 * rank(), 5);
  Tensors outputs{output}, inputs{input};
  backend().reduce_scatter_tensor_coalesced(outputs, inputs)->wait();
  EXPECT_TRUE(at::equal(output, reduced(ReduceOp::SUM, at::kFloat, [](int r) {
                          return values(r, 5 * size(), at::kFloat).narrow(0, 5 * rank(), 5);
                        })));
}

TEST(Group, Broadcasts) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    for (int root = 0; root < size(); root += 2) {
      const Placed placed(values(rank(), n, type), lay);
      Tensors tensors{placed.tensor};
      group(chunk).broadcast(tensors, {.rootRank = root})->wait();
      EXPECT_TRUE(placed.holds(values(root, n, type)));
    }
  });
}

TEST(Group, Gathers) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    const auto length = [&](int of) { return n * (of + 1); };  // another one on every rank
    const Placed input(values(rank(), length(rank()), type), lay);
    const auto room = [&] {
      std::vector<Placed> placed;
      for (int r = 0; r < size(); ++r) placed.emplace_back(at::zeros({length(r)}, type), lay);
      return placed;
    };
    const auto lists_of = [](const std::vector<Placed>& placed) {
      std::vector<Tensors> lists(1);
      for (const auto& one : placed) lists[0].push_back(one.tensor);
      return lists;
    };
    Tensors inputs{input.tensor};

    const auto everywhere = room();
    auto lists = lists_of(everywhere);
    const auto work = group(chunk).allgather(lists, inputs);
    const int root = size() / 2;
    const auto at_root = room();
    auto root_lists = rank() == root ? lists_of(at_root) : std::vector<Tensors>{};
    group(chunk).gather(root_lists, inputs, {.rootRank = root})->wait();
    work->wait();
    for (int r = 0; r < size(); ++r) {
      const auto want = values(r, length(r), type);
      EXPECT_TRUE(everywhere[static_cast<std::size_t>(r)].holds(want));
      if (rank() == root) {
        EXPECT_TRUE(at_root[static_cast<std::size_t>(r)].holds(want));
      }
    }
    EXPECT_TRUE(input.holds(values(rank(), length(rank()), type)));
  });
}

TEST(Group, GathersIntoOneTensor) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    const Placed input(values(rank(), n, type), lay), output(at::zeros({n * size()}, type), lay);
    auto in = input.tensor, out = output.tensor;
    backend(chunk)._allgather_base(out, in)->wait();
    Tensors parts;
    for (int r = 0; r < size(); ++r) parts.push_back(wide(values(r, n, type)));
    EXPECT_TRUE(output.holds(at::cat(parts)));
  });
}

TEST(Group, GathersSeveralTensorsAtOnce) {
  Tensors inputs{values(rank(), 4, at::kFloat), values(rank(), 9, at::kLong)};
  std::vector<Tensors> lists;
  for (int r = 0; r < size(); ++r) lists.push_back({at::zeros({4}), at::zeros({9}, at::kLong)});
  group(7).allgather_coalesced(lists, inputs)->wait();
  Tensors joined{at::zeros({4 * size()}), at::zeros({9 * size()}, at::kLong)};
  backend(7).allgather_into_tensor_coalesced(joined, inputs)->wait();
  for (int r = 0; r < size(); ++r) {
    const auto& list = lists[static_cast<std::size_t>(r)];
    EXPECT_TRUE(at::equal(list[0], values(r, 4, at::kFloat)));
    EXPECT_TRUE(at::equal(list[1], values(r, 9, at::kLong)));
    EXPECT_TRUE(at::equal(joined[0].narrow(0, 4 * r, 4), list[0]));
    EXPECT_TRUE(at::equal(joined[1].narrow(0, 9 * r, 9), list[1]));
  }
}

TEST(Group, Scatters) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    const auto length = [&](int of) { return n * (of + 1); };
    const int root = size() - 1;
    std::vector<Tensors> lists;
    std::vector<Placed> inputs;
    if (rank() == root) {
      lists.resize(1);
      for (int to = 0; to < size(); ++to) {
        inputs.emplace_back(values(to, length(to), type), lay);
        lists[0].push_back(inputs.back().tensor);
      }
    }
    const Placed output(at::zeros({length(rank())}, type), lay);
    Tensors outputs{output.tensor};
    group(chunk).scatter(outputs, lists, {.rootRank = root})->wait();
    EXPECT_TRUE(output.holds(values(rank(), length(rank()), type)));
    for (int to = 0; to < static_cast<int>(inputs.size()); ++to)
      EXPECT_TRUE(inputs[static_cast<std::size_t>(to)].holds(values(to, length(to), type)));
  });
}

TEST(Group, SendsFromAllToAll) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    // Rank r sends n * (1 + (r + 2 to) % 3) elements to rank `to`.
    const auto length = [&](int from, int to) { return n * (1 + (from + 2 * to) % 3); };
    const auto sent = [&](int from, int to) { return values(10 * from + to, length(from, to), type); };
    std::vector<Placed> in, out;
    Tensors inputs, outputs;
    for (int r = 0; r < size(); ++r) {
      in.emplace_back(sent(rank(), r), lay);
      out.emplace_back(at::zeros({length(r, rank())}, type), lay);
      inputs.push_back(in.back().tensor);
      outputs.push_back(out.back().tensor);
    }
    group(chunk).alltoall(outputs, inputs)->wait();
    for (int r = 0; r < size(); ++r) {
      EXPECT_TRUE(out[static_cast<std::size_t>(r)].holds(sent(r, rank())));
      EXPECT_TRUE(in[static_cast<std::size_t>(r)].holds(sent(rank(), r)));
    }
  });
}

TEST(Group, SendsRowsFromAllToAll) {
  for (const std::size_t chunk : {std::size_t{7}, one_call}) {
    const auto rows = [](int from, int to) { return std::int64_t{(from + to) % 3}; };  // some are empty
    const auto block = [&](int from, int to) {
      return values(10 * from + to, rows(from, to) * 5, at::kFloat).view({rows(from, to), 5});
    };
    Tensors given, wanted;
    std::vector<std::int64_t> give, want;
    for (int r = 0; r < size(); ++r) {
      given.push_back(block(rank(), r));
      give.push_back(rows(rank(), r));
      wanted.push_back(block(r, rank()));
      want.push_back(rows(r, rank()));
    }
    auto input = at::cat(given), output = at::zeros_like(at::cat(wanted));
    backend(chunk).alltoall_base(output, input, want, give)->wait();
    EXPECT_TRUE(at::equal(output, at::cat(wanted)));

    std::vector<std::int64_t> even;
    auto ranks = at::arange(2 * size(), at::kLong).view({2 * size(), 1}) + 100 * rank();
    auto turned = at::zeros_like(ranks);
    backend(chunk).alltoall_base(turned, ranks, even, even)->wait();
    for (int r = 0; r < size(); ++r) EXPECT_EQ(turned[2 * r + 1].item<std::int64_t>(), 100 * r + 2 * rank() + 1);
  }
}

TEST(Group, SendsAndReceives) {
  each_case(moved, [](at::ScalarType type, std::int64_t n, Lay lay, std::size_t chunk) {
    const int next = (rank() + 1) % size(), before = (rank() + size() - 1) % size();
    const Placed given(values(rank(), n, type), lay), taken(at::zeros({n}, type), lay);
    Tensors out{given.tensor}, in{taken.tensor};
    const auto receive = group(chunk).recv(in, before, 3);
    const auto send = group(chunk).send(out, next, 3);
    receive->wait();
    send->wait();
    EXPECT_EQ(receive->sourceRank(), before);
    EXPECT_TRUE(taken.holds(values(before, n, type)));
  });
}

/// The Error with which the work ends.
std::optional<Error> error_of(const c10::intrusive_ptr<c10d::Work>& work) {
  try {
    work->wait();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

TEST(Group, AMessageOfAnotherLengthIsAnError) {
  if (size() < 2) GTEST_SKIP() << "a rank alone sends nothing";
  for (const std::int64_t sent : {2, 5}) {
    // Rank 0 sends to each other rank, which expects three elements.
    auto group = make_process_group(world().duplicate());
    if (rank() == 0) {
      std::vector<c10::intrusive_ptr<c10d::Work>> sends;
      for (int r = 1; r < size(); ++r) {
        Tensors out{at::ones({sent})};
        sends.push_back(group->send(out, r, 0));
      }
      for (const auto& send : sends) send->wait();
    } else {
      Tensors in{at::full({3}, -7.0)};
      const auto error = error_of(group->recv(in, 0, 0));
      ASSERT_TRUE(error) << sent << " elements were taken for 3";
      EXPECT_EQ(error->code(), ExitCode::user_error);
    }
    world().barrier();
  }
  // Every rank sends and expects the numbers of rows that it states.
  auto group = make_process_group(world().duplicate());
  auto mine = at::full({rank() + 2}, rank());
  Tensors input{mine};
  std::vector<Tensors> all(1);
  for (int r = 0; r < size(); ++r) all[0].push_back(at::full({rank() + 2}, -7));
  const auto error = error_of(group->allgather(all, input));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->code(), ExitCode::user_error);
  world().barrier();
}

TEST(Group, AsManyOutputsAsInputs) {
  Tensors outputs{at::ones({size()}), at::ones({size()})}, inputs{at::ones({1})};
  try {
    backend().allgather_into_tensor_coalesced(outputs, inputs)->wait();
    ADD_FAILURE() << "an output without an input was taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("2 outputs for 1 inputs. Give as many of each"), std::string::npos);
  }
}

TEST(Group, ReceivesFromAnyRank) {
  auto& group = test::group();
  if (rank() != 0) {
    Tensors mine{at::full({4}, rank())};
    group.send(mine, 0, 9)->wait();
    return;
  }
  std::vector<bool> heard(static_cast<std::size_t>(size()));
  for (int i = 1; i < size(); ++i) {
    Tensors any{at::zeros({4}, at::kLong)};
    const auto work = group.recvAnysource(any, 9);
    work->wait();
    const auto source = work->sourceRank();
    EXPECT_EQ(any[0][3].item<std::int64_t>(), source);
    EXPECT_FALSE(heard.at(static_cast<std::size_t>(source)));
    heard[static_cast<std::size_t>(source)] = true;
  }
}

TEST(Group, ReducesConjugatesAndGradients) {
  const auto given = at::complex(values(rank(), 6, at::kDouble), values(rank() + 1, 6, at::kDouble));
  auto conjugate = given.clone().conj();
  Tensors tensors{conjugate};
  // Not through the group: torch's dispatcher hands on a copy of a conjugate, and takes it back before the wait.
  backend().allreduce(tensors)->wait();
  auto want = at::zeros({6}, at::kComplexDouble);
  for (int r = 0; r < size(); ++r) want += at::complex(values(r, 6, at::kDouble), -values(r + 1, 6, at::kDouble));
  EXPECT_TRUE(at::equal(conjugate.resolve_conj(), want));

  auto parameter = values(rank(), 6, at::kFloat).view({2, 3}).t().requires_grad_();
  Tensors parameters{parameter};
  group().broadcast(parameters)->wait();
  EXPECT_TRUE(at::equal(parameter, values(0, 6, at::kFloat).view({2, 3}).t()));
  EXPECT_TRUE(parameter.requires_grad() && parameter.is_leaf());
}

TEST(Allocation, GivesMemoryThatAllReducesInPlace) {
  const auto group = make_process_group(world());
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  ASSERT_TRUE(backend->supportsTensorAlloc(0));
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    auto tensor = backend->allocateTensor(100'000, at::TensorOptions(type));
    EXPECT_EQ(tensor.scalar_type(), type);
    tensor.fill_(world().rank() + 1);
    std::vector<at::Tensor> tensors{tensor};
    group->allreduce(tensors)->wait();
    EXPECT_EQ(tensor.min().item<float>(), world().size() * (world().size() + 1) / 2.0f);
    EXPECT_EQ(tensor.max().item<float>(), world().size() * (world().size() + 1) / 2.0f);
  }
}

TEST(Allocation, IsOnTheDeviceThatIsAskedFor) {
  const auto tensor = backend().allocateTensor(100, at::TensorOptions(at::kFloat).device(at::kMeta));
  EXPECT_TRUE(tensor.is_meta());
  EXPECT_EQ(tensor.numel(), 100);
}

}  // namespace
}  // namespace muster::group_test
