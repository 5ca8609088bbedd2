// muster bench step: a training step; compared with the same step without communication, with plain MPI and with
// torch's DDP.
#include "base/text.hpp"
#include "bench.hpp"
#include "peers.hpp"
#include "programs.hpp"
#include "rounds.hpp"
#include "step_cases.hpp"
#include "training.hpp"

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <muster/comm_hooks.hpp>
#include <muster/data_parallel.hpp>
#include <muster/error.hpp>
#include <muster/mpi.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <span>

namespace muster::bench {
namespace {

/// A case without a model: only the optimizer's step with its communication.
constexpr const char* adam_case = "adam fused";

/// In a round, the steps of the slowest candidate take about this long. The others make as many steps.
constexpr double round_ms = 250;

Training with_muster(Session& session, const StepCase& job) {
  return {session.prepare_model(fresh_model(job.model)), random_batches(session.world_rank(), job.batch_size)};
}

/// Averages gradients at the end of backward(), or, with a progress thread, during it.
template <bool progress_thread>
Training with_thread(Session& session, const StepCase& job) {
  return {session.prepare_model(fresh_model(job.model), {.progress_thread = progress_thread}),
          random_batches(session.world_rank(), job.batch_size)};
}

/// Sends gradients in 16 bits between nodes.
Training with_bf16(Session& session, const StepCase& job) {
  return {session.prepare_model(fresh_model(job.model), {.comm_hook = bf16_compress_hook()}),
          random_batches(session.world_rank(), job.batch_size)};
}

/// Fuses the optimizer's step with the averaging.
Training with_fused_optimizer(Session& session, const StepCase& job) {
  const auto model = session.prepare_model(fresh_model(job.model));
  return {model, random_batches(session.world_rank(), job.batch_size), prepared_sgd(session, *model)};
}

Training without_communication(Session& session, const StepCase& job) {
  return {session.prepare_model(fresh_model(job.model), {.parallel = Parallel::none}),
          random_batches(session.world_rank(), job.batch_size)};
}

/// Trains as a program that has its own loop. The DataParallel averages the gradients; the function `keep` does nothing
/// but own it.
template <bool prepared>
Training with_own_loop(Session& session, const StepCase& job) {
  const auto model = fresh_model(job.model);
  const auto parallel = std::make_shared<DataParallel>(session.communicator(), model);
  const auto keep = [parallel] {};
  auto batches = random_batches(session.world_rank(), job.batch_size);
  if (!prepared) return {model, std::move(batches), keep};
  return {model, std::move(batches), prepared_sgd(*parallel, *model), keep};
}

void sum_over_ranks(torch::Tensor values) {
  const int error = MPI_Allreduce(MPI_IN_PLACE, values.data_ptr<float>(), static_cast<int>(values.numel()), MPI_FLOAT,
                                  MPI_SUM, MPI_COMM_WORLD);
  if (error != MPI_SUCCESS)
    throw Error(ExitCode::retry, "running MPI_Allreduce", detail::str("it ended with error ", error));
}

/// Averages gradients by hand as most programs do: one blocking MPI_Allreduce for each parameter.
Training with_mpi_each(Session& session, const StepCase& job) {
  const auto model = fresh_model(job.model);
  return {model, random_batches(session.world_rank(), job.batch_size),
          [parameters = model->parameters(), ranks = session.world_size()] {
            for (const auto& parameter : parameters) {
              sum_over_ranks(parameter.grad());
              parameter.grad().div_(ranks);
            }
          }};
}

/// Averages gradients by MPI as users write it: all of them through one flat buffer.
class FlatAverage {
 public:
  explicit FlatAverage(std::vector<torch::Tensor> parameters) : parameters_(std::move(parameters)) {
    std::int64_t count = 0;
    for (const auto& parameter : parameters_) count += parameter.numel();
    flat_ = torch::empty({count});
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }

  void operator()() {
    each([](torch::Tensor piece, const torch::Tensor& gradient) { piece.copy_(gradient); });
    sum_over_ranks(flat_);
    flat_.div_(size_);
    each([](const torch::Tensor& piece, torch::Tensor gradient) { gradient.copy_(piece); });
  }

 private:
  template <class Use>
  void each(Use use) {
    std::int64_t begin = 0;
    for (const auto& parameter : parameters_) {
      const auto gradient = parameter.grad();
      use(flat_.narrow(0, begin, gradient.numel()).view_as(gradient), gradient);
      begin += gradient.numel();
    }
  }

