// The backend as torch.distributed uses it: futures that complete by themselves, torch's errors, groups of some ranks.
#include "group/torch_backend.hpp"
#include "comm/subset.hpp"
#include "group_tensors.hpp"

#include <ATen/record_function.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace muster::torch_backend_test {
namespace {

using namespace std::chrono_literals;
using namespace test;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

std::vector<int> all_ranks() {
  std::vector<int> all;
  for (int r = 0; r < size(); ++r) all.push_back(r);
  return all;
}

c10::intrusive_ptr<c10d::Backend> torch_backend(std::chrono::milliseconds timeout = 60s) {
  return detail::group::make_torch_backend(detail::comm::make_subset(world(), all_ranks()), timeout);
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// Returns when rank 1 has heard from all others. A collective would not do: its wait finds out that the ranks are in
/// different ones before their timeouts.
void until_all_are_done() {
  Tensors word{at::zeros({1})};
  if (rank() != 1) group().send(word, 1, 99)->wait();
  for (int r = 0; rank() == 1 && r < size(); ++r)
    if (r != 1) group().recv(word, r, 99)->wait();
}

TEST(TorchGroup, HasANameAndSequenceNumbers) {
  const auto group = detail::group::make_torch_group(c10::make_intrusive<c10d::HashStore>(), torch_backend());
  EXPECT_EQ(group->getBackendName(), "muster");
  EXPECT_EQ(group->getRank(), rank());
  EXPECT_EQ(group->getSize(), size());
  group->setSequenceNumberForGroup();
  EXPECT_EQ(group->getSequenceNumberForGroup(), 0U);
  Tensors tensors{values(rank(), 3, at::kDouble)};
  const auto work = group->allreduce(tensors);
  EXPECT_EQ(work->getSequencenumber(), 1U);
  work->wait();
  Tensors in{at::zeros({2})}, out{at::ones({2})};
  const auto received = group->recv(in, rank(), 3);
  group->send(out, rank(), 3)->wait();
  received->wait();
  group->barrier()->wait();
  EXPECT_EQ(group->getSequenceNumberForGroup(), 2U) << "messages do not count";
}

TEST(TorchGroup, CompletesFuturesByItself) {
  const auto backend = torch_backend();
  constexpr std::int64_t n = 1 << 20;
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  Tensors results;
  for (int i = 0; i < 5; ++i) {
    Tensors tensors{at::full({n}, rank() + i + 1.0)};
    results.push_back(tensors[0]);
    futures.push_back(backend->allreduce(tensors)->getFuture());  // nothing else holds the Work
  }
  for (int i = 0; i < 5; ++i) {
    auto& future = *futures[static_cast<std::size_t>((i + rank()) % 5)];
    future.wait();  // which only sleeps
    ASSERT_TRUE(future.hasValue());
  }
  for (int i = 0; i < 5; ++i) {
    const auto& result = results[static_cast<std::size_t>(i)];
    EXPECT_TRUE(futures[static_cast<std::size_t>(i)]->value().toTensorVector().at(0).is_same(result));
    EXPECT_TRUE(at::equal(result, at::full({n}, size() * (size() + 1) / 2.0 + size() * i)));
  }
}

TEST(TorchGroup, StartsOperationsInCallbacksOfFutures) {
  const auto backend = torch_backend();
  auto tensor = at::ones({1000});
  Tensors tensors{tensor};
  const auto again = [&](c10::ivalue::Future& first) -> c10::IValue {
    auto same = first.value().toTensorVector();
    backend->allreduce(same)->wait();
    return same;
  };
  const auto second = backend->allreduce(tensors)->getFuture()->then(again, c10::ListType::ofTensors());
  second->wait();
  EXPECT_EQ(tensor[0].item<double>(), size() * size());
}

TEST(TorchGroup, MayBeUsedByThreads) {
  constexpr int rounds = 50;
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([backend = torch_backend()] {
      for (int i = 0; i < rounds; ++i) {
        Tensors tensors{at::full({1000 * (i % 3) + 1}, i)};
        const auto work = backend->allreduce(tensors);
        if (i % 2 == 0)
          work->getFuture()->wait();
        else
          work->wait();
        EXPECT_EQ(tensors[0][0].item<int>(), i * size());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(TorchGroup, ReportsTimeoutsAsTorchsErrors) {
  if (size() == 1) GTEST_SKIP() << "needs another rank";
  const auto backend = torch_backend(200ms);
  backend->barrier({})->wait();
  if (rank() != 1) {
    const auto work = backend->barrier({});
    EXPECT_THROW(work->wait(), c10::DistBackendError);
    for (const auto& text : {error_of([&] { work->wait(100ms); }), error_of([&] {
                               const auto future = work->getFuture();
                               future->waitAndThrow();
                             })}) {
      EXPECT_TRUE(contains(text, " timeout ") && contains(text, "muster:barrier")) << text;
      EXPECT_TRUE(contains(text, "rank 1 (") && contains(text, "has not come")) << text;
    }
    EXPECT_TRUE(work->isCompleted()) << "the future has ended it";
    EXPECT_THROW(work->wait(), c10::DistBackendError);
  }
  until_all_are_done();
}

TEST(TorchGroup, RefusesArgumentsAsTheOthersDo) {
  const auto backend = torch_backend();
  Tensors two{at::ones({2}), at::ones({2})};
  EXPECT_THROW(backend->allreduce(two), Error);
}

TEST(TorchGroup, IsOfNoUseInAChildOfFork) {
  const auto backend = torch_backend();
  Tensors in{at::zeros({3})}, out{at::ones({3})};
  auto work = backend->recv(in, rank(), 5);
  const pid_t child = ::fork();
  if (child == 0) {
    // Reports by the exit code: the test's own means belong to the parent.
    const bool refused = contains(error_of([&] { backend->allreduce(out); }), "is a child of fork()");
    const bool ended = work->isCompleted() && work->exception() != nullptr;
    work.reset();
    ::_exit(refused && ended ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  backend->send(out, rank(), 5)->wait();
  work->wait();
  EXPECT_TRUE(at::equal(in[0], out[0]));
}

TEST(TorchGroup, NamesItsOperationsInProfiles) {
  static std::mutex mutex;
  static std::vector<std::string> names;
  const auto handle = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
    const std::lock_guard lock(mutex);
    if (std::string(function.name()).starts_with("muster:")) names.emplace_back(function.name());
    return std::unique_ptr<at::ObserverContext>();
  }));
  const auto backend = torch_backend();
  Tensors tensors{at::ones({3})};
  std::vector<Tensors> all{Tensors(static_cast<std::size_t>(size()), at::zeros({3}))};
  backend->allreduce(tensors)->wait();
  backend->allgather(all, tensors)->wait();
  backend->broadcast(tensors)->wait();
  at::removeCallback(handle);
  const std::lock_guard lock(mutex);
  EXPECT_EQ(names, (std::vector<std::string>{"muster:all_reduce", "muster:all_gather", "muster:broadcast"}));
}

/// What rank `of` gives: as many entries as its number, twice at the same place.
at::Tensor sparse_of(int of, at::ScalarType type) {
  const auto places = at::stack({at::arange(2 * of, at::kLong).remainder(4), at::full({2 * of}, of % 3, at::kLong)});
  return at::sparse_coo_tensor(places, at::ones({2 * of, 2}, type) * (of + 1), {4, 3, 2});
}

TEST(Group, SumsSparseTensors) {
  for (const auto type : {at::kDouble, at::kFloat, at::kBFloat16, at::kLong})
    for (const bool average : {false, true}) {
      if (average && type == at::kLong) continue;
      auto want = at::zeros({4, 3, 2}, at::kDouble);
      for (int r = 0; r < size(); ++r) want += sparse_of(r, at::kDouble).to_dense();
      if (average) want /= size();
      const auto tensor = sparse_of(rank(), type);
      Tensors tensors{tensor};
      const auto work = group().allreduce(tensors, {.reduceOp = average ? ReduceOp::AVG : ReduceOp::SUM});
      work->wait();
      EXPECT_TRUE(at::allclose(tensor.to_dense().to(at::kDouble), want, rounding(type))) << c10::toString(type);
      EXPECT_TRUE(tensor.is_coalesced());
      ASSERT_EQ(work->result().size(), 1U);
      EXPECT_TRUE(work->result()[0].is_same(tensor));
    }
}

TEST(Group, RefusesSparseTensorsThatDoNotFit) {
  Tensors tensors{sparse_of(1, at::kDouble)};
  EXPECT_TRUE(
      contains(error_of([&] { group().allreduce(tensors, {.reduceOp = ReduceOp::MAX}); }), "no such reduction"));
  Tensors dense{at::ones({3})};
  EXPECT_TRUE(
      contains(error_of([&] { backend().allreduce_sparse(dense); }), "the tensor is not sparse in coordinates"));
  if (size() == 1) return;
  Tensors other{at::eye(rank() == 0 ? 3 : 4).to_sparse()};
  EXPECT_TRUE(contains(error_of([&] { group().allreduce(other)->wait(); }), "differ from this rank's"));
}

TEST(Group, MonitorsABarrier) {
  for (const auto& owner : {make_process_group(world()), make_process_group(world(), {.timeout = 60s})})
    for (int i = 0; i < 3; ++i) owner->monitoredBarrier(c10d::BarrierOptions(), i % 2 == 0);
  if (size() == 1) return;
  const auto alone = make_process_group(world()), none = make_process_group(world());
  c10d::BarrierOptions soon, now;
  soon.timeout = 200ms;
  now.timeout = 0ms;
  if (rank() != 1) {
    const auto text = error_of([&] { alone->monitoredBarrier(soon); });
    EXPECT_TRUE(contains(text, rank() == 0 ? "Rank 1 failed to pass monitoredBarrier in 200 ms"
                                           : "successfully reached monitoredBarrier, but received errors"))
        << text;
  }
  if (rank() == 0) {
    EXPECT_TRUE(contains(error_of([&] { none->monitoredBarrier(now); }), "Rank 0 timed out in monitoredBarrier"));
    std::string late;
    for (int r = 1; r < size(); ++r) late += (r > 1 ? ", " : "") + std::to_string(r);
    EXPECT_TRUE(contains(error_of([&] { none->monitoredBarrier(soon, true); }), "Ranks " + late + " failed to pass"));
  }
  until_all_are_done();
}

}  // namespace
}  // namespace muster::torch_backend_test
