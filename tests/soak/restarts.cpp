// A run drawn from a seed is interrupted and started again. It is compared with an undisturbed one: one process that
// trains with plain torch over the same batches. Some epochs have two passes. Everything is in double precision.
//   restarts --draw SEED --plain FILE                      plays the undisturbed run and writes its end to FILE
//   mpirun -n RANKS restarts --draw SEED --start N --want FILE --name NAME --storage FOLDER
// How start N ends is drawn too, and noted in FILE.ending; the fourth start is not interrupted. A start that finishes
// the run compares it, notes this in FILE.compared, and ends with 1 if it differs. With MUSTER_TEST_EXCHANGE=nodes each
// rank is told that it is alone on a node, with "pairs" that the first node has one rank and each other node two; then
// some ranks are killed in the middle of an exchange between nodes.
#include "comm/mpi_scope.hpp"
#include "muster/muster.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "soak/net.hpp"

#include <ATen/ATen.h>
#include <mpi.h>
#include <signal.h>
#include <torch/nn.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

/// The process ends itself at this call of MPI_Isend, counted from now on; 0 if at none.
std::atomic<int> last_message{0};

}  // namespace

extern "C" int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm,
                         MPI_Request* request) {
  if (last_message > 0 && --last_message == 0) ::raise(SIGKILL);
  return PMPI_Isend(data, count, type, to, tag, comm, request);
}

namespace muster::soak {
namespace {

/// Rounding error of a whole run in double precision.
constexpr double tolerance = 1e-10;
/// Starts from this one on are not interrupted.
constexpr int last_start = 4;

struct Choice {
  std::uint64_t seed = 1;
  int start = 1;
  std::string plain, want;
};

struct Plan {
  std::vector<int> widths;  ///< from the inputs to the last hidden layer
  std::int64_t samples, checked, epochs, batch, accumulate;
  bool shuffle, drop_last, even, norm, fuse, scheduled, progress_thread;
  int prefetch, retries;
  Program::Optimizer kind;
  OptimizerSetting setting;
  double max_grad_norm;
  std::int64_t unfrozen_from;  ///< first epoch with an unfrozen first layer; 0: never frozen
  // In updates; 0: never.
  int report, check, prune, exception;
  bool report_ends, check_ends;
  bool report_in_step;  ///< a report comes after each batch of its update, so also while gradients are added up
  std::optional<int> keep;
  int passes;       ///< of an epoch; a report comes between them
  bool other_data;  ///< the second one is over a dataset of its own

