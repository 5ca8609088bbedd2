// The objects that the C++ blocks of the documents use without declaring them.
#pragma once

#include <torch/torch.h>
#include <muster/data_loader.hpp>
#include <muster/mpi.hpp>
#include <muster/muster.hpp>
#include <muster/script.hpp>
#include <muster/sync_batch_norm.hpp>

#include <fstream>
#include <iostream>

namespace context {

void train(muster::Session& session, const muster::Config& config);
void train_regression(muster::Session& session, const muster::Config& config);

}  // namespace context

// The parameters of the function that holds a block of statements.
#define CONTEXT                                                                                                \
  [[maybe_unused]] muster::Launch &launch, [[maybe_unused]] muster::Session &session,                          \
      [[maybe_unused]] muster::State &state, [[maybe_unused]] torch::nn::Linear net,                           \
      [[maybe_unused]] torch::nn::Sequential layers,                                                           \
      [[maybe_unused]] muster::PreparedOptimizer<torch::optim::Adam>&optimizer, [[maybe_unused]] at::Tensor x, \
      [[maybe_unused]] at::Tensor y, [[maybe_unused]] at::Tensor hidden, [[maybe_unused]] at::Tensor noise,    \
      [[maybe_unused]] at::Tensor loss, [[maybe_unused]] at::Tensor first_loss,                                \
      [[maybe_unused]] at::Tensor second_loss, [[maybe_unused]] muster::Batch &batch,                          \
      [[maybe_unused]] const muster::Result &result
