// The exchange that a progress thread advances, compiled with the thread sanitizer, which sees the threads of each
// rank.
#include "gradients/shared_exchange.hpp"
#include "support/world.hpp"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

namespace muster::detail::gradients::exchange_races_test {
namespace {

using test::world;

std::vector<at::Tensor> make_parameters() {
  std::vector<at::Tensor> parameters;
  for (int i = 0; i < 12; ++i) parameters.push_back(at::zeros({i % 3 == 0 ? 7 : 5000 + i}, at::kDouble));
  return parameters;
}

/// Makes the calls of a reducer, with passes in between that end early.
void average(Exchange& exchange, const std::vector<at::Tensor>& parameters) {
  for (int round = 0; round < 30; ++round) {
    const bool flagged = round % 5 == 1, cut_off = round % 7 == 3;
    const auto value = [&](double rank, std::size_t i) { return rank + round + 0.5 * static_cast<double>(i); };
    const auto weight = [&](int rank) { return rank % 2 == 0 ? 0.1 * (rank + round) : 1e7 / (rank + 3 * round); };
    exchange.begin(Arrival::in_backward, flagged && world().rank() == 0 ? 2 : 0, weight(world().rank()));
    for (std::size_t i = parameters.size(); i-- > 0;)
      if (cut_off && i < 4)
        exchange.add(i, {}, ParameterUse::abandoned);
      else
        exchange.add(i, at::full_like(parameters[i], value(world().rank(), i)), ParameterUse::used);
    exchange.finish();
    EXPECT_EQ(exchange.flags(), flagged ? 2U : 0U);
    double weights = 0;
    for (int r = 0; r < world().size(); ++r) weights += weight(r);
    EXPECT_DOUBLE_EQ(exchange.mean_weight(), weights / world().size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(exchange.user_count(i), cut_off && i < 4 ? -1 : world().size());
      if (cut_off) continue;
      at::Tensor have;
      exchange.fetch(i, have);
      EXPECT_TRUE(at::allclose(have, at::full_like(parameters[i], value(0.5 * (world().size() - 1), i)), 1e-12, 1e-12));
    }
  }
}

TEST(ProgressThread, DrivesAveragesInSharedMemory) {
  const auto parameters = make_parameters();
  const auto exchange = SharedExchange::make(parameters, world().duplicate(), /*progress_thread=*/true);
  ASSERT_EQ(exchange != nullptr, world().size() > 1);
  if (exchange) average(*exchange, parameters);
}

}  // namespace
}  // namespace muster::detail::gradients::exchange_races_test