  std::int64_t pass_batches() const { return drop_last ? samples / batch : (samples + batch - 1) / batch; }
  std::int64_t epoch_batches() const { return passes * pass_batches(); }
};

Plan draw_plan(std::uint64_t seed) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + 77);
  Plan plan{};
  plan.widths = {dice.between(1, 6)};
  for (int i = dice.between(1, 3); i > 0; --i) plan.widths.push_back(dice.one_of({1, 3, 8, 33, 128}));
  if (dice.chance(0.15)) plan.widths.insert(plan.widths.end(), {700, 700});
  plan.batch = dice.between(1, 14);
  plan.samples = plan.batch + dice.between(0, 70);
  plan.checked = dice.between(1, 30);
  plan.epochs = dice.between(2, 5);
  plan.accumulate = dice.chance(0.4) ? dice.between(2, 4) : 1;
  plan.shuffle = dice.chance(0.7);
  plan.drop_last = dice.chance(0.2);
  plan.even = dice.chance(0.4);
  plan.norm = dice.chance(0.3);
  plan.fuse = dice.chance(0.6);
  plan.scheduled = dice.chance(0.4);
  plan.progress_thread = dice.chance(0.3);
  plan.prefetch = dice.between(0, 3);
  plan.retries = dice.chance(0.3) ? 1 : 0;
  plan.kind = dice.one_of({Program::Optimizer::sgd, Program::Optimizer::adam, Program::Optimizer::adamw});
  plan.setting.lr = dice.real(0.001, 0.01);
  // If training diverged, rounding errors would grow with it.
  if (plan.widths.back() == 700) plan.setting.lr *= 0.03;
  if (plan.kind == Program::Optimizer::sgd && dice.chance(0.7)) plan.setting.momentum = dice.real(0.2, 0.9);
  if (dice.chance(0.5)) plan.setting.weight_decay = dice.real(0.001, 0.1);
  plan.setting.eps = 1e-6;
  if (dice.chance(0.3)) plan.max_grad_norm = dice.real(0.05, 1);
  if (dice.chance(0.3)) plan.unfrozen_from = dice.between(1, 3);
  const auto every = [&](double share) { return dice.chance(share) ? dice.between(1, 6) : 0; };
  plan.report = every(0.7);
  plan.check = every(0.4);
  plan.prune = every(0.3);
  plan.exception = every(0.25);
  plan.report_ends = plan.report == 0 || dice.chance(0.6);
  plan.check_ends = dice.chance(0.5);
  if (dice.chance(0.6)) plan.keep = dice.between(1, 3);
  plan.report_in_step = dice.chance(0.5);
  plan.passes = dice.chance(0.4) ? 2 : 1;
  plan.other_data = dice.chance(0.5);
  // An epoch of two passes has about as many batches as others.
  if (plan.passes == 2) plan.samples -= (plan.samples - plan.batch) / 2;
  return plan;
}

/// How a start ends.
struct Ending {
  enum class Way { none, kill, raise, raise_everywhere, stop } way = Way::none;
  enum class Place { before, after_backward, after_step, after_report, in_messages } place = Place::before;
  std::int64_t batch = 0;
  int rank = 0;
  int message = 0;  ///< with in_messages: the one at which it ends, counted from the beginning of the batch
};

/// The nodes that the ranks are told of, "nodes" or "pairs"; empty for the machine's own.
std::string pretended_nodes() {
  const char* const ways = std::getenv("MUSTER_TEST_EXCHANGE");
  return ways == nullptr ? "" : ways;
}

/// Moves some endings to the report between two passes.
void move_ending(Ending& ending, const Plan& plan, std::int64_t first, Dice& dice) {
  const auto pass = plan.pass_batches(), epoch = plan.epoch_batches();
  if (dice.chance(0.6)) {
    ending.batch += pass - dice.below(2) - ending.batch % epoch;
    if (ending.batch < first) ending.batch += epoch;
  }
  // A run that ends there in its first epoch does not know of the second pass, and leaves it out: docs/checkpoints.md.
  // The ranks agree on a stop in the update after the signal, and all are in the second pass after its first update.
  const auto update = plan.accumulate;
  if (ending.batch >= pass - update - 2 && ending.batch < pass + update) ending.batch += epoch;
}

/// Draws one of the batches from `first` on.
Ending draw_ending(const Choice& choice, const Plan& plan, std::int64_t first, int ranks) {
  const auto batches = plan.epochs * plan.epoch_batches();
  Dice dice(choice.seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(choice.start));
  Ending ending;
  if (!choice.plain.empty() || choice.start >= last_start || first >= batches) return ending;
  using Way = Ending::Way;
  ending.way = dice.one_of({Way::kill, Way::kill, Way::raise, Way::raise_everywhere, Way::stop, Way::stop});
  ending.place = static_cast<Ending::Place>(dice.below(4));
  // Some starts end at once, most in the first half of the remaining batches.
  ending.batch = first + dice.below(static_cast<int>(dice.chance(0.7) ? (batches - first + 1) / 2 : batches - first));
  ending.rank = dice.below(ranks);
  if (plan.passes > 1) move_ending(ending, plan, first, dice);
  if (ending.way == Way::kill && ranks > 1 && !pretended_nodes().empty() && dice.chance(0.7)) {
    ending.place = Ending::Place::in_messages;
    ending.message = dice.chance(0.5) ? dice.between(1, 12) : dice.between(1, 60);
  }
  return ending;
}

