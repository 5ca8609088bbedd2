#include "soak/prepared.hpp"

#include "gradients/prepared_model.hpp"
#include "muster/data_parallel.hpp"
#include "muster/error.hpp"
#include "muster/optimizer.hpp"
#include "muster/process_group.hpp"
#include "optim/optimizer_step.hpp"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <type_traits>
#include <utility>

namespace muster::soak {
namespace {

void average(GradBucket& bucket, c10d::ProcessGroup& group) {
  std::vector<at::Tensor> tensors{bucket.gradients};
  group.allreduce(tensors)->wait();
}

ModelOptions options_of(const Program& program) {
  const auto bucket = static_cast<std::size_t>(program.bucket_bytes);
  return {.bucket_bytes = bucket,
          .first_bucket_bytes = bucket / 2,
          .comm_hook = program.exchange == Program::Exchange::hook ? CommHook(average) : CommHook(),
          .progress_thread = program.progress_thread};
}

/// What both ways of preparing have in common.
class Prepared : public Side {
 public:
  void set(const std::vector<OptimizerSetting>& settings) override {
    for (std::size_t m = 0; m < settings.size(); ++m) soak::set(*optimizers_[m], program_.optimizer, settings[m]);
  }

  void pass(const Pass& pass) override {
    const auto& mine = pass.ranks.at(static_cast<std::size_t>(rank_));
    const auto scopes = enter(pass, mine);
    const auto backward = [&] {
      at::Tensor loss;
      for (const int m : mine.models) {
        const bool throws = mine.throws_at >= 0 && m == mine.models.front();
        const auto one = nets_[static_cast<std::size_t>(m)]->loss(mine, m, throws);
        loss = loss.defined() ? loss + one : one;
      }
      loss.backward();
    };
    if (pass.throws == Pass::Throws::none) return backward();
    if (mine.throws_at >= 0) return expect_exception<Thrown>(backward);
    // Other ranks have left this pass and continue. This rank must get an error, with a fused optimizer at its step.
    expect_exception<Error>([&] {
      backward();
      for (const int m : mine.models) step(m);
    });
  }

  void step(int model) override { optimizers_[static_cast<std::size_t>(model)]->step(); }
  void evaluate() override {
    const at::NoGradGuard no_grad;
    average_buffers();
    Part part;
    for (const auto& model : program_.models) {
      part.branches.emplace_back();
      for (std::size_t b = 0; b < model.branches.size(); ++b) part.branches.back().push_back(static_cast<int>(b));
    }
    for (std::size_t m = 0; m < nets_.size(); ++m) nets_[m]->loss(part, static_cast<int>(m), false);
  }
  bool shows_averages(int model) const override { return !fused_[static_cast<std::size_t>(model)](); }

 protected:
  Prepared(const Program& program, const Communicator& world) : Side(program), rank_(world.rank()) {}

  /// `prepare(model, optimizer, options)` prepares the optimizer of that model.
  template <class Prepare>
  void prepare_optimizers(const Prepare& prepare) {
    const OptimizerOptions options{.max_grad_norm = program_.max_grad_norm,
                                   .fuse = program_.fuse ? Fuse::always : Fuse::never};
    for (std::size_t m = 0; m < nets_.size(); ++m)
      with_optimizer(program_.optimizer, program_.settings[m], nets_[m]->each(), [&](auto own) {
        using Optimizer = PreparedOptimizer<std::decay_t<decltype(own)>>;
        auto prepared = std::unique_ptr<Optimizer>(new Optimizer(prepare(m, std::move(own), options)));
        fused_.push_back([raw = prepared.get()] { return raw->fused(); });
        optimizers_.push_back(std::move(prepared));
      });
  }

 private:
  using Scopes = std::vector<std::shared_ptr<const void>>;
  /// Begins the scopes of a pass.
  virtual Scopes enter(const Pass& pass, const Part& mine) = 0;
  virtual void average_buffers() = 0;

  template <class Expected, class Action>
  static void expect_exception(const Action& action) {
    try {
      action();
    } catch (const Expected&) {
      return;
    }
    throw std::logic_error("an exception was expected here");
  }

  int rank_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<std::function<bool()>> fused_;
};

/// As a session prepares them.
class InSession final : public Prepared {
 public:
  InSession(const Program& program, const Communicator& world) : Prepared(program, world) {
    const detail::gradients::ParallelContext shared{.communicator = world,
                                                    .new_group = [world] { return make_process_group(world); },
                                                    .steps = steps_,
                                                    .no_sync_depth = no_sync_depth_,
                                                    .share_memory = program.exchange == Program::Exchange::shared,
                                                    .share = {.total = world.size(), .first = world.rank()}};
    for (auto& net : nets_)
      models_.push_back(detail::gradients::PreparedModel::prepare(net.ptr(), shared, options_of(program)));
    prepare_optimizers([&](std::size_t, auto own, const OptimizerOptions& options) {
      auto step = detail::optim::make_optimizer_step(own, models_, options);
      return PreparedOptimizer<decltype(own)>(std::move(own), std::move(step));
    });
  }

 private:
  std::vector<std::shared_ptr<const void>> enter(const Pass& pass, const Part& mine) override {
    *weight_ = {.total = static_cast<int>(pass.ranks.size())};
    if (pass.weighted) {
      weight_->local = mine.weight;
      for (const auto& part : pass.ranks) weight_->global += part.weight;
    }
    if (pass.given) weight_->given = mine.given;
    if (pass.sync) return {};
    return {std::make_shared<NoSync>(no_sync_depth_)};
  }
  void average_buffers() override {
    for (auto& model : models_) model->synchronise_buffers();
  }

  std::shared_ptr<detail::step::BatchWeight> weight_ = std::make_shared<detail::step::BatchWeight>();
  std::shared_ptr<detail::step::Steps> steps_ = std::make_shared<detail::step::Steps>();
  const std::int64_t scope_ = steps_->enter_scope(weight_);
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  std::vector<std::shared_ptr<detail::gradients::PreparedModel>> models_;
};

/// As a program with a loop of its own prepares them, a DataParallel for each model.
class InOwnLoop final : public Prepared {
 public:
  InOwnLoop(const Program& program, const Communicator& world) : Prepared(program, world) {
    for (auto& net : nets_)
      parallel_.push_back(
          std::make_unique<DataParallel>(world, net, DataParallelOptions{.model = options_of(program)}));
    prepare_optimizers([&](std::size_t m, auto own, const OptimizerOptions& options) {
      return parallel_[m]->prepare_optimizer(std::move(own), options);
    });
  }

 private:
  std::vector<std::shared_ptr<const void>> enter(const Pass& pass, const Part& mine) override {
    std::vector<std::shared_ptr<const void>> scopes;
    for (const auto& parallel : parallel_) {
      if (pass.given) scopes.push_back(std::shared_ptr<StepScope>(new StepScope(parallel->step(mine.given))));
      if (!pass.sync) scopes.push_back(std::shared_ptr<NoSync>(new NoSync(parallel->no_sync())));
    }
    return scopes;
  }
  void average_buffers() override {
    for (const auto& parallel : parallel_) parallel->average_buffers();
  }

  std::vector<std::unique_ptr<DataParallel>> parallel_;
};

}  // namespace

std::unique_ptr<Side> make_prepared(const Program& program, const Communicator& world) {
  return std::make_unique<InSession>(program, world);
}

std::unique_ptr<Side> make_own_loop(const Program& program, const Communicator& world) {
  return std::make_unique<InOwnLoop>(program, world);
}

}  // namespace muster::soak
