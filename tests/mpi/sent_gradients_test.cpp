// Gradients that cross nodes are sent from where backward() has made them, and the averages are received there. With a
// fused optimizer, parameters are received where the module reads them, and state exists once in the job. MPI's
// functions are replaced by ones that note addresses and can fail.
#include "base/page_size.hpp"
#include "comm/on_ranks.hpp"
#include "muster/comm_hooks.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "optim/optimizer_step.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <mpi.h>
#include <sys/mman.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

struct Message {
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
};

std::mutex mutex;
std::vector<Message> sent, received;
std::optional<Message> sendable;  ///< sends of more than 4 KB from elsewhere fail

void note(std::vector<Message>& messages, const void* data, int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  const std::lock_guard lock(mutex);
  messages.push_back(
      {static_cast<const std::byte*>(data), static_cast<std::size_t>(count) * static_cast<std::size_t>(size)});
}

}  // namespace

extern "C" {
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* request) {
  note(sent, data, count, type);
  const auto [from, bytes] = sent.back();
  if (sendable && bytes > 4096 && (from < sendable->data || from >= sendable->data + sendable->bytes))
    return MPI_ERR_OTHER;
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* request) {
  note(received, data, count, type);
  return PMPI_Irecv(data, count, type, from, tag, comm, request);
}
}

namespace muster::detail::gradients::sent_gradients_test {
namespace {

using test::world;
namespace nn = torch::nn;

void forget_messages() {
  const std::lock_guard lock(mutex);
  sent.clear();
  received.clear();
}

/// Bytes of the messages that lie inside one of the gradients, and of all others.
struct Counts {
  std::size_t inside = 0, outside = 0;
};
Counts count(const std::vector<Message>& messages, const std::vector<at::Tensor>& gradients) {
  Counts counts;
  for (const auto& [data, bytes] : messages) {
    const bool inside = std::ranges::any_of(gradients, [&](const at::Tensor& gradient) {
      const auto* const begin = static_cast<const std::byte*>(gradient.const_data_ptr());
      return data >= begin && data + bytes <= begin + gradient.nbytes();
    });
    (inside ? counts.inside : counts.outside) += bytes;
  }
  return counts;
}

// Over n nodes of one rank, a rank sends its summands of the others' shares, and its own share's average to each of
// them: 2 S (n − 1) / n bytes for S bytes of gradients. It receives as much, one half into its gradients.
TEST(SentGradients, AreNotCopied) {
  constexpr std::int64_t width = 1536;
  const auto nodes = static_cast<std::size_t>(world().size());
  ASSERT_TRUE(test::by("nodes"));
  torch::nn::Sequential net(torch::nn::Conv2d(32, 64, 3), torch::nn::Flatten(), torch::nn::Linear(64 * 9, width),
                            torch::nn::Linear(width, width));
  const auto prepared = test::Preparation()(net.ptr());
  std::vector<at::Tensor> weights;
  std::size_t bytes = 0, small = 0;
  for (const auto& p : net->parameters())
    if (p.dim() > 1)
      weights.push_back(p), bytes += p.nbytes();
    else
      small += p.nbytes();
  for (int step = 0; step < 3; ++step) {
    const auto loss = [&] { return net->forward(test::values({2, 32, 5, 5}, step)).square().mean(); };
    const auto want = test::mean_over_ranks(torch::autograd::grad({loss()}, {weights[1]})[0]);
    net->zero_grad();
    forget_messages();
    loss().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& weight : weights) gradients.push_back(weight.grad());
    Counts out, in;
    {
      const std::lock_guard lock(mutex);
      out = count(sent, gradients);
      in = count(received, gradients);
    }
    test::expect_close(gradients[1], want, "a weight");
    // Small gradients, uses and the order travel in copies.
    const auto others = 2 * nodes * (small + (std::size_t{64} << 10));
    const auto each_way = bytes * (nodes - 1) / nodes;
    EXPECT_NEAR(static_cast<double>(out.inside), 2.0 * static_cast<double>(each_way), 64.0 * 100) << "step " << step;
    EXPECT_LE(out.outside, others) << "step " << step;
    EXPECT_NEAR(static_cast<double>(in.inside), static_cast<double>(each_way), 64.0 * 100) << "step " << step;
    EXPECT_LE(in.outside, each_way + others) << "step " << step;
  }
}

// A hook of 16 bits halves the bytes; the sums are formed in float and rounded once.
TEST(SentGradients, OfSixteenBitsAreHalfOfTheBytes) {
  constexpr std::int64_t width = 1024;
  const auto nodes = static_cast<std::size_t>(world().size());
  for (const auto& [hook, epsilon] : {std::pair{bf16_compress_hook(), 0x1p-8}, {fp16_compress_hook(), 0x1p-11}}) {
    torch::nn::Linear net(torch::nn::LinearOptions(width, width).bias(false));
    test::Preparation prepare;
    prepare.options.comm_hook = hook;
    const auto prepared = prepare(net.ptr());
    for (int step = 0; step < 3; ++step) {
      const auto loss = [&] { return net->forward(test::values({8, width}, step)).square().sum(); };
      const auto own = torch::autograd::grad({loss()}, {net->weight})[0];
      const auto want = test::mean_over_ranks(own), size = test::mean_over_ranks(own.abs());
      net->zero_grad();
      {
        const std::lock_guard lock(mutex);
        sent.clear();
      }
      loss().backward();
      const std::lock_guard lock(mutex);
      const auto [inside, outside] = count(sent, {net->weight.grad()});
      EXPECT_EQ(inside, 0u);
      EXPECT_LE(outside, net->weight.nbytes() * (nodes - 1) / nodes + (std::size_t{64} << 10));
      // Each summand is rounded once, and the average once.
      EXPECT_TRUE(((net->weight.grad() - want).abs() <= 2 * epsilon * size + 1e-6).all().item<bool>()) << step;
      test::expect_same_bits_everywhere(net->weight.grad(), "the weight");
    }
  }
}

/// A model with one large weight, and its Adam.
struct Fused {
  static constexpr std::int64_t width = 1536;
  nn::Linear net{nn::LinearOptions(width, width).bias(false)};
  test::Preparation prepare;
  std::shared_ptr<PreparedModel> prepared;
  std::optional<PreparedOptimizer<torch::optim::Adam>> optimizer;