class LayersImpl : public torch::nn::Module {
 public:
  explicit LayersImpl(const Plan& plan, std::uint64_t seed) : norm_(plan.norm) {
    const auto add = [&](const std::string& name, at::IntArrayRef sizes, double scale) {
      return register_parameter(name, numbers(sizes, ++seed) * scale);
    };
    for (std::size_t i = 1; i < plan.widths.size(); ++i) {
      const auto in = plan.widths[i - 1], out = plan.widths[i];
      const auto name = "layer" + std::to_string(i);
      weights_.push_back(add(name + "_weight", {out, in}, 1.5 / std::sqrt(in)));
      biases_.push_back(add(name + "_bias", {out}, 0.5));
    }
    out_ = add("out", {plan.widths.back()}, 1 / std::sqrt(plan.widths.back()));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      x = at::tanh(at::linear(x, weights_[i], biases_[i]));
      if (norm_) x = at::layer_norm(x, {x.size(1)}, {}, {}, 1e-2);
    }
    return at::matmul(x, out_);
  }
  void freeze_first(bool frozen) {
    weights_.front().set_requires_grad(!frozen);
    biases_.front().set_requires_grad(!frozen);
  }
  /// Zeroes a part of the first layer without autograd noticing, as pruning does.
  void prune() {
    auto& weight = weights_.front();
    std::fill_n(weight.data_ptr<double>(), std::max<std::int64_t>(1, weight.numel() / 8), 0.0);
  }

 private:
  bool norm_;
  std::vector<at::Tensor> weights_, biases_;
  at::Tensor out_;
};
TORCH_MODULE(Layers);

class Trainee {
 public:
  Trainee(Session& session, const Plan& plan, const Choice& choice)
      : session_(session), plan_(plan), choice_(choice), plain_(!choice.plain.empty()), net_(plan, choice.seed * 100) {
    net_->freeze_first(plan.unfrozen_from > 0);
    if (!plain_) session.prepare_model(net_, {.progress_thread = plan.progress_thread});
    with_optimizer(plan.kind, plan.setting, net_->parameters(), [&](auto own) {
      if (plain_)
        optimizer_ = std::make_unique<std::decay_t<decltype(own)>>(std::move(own));
      else
        optimizer_ = std::make_unique<PreparedOptimizer<std::decay_t<decltype(own)>>>(session.prepare_optimizer(
            std::move(own), {.max_grad_norm = plan.max_grad_norm, .fuse = plan.fuse ? Fuse::always : Fuse::never}));
    });
    scheduler_ = std::make_unique<torch::optim::StepLR>(*optimizer_, 1, plan.scheduled ? 0.7 : 1.0);
  }

  void run() {
    auto state = session_.state({{"net", net_},
                                 {"optimizer", *optimizer_},
                                 {"scheduler", *scheduler_},
                                 {"taken", taken_},
                                 {"trail", trail_},
                                 {"loss", loss_}});
    if (!plain_) state.restore();
    ending_ = draw_ending(choice_, plan_, taken_, session_.world_size());
    for (const auto epoch : session_.epochs(plan_.epochs)) {
      net_->freeze_first(epoch < plan_.unfrozen_from);
      if (taken_ == epoch * plan_.epoch_batches()) loss_.reset();
      make_pass("train", state);
      if (plan_.passes > 1) {
        if (!plain_) session_.report({{"loss", loss_}}, state);
        make_pass(plan_.other_data ? "more" : "train", state);
      }
      if (taken_ != (epoch + 1) * plan_.epoch_batches()) throw std::logic_error("an epoch has ended early");
      if (plan_.check_ends) check();
      scheduler_->step();
      if (plan_.report_ends && !plain_) session_.report({{"loss", loss_}}, state);
    }
    compare();
  }

