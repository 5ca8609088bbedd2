// Gradients that cross nodes are sent from where backward() has made them, and the averages are received there. MPI's
// functions are replaced by ones that note addresses.
#include "muster/comm_hooks.hpp"
#include "support/prepared.hpp"

#include <gtest/gtest.h>
#include <mpi.h>
#include <torch/nn.h>

#include <algorithm>
#include <cstddef>
#include <mutex>
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
    {
      const std::lock_guard lock(mutex);
      sent.clear();
      received.clear();
    }
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

}  // namespace
}  // namespace muster::detail::gradients::sent_gradients_test