  std::vector<torch::Tensor> parameters_;
  torch::Tensor flat_;
  int size_ = 1;
};

Training with_mpi(Session& session, const StepCase& job) {
  const auto model = session.prepare_model(fresh_model(job.model), {.parallel = Parallel::none});
  return {model, random_batches(session.world_rank(), job.batch_size), FlatAverage(model->parameters())};
}

/// A way to train, as one of the candidates.
struct Way {
  const char* name;
  Training (*make)(Session&, const StepCase&);
  bool averages;  ///< true if it averages in full precision, so that after the first step it has the weights of `ours`
};

constexpr std::array<Way, 7> ways{{{ours, with_muster, true},
                                   {"mpi", with_mpi, true},
                                   {"thread", with_thread<true>, true},
                                   {"no_thread", with_thread<false>, true},
                                   {"fused", with_fused_optimizer, true},
                                   {twin, with_muster, true},
                                   {"no_communication", without_communication, false}}};
/// The ways over several nodes.
constexpr std::array<Way, 7> ways_over_nodes{{{ours, with_muster, true},
                                              {"mpi", with_mpi, true},
                                              {"no_thread", with_thread<false>, true},
                                              {"bf16", with_bf16, false},
                                              {"fused", with_fused_optimizer, true},
                                              {twin, with_muster, true},
                                              {"no_communication", without_communication, false}}};
constexpr std::array<Way, 4> own_loop_ways{{{ours, with_own_loop<false>, true},
                                            {"session", with_muster, true},
                                            {twin, with_own_loop<false>, true},
                                            {"mpi_each", with_mpi_each, true}}};
constexpr std::array<Way, 4> own_loop_prepared_ways{{{ours, with_own_loop<true>, true},
                                                     {"session", with_fused_optimizer, true},
                                                     {twin, with_own_loop<true>, true},
                                                     {"mpi_each", with_mpi_each, true}}};

[[noreturn]] void fail_check(const StepCase& job, const std::string& fact) {
  throw Error(ExitCode::user_error, detail::str("checking the weights of ", job.name), fact,
              "Do not use the figures of this run");
}

void require_same_weights(const StepCase& job, const Way& way, const Training& training, const Training& reference) {
  const auto mine = training.model().named_parameters();
  const auto theirs = reference.model().named_parameters();
  for (const auto& entry : mine)
    if (!entry.value().allclose(theirs[entry.key()], 1e-4, 1e-6))
      fail_check(job, entry.key() + " differs between " + ours + " and " + way.name + " after the first step");
}

void require_same_on_all_ranks(const StepCase& job, const Way& way, const Training& training,
                               const Communicator& communicator) {
  for (const auto& entry : training.model().named_parameters()) {
    const auto values = entry.value().detach().contiguous();
    if (!same_on_all_ranks(communicator, std::as_bytes(std::span(values.data_ptr<float>(), values.numel()))))
      fail_check(job, entry.key() + " of " + way.name + " is not the same on all ranks after the last step");
  }
}

/// Returns how many steps of the slowest candidate fit into a round.
int steps_per_round(std::vector<Training>& trainings, const Communicator& communicator) {
  double slowest = 0;
  for (auto& training : trainings) slowest = std::max(slowest, timed(communicator, [&] { training.step(); }));
  return std::clamp(static_cast<int>(std::lround(round_ms / slowest)), 1, 1000);
}

/// Only the messages of an all-reduce of a model's gradients: each rank sends to every other rank that rank's part, and
/// then its own part to all of them. Each message is sent from the same memory as before and received into the same
/// memory. No sum is formed.
class BareExchange {
 public:
  explicit BareExchange(const fashion::Classifier& model) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    std::int64_t count = 0;
    for (const auto& parameter : model.parameters()) count += parameter.numel();
    part_ = static_cast<int>((count + size_ - 1) / size_);
    from_ = torch::zeros({size_, part_});
    to_ = torch::zeros({size_, part_});
  }
  void operator()() {
    for (const bool gathers : {false, true}) {
      std::vector<MPI_Request> requests;
      for (int other = 0; other < size_; ++other) {
        if (other == rank_) continue;
        MPI_Irecv(to_[other].data_ptr(), part_, MPI_FLOAT, other, 0, MPI_COMM_WORLD, &requests.emplace_back());
        MPI_Isend(from_[gathers ? rank_ : other].data_ptr(), part_, MPI_FLOAT, other, 0, MPI_COMM_WORLD,
                  &requests.emplace_back());
      }
      const int error = MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
      if (error != MPI_SUCCESS)
        throw Error(ExitCode::retry, "exchanging messages", detail::str("MPI_Waitall ended with error ", error));
    }
  }

