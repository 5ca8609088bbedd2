// The end of operations: in any order, late, with an error, refused, dropped; and torch's own reducer over the group.
#include "comm/agreement.hpp"
#include "comm/collectives.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_scope.hpp"
#include "group_tensors.hpp"

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <functional>
#include <limits>
#include <thread>
#include <utility>

namespace muster::group_test_work {
namespace {

using namespace std::chrono_literals;
using namespace test;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

/// The text of the Error that `body` throws; empty if it throws none.
std::string error_of(const std::function<void()>& body, ExitCode code = ExitCode::usage) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

at::Tensor sum_of(std::int64_t n) {
  auto total = values(0, n, at::kDouble);
  for (int r = 1; r < size(); ++r) total += values(r, n, at::kDouble);
  return total;
}

TEST(Work, MayBeWaitedForInAnyOrder) {
  std::vector<Placed> placed;
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  for (int i = 0; i < 6; ++i) {
    placed.emplace_back(values(rank(), 50 + i, at::kDouble), lays[i % 4]);
    Tensors tensors{placed.back().tensor};
    works.push_back(group().allreduce(tensors));
    if (i == 3) works.push_back(group().barrier());
  }
  for (auto work = works.rbegin(); work != works.rend(); ++work) EXPECT_TRUE((*work)->wait());
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(placed[static_cast<std::size_t>(i)].holds(sum_of(50 + i)));
}

/// The ranks as they are, in pairs on different nodes, and each rank on its own node.
std::vector<Communicator> placements() {
  std::vector<Communicator> all{world()};
  for (const int per_node : {2, 1}) {
    detail::comm::Placement placement;
    for (int r = 0; r < size(); ++r) {
      placement.node_of_rank.push_back(r / per_node);
      placement.hosts.push_back(std::to_string(r / per_node));
    }
    all.push_back(detail::comm::make_world(world(), std::move(placement)));
  }
  return all;
}

TEST(Work, OfSeveralGroupsMayBeWaitedForInAnyOrder) {
  constexpr std::int64_t n = 1 << 20;  // doubles
  for (const bool polled : {false, true})
    for (const auto& communicator : placements()) {
      std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
      Tensors results;
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      for (int g = 0; g < 3; ++g) {
        groups.push_back(make_process_group(communicator, {.timeout = 30s}));
        Tensors tensors{at::full({n}, rank() + g + 1.0, at::kDouble)};
        results.push_back(tensors[0]);
        works.push_back(groups.back()->allreduce(tensors));
      }
      for (int i = 0; i < 3; ++i) {
        const auto& work = works[static_cast<std::size_t>((i + rank()) % 3)];
        if (polled)
          while (!work->isCompleted()) std::this_thread::yield();
        else
          work->wait();
      }
      for (int g = 0; g < 3; ++g) {
        const double want = size() * (size() + 1) / 2.0 + size() * g;
        EXPECT_TRUE(at::equal(results[static_cast<std::size_t>(g)], at::full({n}, want, at::kDouble))) << g;
      }
    }
}

TEST(Work, ThatOneRankDropsEndsOnTheOthers) {
  for (const auto& communicator : placements()) {
    const auto one = make_process_group(communicator, {.timeout = 30s});
    Tensors tensors{at::ones({1 << 20}, at::kDouble)};
    auto work = one->allreduce(tensors);
    if (rank() == 0)
      work.reset();
    else
      work->wait();
    if (rank() != 0) {
      EXPECT_EQ(tensors[0].sum().item<double>(), static_cast<double>(size()) * (1 << 20));
    }
    communicator.barrier();  // in which the first rank does its part of it
  }
}

TEST(Work, FinishesOnceHoweverOftenItIsAsked) {
  const Placed placed(values(rank(), 9, at::kDouble), Lay::strided);
  Tensors tensors{placed.tensor};
  const auto work = group().allreduce(tensors, {.reduceOp = ReduceOp::AVG});
  while (!work->isCompleted()) std::this_thread::yield();
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(placed.holds(sum_of(9) / size())) << "polling alone finishes it";
  EXPECT_TRUE(work->wait() && work->isCompleted());
  work->synchronize();
  EXPECT_TRUE(placed.holds(sum_of(9) / size())) << "it is averaged once";
  ASSERT_EQ(work->result().size(), 1U);
  EXPECT_TRUE(work->result()[0].is_same(placed.tensor));
}

TEST(Work, GivesAFutureThatIsCompleted) {
  auto tensor = values(rank(), 9, at::kDouble);
  Tensors tensors{tensor};
  const auto future = group().allreduce(tensors)->getFuture();
  ASSERT_TRUE(future->hasValue());
  EXPECT_TRUE(future->value().toTensorVector().at(0).is_same(tensor));
  EXPECT_TRUE(at::equal(tensor, sum_of(9)));
  bool called = false;
  future->addCallback([&](c10::ivalue::Future&) { called = true; });
  EXPECT_TRUE(called);
}

TEST(Work, IsWaitedForUpToALimitAndThenAgain) {
  Tensors in{at::zeros({3})}, out{at::full({3}, 4.0F)};
  const auto work = group().recv(in, rank(), 5);
  const auto text = error_of([&] { work->wait(30ms); }, ExitCode::retry);
  EXPECT_TRUE(contains(text, "muster:recv") && contains(text, "0.03 s")) << text;
  EXPECT_FALSE(work->isCompleted());
  EXPECT_EQ(work->exception(), nullptr);
  group().send(out, rank(), 5)->wait();
  EXPECT_TRUE(work->wait());
  EXPECT_TRUE(at::equal(in[0], out[0]));
}

TEST(Work, HasTheLimitOfItsGroup) {
  const auto short_lived = make_process_group(world(), {.timeout = 30ms});
  Tensors in{at::zeros({3})};
  const auto work = short_lived->recv(in, rank(), 0);
  EXPECT_TRUE(contains(error_of([&] { work->wait(); }, ExitCode::retry), "0.03 s"));
  const auto future = work->getFuture();
  EXPECT_TRUE(future->hasError());
  EXPECT_TRUE(contains(error_of([&] { future->value(); }, ExitCode::retry), "0.03 s"));
  short_lived->setTimeout(60ms);
  EXPECT_TRUE(contains(error_of([&] { short_lived->recv(in, rank(), 1)->wait(); }, ExitCode::retry), "0.06 s"));
}

TEST(Work, EndsWithAnExceptionWhenAborted) {
  const auto other = make_process_group(world());
  Tensors in{at::zeros({3})};
  const auto work = other->recv(in, rank(), 0);
  work->abort();
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_TRUE(contains(error_of([&] { work->wait(); }, ExitCode::user_error), "it was aborted"));
}

TEST(Work, MayBeDropped) {
  const auto other = make_process_group(world());
  for (int i = 0; i < 10; ++i) {
    Tensors tensors{Placed(values(rank(), 1000, at::kFloat), Lay::strided).tensor};
    other->allreduce(tensors);
  }
  auto last = values(rank(), 1000, at::kDouble);
  Tensors tensors{last};
  other->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(last, sum_of(1000)));
}

TEST(Work, EndsWithWhatAnotherRankRaised) {
  if (size() == 1) GTEST_SKIP() << "needs another rank";
  const auto attempt = make_process_group(world());
  attempt->barrier()->wait();  // everybody has it
  detail::comm::Outcome mine{detail::comm::Outcome::Kind::failed, ExitCode::data, false, "a bad sample"};
  if (rank() != 0) {
    const auto work = attempt->barrier();
    try {
      work->wait();
      ADD_FAILURE() << "the barrier cannot finish";
    } catch (const RemoteError& error) {
      EXPECT_EQ(error.rank(), 0);
      mine = detail::comm::current_outcome();
    }
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_THROW(std::rethrow_exception(work->exception()), RemoteError);
    EXPECT_THROW(work->getFuture()->value(), RemoteError);
  }
  detail::comm::raise_alarm(world(), mine);
  detail::comm::agree(world(), mine, 30s);
  const auto fresh = make_process_group(world());
  Tensors tensors{values(rank(), 3, at::kDouble)};
  fresh->allreduce(tensors)->wait();
  EXPECT_TRUE(at::equal(tensors[0], sum_of(3)));
}

TEST(Group, IsOneOfTorchs) {
  auto& group = test::group();
  EXPECT_EQ(group.getRank(), rank());
  EXPECT_EQ(group.getSize(), size());
  EXPECT_EQ(group.getBackendType(), c10d::ProcessGroup::BackendType::CUSTOM);
  EXPECT_EQ(backend().getBackendName(), "muster");
}

TEST(Group, MayBeOfSomeRanks) {
  const auto part = world().split(rank() % 2);
  const auto half = make_process_group(part);
  Tensors tensors{at::ones({4})};
  half->allreduce(tensors)->wait();
  EXPECT_EQ(tensors[0][3].item<float>(), part.size());
}

TEST(Group, RefusesTensorsThatItCannotMove) {
  const auto refusal = [](const at::Tensor& tensor) {
    Tensors tensors{tensor};
    return error_of([&] { backend().broadcast(tensors); });
  };
  EXPECT_TRUE(contains(refusal(at::eye(3).to_sparse()), "starting muster:broadcast: the tensor's layout is Sparse"));
  EXPECT_TRUE(contains(refusal(at::quantize_per_tensor(at::ones({3}), 0.1, 0, at::kQInt8)), "quantised"));
  EXPECT_TRUE(contains(refusal(at::empty({3}, at::kMeta)), "on meta"));
  EXPECT_TRUE(contains(refusal(at::Tensor()), "undefined"));
  if (rank() != 0) {
    EXPECT_TRUE(contains(refusal(at::ones({1}).expand({3})), "share memory"));
  }
  Tensors sparse{at::eye(3).to_sparse_csr()}, dense{at::eye(3)};
  EXPECT_TRUE(contains(error_of([&] { backend().allreduce_sparse(dense); }), "muster:sparse_all_reduce"));
  EXPECT_TRUE(contains(error_of([&] { backend().allreduce(sparse); }), "the tensor's layout is SparseCsr"));
}

TEST(Group, RefusesBeforeAnythingIsStarted) {
  const auto other = make_process_group(world());
  Tensors tensors{at::ones({3}), at::ones({3}).to(at::kFloat8_e4m3fn)};
  EXPECT_TRUE(contains(error_of([&] { other->allreduce_coalesced(tensors); }), "no reduction of Float8_e4m3fn"));
  Tensors outputs{at::ones({3})};
  std::vector<Tensors> inputs{Tensors(static_cast<std::size_t>(size()), at::zeros({3}))};
  EXPECT_TRUE(contains(error_of([&] { other->reduce_scatter(outputs, inputs, {.reduceOp = ReduceOp::BAND}); }),
                       "starting muster:reduce_scatter: bit operations"));
  EXPECT_TRUE(at::equal(outputs[0], at::ones({3})));
  Tensors sum{values(rank(), 3, at::kDouble)};
  other->allreduce(sum)->wait();
  EXPECT_TRUE(at::equal(sum[0], sum_of(3)));
  EXPECT_TRUE(at::equal(tensors[0], at::ones({3})));
}

TEST(Group, RefusesChunksOfNothing) {
  EXPECT_TRUE(contains(error_of([] { make_process_group(world(), {.chunk = 0}); }), "chunk is 0"));
}

TEST(Group, AveragesHalvesWhoseSumsAreTooLarge) {
  for (const auto& communicator : placements()) {
    const auto group = make_process_group(communicator);
    for (const auto& [type, large] : {std::pair{at::kHalf, 40000.0}, std::pair{at::kBFloat16, 0x1p125}}) {
      const auto want = at::full({5}, large, type);
      const auto full = [&, type = type] { return want.clone(); };
      const c10d::ReduceOp average = ReduceOp::AVG;
      Tensors all{full()}, first{full()}, second{full(), full()};
      group->allreduce(all, {.reduceOp = average})->wait();
      EXPECT_TRUE(at::equal(all[0], want)) << c10::toString(type);
      group->reduce(first, {.reduceOp = average, .rootRank = size() - 1})->wait();
      EXPECT_TRUE(at::equal(first[0], want)) << c10::toString(type);
      c10d::AllreduceCoalescedOptions coalesced;
      coalesced.reduceOp = average;
      group->allreduce_coalesced(second, coalesced)->wait();
      EXPECT_TRUE(at::equal(second[1], want)) << c10::toString(type);
      Tensors outputs{at::zeros({5}, type)};
      std::vector<Tensors> inputs(1);
      for (int r = 0; r < size(); ++r) inputs[0].push_back(full());
      group->reduce_scatter(outputs, inputs, {.reduceOp = average})->wait();
      EXPECT_TRUE(at::equal(outputs[0], want)) << c10::toString(type);
      for (const auto& input : inputs[0]) EXPECT_TRUE(at::equal(input, want)) << "inputs are kept";
    }
  }
}

TEST(Group, RefusesReductionsWithoutMeaning) {
  const auto refusal = [](at::ScalarType type, const ReduceOp& op) {
    Tensors tensors{at::ones({3}).to(type)};
    return error_of([&] { group().allreduce(tensors, {.reduceOp = op}); });
  };
  ReduceOp scaled;
  scaled.op_ = ReduceOp::PREMUL_SUM;
  EXPECT_TRUE(contains(refusal(at::kFloat, scaled), "without its factor"));
  scaled.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(at::ones({1}));
  EXPECT_TRUE(contains(refusal(at::kInt, scaled), "PREMUL_SUM of Int"));
  EXPECT_TRUE(contains(refusal(at::kLong, ReduceOp::AVG), "muster:all_reduce: the average of Long"));
  EXPECT_TRUE(contains(refusal(at::kBool, ReduceOp::AVG), "the average of Bool"));
  EXPECT_TRUE(contains(refusal(at::kFloat8_e4m3fn, ReduceOp::SUM), "no reduction of Float8_e4m3fn"));
  EXPECT_TRUE(contains(refusal(at::kFloat, ReduceOp::BXOR), "bit operations"));
  EXPECT_TRUE(contains(refusal(at::kComplexFloat, ReduceOp::MAX), "no order"));
}

TEST(Group, HasNoStoreIfTheBackendIsMpi) {
  const auto store = group().getStore();
  const auto text = error_of([&] { store->set("key", "value"); });
  EXPECT_TRUE(contains(text, "with the backend mpi alone there is none. Send tensors or use a Communicator")) << text;
  EXPECT_EQ(error_of([&] { store->get("key"); }), text);
  EXPECT_EQ(error_of([&] { store->add("key", 1); }), text);
  EXPECT_EQ(error_of([&] { store->wait({"key"}); }), text);
  EXPECT_EQ(error_of([&] { store->clone()->check({"key"}); }), text);
}

TEST(Group, RefusesWhatDoesNotFitTogether) {
  Tensors none, one{at::ones({3})}, two{at::ones({3}), at::ones({3})};
  EXPECT_TRUE(contains(error_of([&] { group().allreduce(two); }), "2 tensors"));
  EXPECT_TRUE(contains(error_of([&] { backend().allreduce(none); }), "0 tensors"));
  EXPECT_TRUE(contains(error_of([&] { group().broadcast(one, {.rootRank = size()}); }), "there is no rank"));
  EXPECT_TRUE(contains(error_of([&] { group().send(one, -1, 0); }), "there is no rank -1"));
  EXPECT_TRUE(contains(error_of([&] { group().send(one, 0, -1); }), "muster:send: the tag is -1. Give a tag from 0"));
  EXPECT_TRUE(contains(error_of([&] { group().recv(one, 0, -2); }), "muster:recv: the tag is -2"));
  EXPECT_TRUE(contains(error_of([&] { group().recvAnysource(one, -1); }), "muster:recvAnySource: the tag is -1"));
  if (const auto largest = detail::comm::Collectives::largest_tag(); largest < std::numeric_limits<int>::max()) {
    EXPECT_TRUE(contains(error_of([&] { group().send(one, 0, largest + 1); }), "the tag is"));
  }
  EXPECT_TRUE(contains(error_of([&] { group().reduce(one, {.rootRank = size()}); }), "there is no rank"));
  std::vector<Tensors> nothing;
  EXPECT_TRUE(contains(error_of([&] { group().gather(nothing, one, {.rootRank = -1}); }), "there is no rank -1"));
  EXPECT_TRUE(contains(error_of([&] { group().scatter(one, nothing, {.rootRank = size()}); }), "there is no rank"));

  std::vector<Tensors> lists{Tensors(static_cast<std::size_t>(size()) + 1, at::ones({3}))};
  EXPECT_TRUE(contains(error_of([&] { group().allgather(lists, one); }),
                       size() == 1 ? "2 tensors for 1 rank." : "tensors for " + std::to_string(size()) + " ranks."));
  lists[0] = Tensors(static_cast<std::size_t>(size()), at::ones({2}));
  EXPECT_TRUE(contains(error_of([&] { group().allgather(lists, one); }), "2 elements instead of 3"));
  lists[0] = Tensors(static_cast<std::size_t>(size()), at::ones({3}, at::kLong));
  EXPECT_TRUE(contains(error_of([&] { group().allgather(lists, one); }), "Long and Float"));

  auto rows = at::ones({size() + 1, 2}), scalar = at::ones({});
  std::vector<std::int64_t> even, odd(static_cast<std::size_t>(size()), 5);
  if (size() > 1) {
    EXPECT_TRUE(contains(error_of([&] { backend().alltoall_base(rows, rows, even, even); }), "do not divide"));
  }
  EXPECT_TRUE(contains(error_of([&] { backend().alltoall_base(rows, rows, odd, odd); }), "add up"));
  EXPECT_TRUE(contains(error_of([&] { backend().alltoall_base(scalar, scalar, even, even); }), "first dimension"));
  auto output = at::ones({2}), input = at::ones({2 * size() + 1});
  EXPECT_TRUE(contains(error_of([&] { backend()._reduce_scatter_base(output, input); }), "the input has"));
}

/// Two layers written by hand, with gradients that differ between ranks.
at::Tensor loss_of(const Tensors& parameters, const at::Tensor& x, const at::Tensor& y) {
  const auto hidden = at::tanh(at::addmm(parameters[1], x, parameters[0]));
  return at::mse_loss(at::addmm(parameters[3], hidden, parameters[2]), y);
}

TEST(Group, CarriesTorchsReducer) {
  using Buckets = std::vector<std::vector<std::size_t>>;
  for (const auto& buckets : {Buckets{{0, 1, 2, 3}}, Buckets{{3}, {2}, {0, 1}}}) {
    Tensors parameters;
    for (const auto& shape : std::vector<std::vector<std::int64_t>>{{5, 7}, {7}, {7, 2}, {2}}) {
      const auto n = c10::multiply_integers(shape);
      parameters.push_back((values(0, n, at::kDouble).view(shape) * 0.1).requires_grad_());
    }
    const auto batch = [](int of, int step, std::int64_t columns) {
      return at::sin(at::arange(4 * columns, at::kDouble) * (of + 1) + step).view({4, columns});
    };
    const auto owner = make_process_group(world());
    c10d::Reducer reducer(parameters, buckets, owner, std::vector<bool>(4, false), 1 << 20, false, false, {}, 1 << 10,
                          false, false, {});
    for (int step = 0; step < 4; ++step) {
      Tensors want;
      for (int r = 0; r < size(); ++r) {
        Tensors copies;
        for (const auto& parameter : parameters) copies.push_back(parameter.detach().clone().requires_grad_());
        loss_of(copies, batch(r, step, 5), batch(r, step, 2)).backward();
        for (std::size_t i = 0; i < copies.size(); ++i) {
          if (r == 0) want.push_back(at::zeros_like(copies[i]).detach());
          want[i] += copies[i].grad() / size();
        }
      }
      for (const auto& parameter : parameters) parameter.mutable_grad() = at::Tensor();
      const auto loss = loss_of(parameters, batch(rank(), step, 5), batch(rank(), step, 2));
      reducer.prepare_for_backward({loss});
      loss.backward();
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(at::allclose(parameters[i].grad(), want[i], 1e-12, 1e-14)) << "step " << step << ", " << i;
        parameters[i].sub_(parameters[i].grad() * 0.1);
      }
      reducer.rebuild_buckets();
    }
  }
}

}  // namespace
}  // namespace muster::group_test_work