  explicit Fused(Fuse fuse = Fuse::always, const CommHook& hook = {}) {
    const at::NoGradGuard no_grad;
    net->weight.copy_(at::sin(at::arange(width * width) * 0.37).view({width, width}) * 0.1);
    prepare.options.comm_hook = hook;
    prepared = prepare(net.ptr());
    torch::optim::Adam own(net->parameters(), 1e-3);
    auto step = optim::make_optimizer_step(own, {prepared}, {.fuse = fuse});
    optimizer.emplace(std::move(own), std::move(step));
    EXPECT_EQ(optimizer->fused(), fuse == Fuse::always);
  }
  void backward(int number) {
    optimizer->zero_grad();
    net->forward(test::values({2, width}, number)).square().mean().backward();
  }
  at::Tensor moment() {
    auto& state = *optimizer->state().at(net->weight.unsafeGetTensorImpl());
    return static_cast<torch::optim::AdamParamState&>(state).exp_avg();
  }
};

/// Bytes of the tensor's whole pages that are in memory, in this process or in the shared copy that it shows.
double bytes_in_memory(const at::Tensor& tensor) {
  std::vector<unsigned char> pages(tensor.nbytes() / page_size());
  EXPECT_EQ(::mincore(tensor.mutable_data_ptr(), pages.size() * page_size(), pages.data()), 0);
  return static_cast<double>(page_size() * std::ranges::count_if(pages, [](auto page) { return (page & 1) != 0; }));
}

TEST(AFusedStepOverNodes, SendsGradientsFromWhereTheyLieAndKeepsAShareOfTheState) {
  Fused fused;
  const auto nodes = static_cast<double>(world().size());
  const auto bytes = static_cast<double>(fused.net->weight.nbytes());
  const auto each_way = bytes * (nodes - 1) / nodes;
  const double chunks = bytes / (1 << 20) + 1, rounding = chunks * 2 * static_cast<double>(page_size());
  for (int step = 0; step < 3; ++step) {
    forget_messages();
    fused.backward(step);
    // Gradients are sent during backward(). That they are not sent again, unless they are changed, is seen below.
    EXPECT_GT(count(sent, {fused.net->weight.grad()}).inside, 0u) << "step " << step;
    fused.optimizer->step();
    const std::vector gradient{fused.net->weight.grad()};
    const auto out = count(sent, gradient), in = count(received, gradient);
    // Gradients leave, and parameters leave and arrive; beside them only notes.
    EXPECT_NEAR(static_cast<double>(out.inside), each_way, 64.0 * chunks * nodes) << "step " << step;
    EXPECT_NEAR(static_cast<double>(out.outside), each_way, 64e3) << "step " << step;
    EXPECT_EQ(in.inside, 0u);
    EXPECT_NEAR(static_cast<double>(in.outside), 2 * each_way, 64e3) << "step " << step;
    EXPECT_NEAR(bytes_in_memory(fused.moment()), bytes / nodes, rounding) << "step " << step;
    test::expect_same_bits_everywhere(fused.net->weight, "the weight");
    if (step == 2) continue;
    fused.optimizer->gather_state();
    EXPECT_NEAR(bytes_in_memory(fused.moment()), bytes, rounding);
    test::expect_same_bits_everywhere(fused.moment(), "the state");
  }
}

TEST(AFusedStepOverNodes, TakesAveragesOfWhichHalfTheBitsWereSent) {
  Fused fused(Fuse::always, bf16_compress_hook()), plain(Fuse::never, bf16_compress_hook());
  const auto nodes = static_cast<double>(world().size());
  const auto each_way = static_cast<double>(fused.net->weight.nbytes()) * (nodes - 1) / nodes;
  for (int step = 0; step < 3; ++step) {
    forget_messages();
    fused.backward(step);
    fused.optimizer->step();
    EXPECT_NEAR(static_cast<double>(count(sent, {}).outside), 1.5 * each_way, 64e3) << "step " << step;
    if (step == 0) {  // later, Adam makes much of a gradient that is rounded otherwise
      plain.backward(step);
      plain.optimizer->step();
      EXPECT_LE((fused.net->weight - plain.net->weight).abs().max().item<double>(), 1e-6);
    }
    test::expect_same_bits_everywhere(fused.net->weight, "the weight");
  }
}

TEST(AFusedStepOverNodes, IsNotTakenOnceAnExceptionHasEndedOne) {
  Fused fused;
  fused.backward(0);
  fused.optimizer->step();
  fused.backward(1);
  // Rank 0 cannot send the first parameters that it has updated.
  const auto& gradient = fused.net->weight.grad();
  if (world().rank() == 0) sendable = {static_cast<const std::byte*>(gradient.const_data_ptr()), gradient.nbytes()};
  using namespace std::chrono_literals;
  const auto failure =
      comm::attempt_on_all(test::averaging_ranks(), {.done = 60s, .failed = 60s}, [&] { fused.optimizer->step(); });
  sendable.reset();
  ASSERT_TRUE(failure);
  fused.backward(2);
  try {
    fused.optimizer->step();
    ADD_FAILURE() << "parameters may be of two steps";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("an exception has ended its last step"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace muster::detail::gradients::sent_gradients_test