 private:
  int rank_ = 0, size_ = 1, part_ = 0;
  torch::Tensor from_, to_;  ///< [ranks][part]
};

Timings measure_training(Session& session, const StepCase& job, std::span<const Way> ways,
                         const Measurement& measurement) {
  const auto& communicator = session.communicator();
  measurement.show("warming up");
  std::vector<Training> trainings;
  for (const auto& way : ways) trainings.push_back(way.make(session, job));
  // The warm-up is limited by time, too, so that it leaves large models time for their rounds.
  RoundTimer warm_up({warm_up_steps, Clock::now() + std::chrono::seconds(5)});
  for (bool first = true; has_next_round(warm_up, communicator); first = false)
    for (std::size_t way = 0; way < ways.size(); ++way) {
      trainings[way].step();
      if (first && ways[way].averages) require_same_weights(job, ways[way], trainings[way], trainings[0]);
    }

  const int steps = steps_per_round(trainings, communicator);
  std::vector<Candidate> candidates;
  for (std::size_t way = 0; way < ways.size(); ++way)
    candidates.push_back({.name = ways[way].name, .operations = steps, .run = [steps, &training = trainings[way]] {
                            for (int i = 0; i < steps; ++i) training.step();
                          }});
  std::optional<BareExchange> exchange;
  if (session.num_nodes() > 1)
    candidates.push_back({.name = "bare exchange",
                          .operations = steps,
                          .run = [steps, &exchange = exchange.emplace(trainings[0].model())] {
                            for (int i = 0; i < steps; ++i) exchange();
                          }});
  auto timings = measure(communicator, candidates, measurement);
  for (std::size_t way = 0; way < ways.size(); ++way)
    if (ways[way].averages) require_same_on_all_ranks(job, ways[way], trainings[way], communicator);
  return timings;
}

/// Only averaging and Adam. One backward() makes the gradients before, so that they lie in the memory that muster gives
/// them; the timed steps use them again and again.
class AdamStep {
 public:
  explicit AdamStep(const std::function<std::unique_ptr<torch::optim::Optimizer>(torch::nn::Linear&)>& make)
      : module_(torch::nn::LinearOptions(5000, 5000).bias(false)), optimizer_(make(module_)) {
    module_->forward(torch::full({1, 5000}, 1e-3)).sum().backward();
  }
  void operator()() { optimizer_->step(); }
  torch::nn::Linear& module() { return module_; }

 private:
  torch::nn::Linear module_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

Timings measure_adam(Session& session, const Measurement& measurement) {
  using torch::optim::Adam;
  const auto alone = [](torch::nn::Linear& module) -> std::unique_ptr<torch::optim::Optimizer> {
    return std::make_unique<Adam>(module->parameters(), 1e-3);
  };
  const auto fused = [&](torch::nn::Linear& module) -> std::unique_ptr<torch::optim::Optimizer> {
    session.prepare_model(module);
    return std::unique_ptr<torch::optim::Optimizer>(new PreparedOptimizer<Adam>(
        session.prepare_optimizer(Adam(module->parameters(), 1e-3), {.fuse = Fuse::always})));
  };
  AdamStep mine(fused), again(fused), plain(alone), flat(alone);
  FlatAverage average(flat.module()->parameters());
  constexpr int steps = 4;
  const auto repeated = [](auto& step) {
    return [&step] {
      for (int i = 0; i < steps; ++i) step();
    };
  };
  const std::vector<Candidate> candidates{{.name = ours, .operations = steps, .run = repeated(mine)},
                                          {.name = "mpi",
                                           .operations = steps,
                                           .run =
                                               [&] {
                                                 for (int i = 0; i < steps; ++i) {
                                                   average();
                                                   flat();
                                                 }
                                               }},
                                          {.name = twin, .operations = steps, .run = repeated(again)},
                                          {.name = "adam alone", .operations = steps, .run = repeated(plain)}};
  for (const auto& candidate : candidates) candidate.run();
  return measure(session.communicator(), candidates, measurement);
}

Timings measure_case(Session& session, const std::string& name, const Measurement& measurement) {
  if (name == adam_case) return measure_adam(session, measurement);
  if (name == own_loop_case)
    return measure_training(session, step_case(own_loop_base_case), own_loop_ways, measurement);
  if (name == own_loop_prepared_case)
    return measure_training(session, step_case(own_loop_base_case), own_loop_prepared_ways, measurement);
  if (session.num_nodes() > 1) return measure_training(session, step_case(name), ways_over_nodes, measurement);
  return measure_training(session, step_case(name), ways, measurement);
}

Row measure_step(Launch& launch, const std::string& name, const Options&, const Measurement& measurement) {
  Row row;
  in_session(launch, name, [&](Session& session) { row = make_row(name, measure_case(session, name, measurement)); });
  return row;
}

}  // namespace

Benchmark step() {
  Benchmark benchmark{.measure_in_process = measure_step, .measure_processes = add_step_peers};
  for (const auto& entry : step_cases) benchmark.cases.emplace_back(entry.name);
  for (const auto* const name : {adam_case, own_loop_case, own_loop_prepared_case}) benchmark.cases.emplace_back(name);
  return benchmark;
}

}  // namespace muster::bench