 private:
  BatchOptions batches() const {
    BatchOptions options{.shuffle = plan_.shuffle, .drop_last = plan_.drop_last, .prefetch_batches = plan_.prefetch};
    if (plan_.even && plan_.batch % session_.world_size() == 0)
      options.batch_size = plan_.batch / session_.world_size();
    else
      options.global_batch_size = plan_.batch;
    return options;
  }

  at::Tensor loss_of(const Batch& batch) { return (net_->forward(batch["x"]) - batch["y"]).square().mean(); }

  void make_pass(const std::string& dataset, const State& state) {
    for (auto& batch : session_.get_dataset_shard(dataset).iter_torch_batches(batches())) train(batch, state);
  }

  void train(const Batch& batch, const State& state) {
    const auto index = taken_ % plan_.pass_batches();
    if (batch.global_size() != std::min(plan_.batch, plan_.samples - index * plan_.batch))
      throw std::logic_error("batch " + std::to_string(taken_) + " is of another step");
    if (session_.global_step() != taken_ + 1)
      throw std::logic_error("batch " + std::to_string(taken_) + " is step " + std::to_string(session_.global_step()));
    const bool first = index % plan_.accumulate == 0;
    const bool last = (index + 1) % plan_.accumulate == 0 || index + 1 == plan_.pass_batches();
    const auto update = index / plan_.accumulate + 1;
    const auto due = [&](int every) { return every > 0 && update % every == 0; };
    if (first) optimizer_->zero_grad();
    end(Ending::Place::before);
    end(Ending::Place::in_messages);
    if (first && !plain_ && due(plan_.exception)) {
      auto loss = loss_of(batch);
      loss.register_hook([](const at::Tensor&) { throw Thrown(); });
      bool caught = false;
      try {
        (loss + loss_of(batch)).backward();
      } catch (const Thrown&) {
        caught = true;
      }
      if (!caught) throw std::logic_error("an exception was expected here");
      optimizer_->zero_grad();
    }
    auto loss = loss_of(batch);
    if (last || plain_) {
      loss.backward();
    } else {
      const auto scope = session_.no_sync();
      loss.backward();
    }
    loss_.add(loss, batch.size());
    end(Ending::Place::after_backward);
    if (last) {
      if (plain_ && plan_.max_grad_norm > 0) torch::nn::utils::clip_grad_norm_(net_->parameters(), plan_.max_grad_norm);
      optimizer_->step();
      end(Ending::Place::after_step);
      if (due(plan_.prune)) net_->prune();
      if (due(plan_.check)) check();
    }
    ++taken_;
    if ((last || plan_.report_in_step) && due(plan_.report) && !plain_) session_.report({{"loss", loss_}}, state);
    --taken_;
    end(Ending::Place::after_report);
    ++taken_;
  }

  double sum_over_ranks(double value) const { return session_.communicator().all_reduce(value); }

  /// Adds the mean loss over the other dataset to trail_.
  void check() {
    double sum = 0;
    {
      const auto scope = session_.evaluation(net_);
      for (auto& batch : session_.get_dataset_shard("check").iter_torch_batches({.global_batch_size = 4}))
        sum += loss_of(batch).item<double>() * static_cast<double>(batch.size());
    }
    trail_ = trail_ / 2 + sum_over_ranks(sum) / static_cast<double>(plan_.checked);
  }

  /// Ends this start if it is to end here. Does so only once, so that a retry in the same start continues.
  void end(Ending::Place place) const {
    static bool ended = false;
    if (ended || ending_.way == Ending::Way::none || ending_.place != place || ending_.batch != taken_) return;
    if (ending_.way != Ending::Way::raise_everywhere && ending_.rank != session_.world_rank()) return;
    ended = true;
    static const char* const ways[] = {"", "kill", "raise", "raise", "stop"};
    std::ofstream(choice_.want + ".ending") << ways[static_cast<int>(ending_.way)] << '\n';
    if (place == Ending::Place::in_messages) {
      last_message = ending_.message;
      return;
    }
    if (ending_.way == Ending::Way::kill) ::raise(SIGKILL);
    if (ending_.way == Ending::Way::stop)
      ::raise(SIGUSR1);
    else
      throw std::runtime_error("ended by the program on rank " + std::to_string(session_.world_rank()));
  }

  void compare() const {
    std::vector<double> have;
    for (const auto& p : net_->parameters()) {
      const auto flat = p.detach().contiguous();
      have.insert(have.end(), flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
    }
    const auto samples = sum_over_ranks(static_cast<double>(loss_.samples()));
    have.push_back(trail_);
    have.push_back(sum_over_ranks(loss_.samples() > 0 ? loss_.value() * static_cast<double>(loss_.samples()) : 0));
    have.push_back(samples);
    if (plain_) {
      std::ofstream(choice_.plain, std::ios::binary)
          .write(reinterpret_cast<const char*>(have.data()),
                 static_cast<std::streamsize>(have.size() * sizeof(double)));
      return;
    }
    std::vector<double> want(have.size());
    std::ifstream(choice_.want, std::ios::binary)
        .read(reinterpret_cast<char*>(want.data()), static_cast<std::streamsize>(want.size() * sizeof(double)));
    for (std::size_t i = 0; i < have.size(); ++i)
      if (!(std::abs(have[i] - want[i]) <= tolerance * (1 + std::abs(want[i]))))
        throw std::logic_error("number " + std::to_string(i) + " of " + std::to_string(have.size()) + " is " +
                               std::to_string(have[i]) + ", not " + std::to_string(want[i]) + ", apart by " +
                               std::to_string((have[i] - want[i]) * 1e9) + "e-9");
    if (session_.world_rank() == 0) std::ofstream(choice_.want + ".compared") << have.size() << '\n';
  }

  Session& session_;
  const Plan& plan_;
  const Choice& choice_;
  bool plain_;
  Layers net_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<torch::optim::StepLR> scheduler_;
  std::int64_t taken_ = 0;  ///< number of batches taken
  double trail_ = 0;
  Mean loss_;
  Ending ending_;
};

Dataset make_dataset(std::int64_t samples, int inputs, std::uint64_t seed) {
  const auto x = numbers({samples, inputs}, seed);
  return Dataset::from_tensors({{"x", x}, {"y", at::sin(x.sum(1) * 2)}});
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  const auto nodes = soak::pretended_nodes();
  std::optional<muster::detail::comm::MpiScope> mpi;
  if (!nodes.empty()) mpi.emplace();
  const auto node_of = [&](int rank) { return nodes == "nodes" ? rank : (rank + 1) / 2; };
  std::optional<Launch> made;
  mpi ? made.emplace(argc, argv, soak::on_nodes(mpi->world(), node_of)) : made.emplace(argc, argv);
  auto& launch = *made;
  soak::Choice choice;
  launch.app().add_option("--draw", choice.seed);
  launch.app().add_option("--start", choice.start);
  launch.app().add_option("--plain", choice.plain);
  launch.app().add_option("--want", choice.want);
  return launch.run([&] {
    const auto plan = soak::draw_plan(choice.seed);
    TorchTrainerOptions options{
        .dataset_config = {.split_all = true},
        .run_config = {.checkpoint_config = {.num_to_keep = plan.keep},
                       .failure_config = {.max_failures = plan.retries}},
        .datasets = {{"train", soak::make_dataset(plan.samples, plan.widths.front(), choice.seed + 1)},
                     {"check", soak::make_dataset(plan.checked, plan.widths.front(), choice.seed + 2)},
                     {"more", soak::make_dataset(plan.samples, plan.widths.front(), choice.seed + 3)}}};
    return TorchTrainer(
               launch, [&](Session& session) { soak::Trainee(session, plan, choice).run(); }, options)
        .fit();
  });
}
