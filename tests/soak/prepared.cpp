#include "soak/prepared.hpp"

#include "gradients/data_parallel.hpp"
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

class Prepared final : public Side {
 public:
  Prepared(const Program& program, const Communicator& world) : Side(program), rank_(world.rank()) {
    const detail::gradients::ParallelContext shared{.communicator = world,
                                                    .new_group = [world] { return make_process_group(world); },
                                                    .steps = steps_,
                                                    .no_sync_depth = no_sync_depth_,
                                                    .share_memory = program.exchange == Program::Exchange::shared,
                                                    .share = {.total = world.size(), .first = world.rank()}};
    const auto bucket = static_cast<std::size_t>(program.bucket_bytes);
    const ModelOptions options{
        .bucket_bytes = bucket,
        .first_bucket_bytes = bucket / 2,
        .comm_hook = program.exchange == Program::Exchange::hook ? CommHook(average) : CommHook(),
        .progress_thread = program.progress_thread};
    for (auto& net : nets_) models_.push_back(detail::gradients::DataParallel::prepare(net.ptr(), shared, options));
    for (std::size_t m = 0; m < nets_.size(); ++m)
      with_optimizer(program.optimizer, program.settings[m], nets_[m]->each(), [&](auto own) {
        using Optimizer = PreparedOptimizer<std::decay_t<decltype(own)>>;
        auto step = detail::optim::make_optimizer_step(
            own, models_, {.max_grad_norm = program.max_grad_norm, .fuse = program.fuse ? Fuse::always : Fuse::never});
        auto prepared = std::make_unique<Optimizer>(std::move(own), std::move(step));
        fused_.push_back([raw = prepared.get()] { return raw->fused(); });
        optimizers_.push_back(std::move(prepared));
      });
  }

  void set(const std::vector<OptimizerSetting>& settings) override {
    for (std::size_t m = 0; m < settings.size(); ++m) soak::set(*optimizers_[m], program_.optimizer, settings[m]);
  }

  void pass(const Pass& pass) override {
    const auto& mine = pass.ranks.at(static_cast<std::size_t>(rank_));
    *weight_ = {.total = static_cast<int>(pass.ranks.size())};
    if (pass.weighted) {
      weight_->local = mine.weight;
      for (const auto& part : pass.ranks) weight_->global += part.weight;
    }
    if (pass.given) weight_->given = mine.given;
    std::optional<NoSync> scope;
    if (!pass.sync) scope.emplace(no_sync_depth_);
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
    for (auto& model : models_) model->synchronise_buffers();
    Part part;
    for (const auto& model : program_.models) {
      part.branches.emplace_back();
      for (std::size_t b = 0; b < model.branches.size(); ++b) part.branches.back().push_back(static_cast<int>(b));
    }
    for (std::size_t m = 0; m < nets_.size(); ++m) nets_[m]->loss(part, static_cast<int>(m), false);
  }
  bool shows_averages(int model) const override { return !fused_[static_cast<std::size_t>(model)](); }

 private:
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
  std::shared_ptr<detail::step::BatchWeight> weight_ = std::make_shared<detail::step::BatchWeight>();
  std::shared_ptr<detail::step::Steps> steps_ = std::make_shared<detail::step::Steps>();
  const std::int64_t scope_ = steps_->enter_scope(weight_);
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  std::vector<std::shared_ptr<detail::gradients::DataParallel>> models_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;
  std::vector<std::function<bool()>> fused_;
};

}  // namespace

std::unique_ptr<Side> make_prepared(const Program& program, const Communicator& world) {
  return std::make_unique<Prepared>(program, world);
}

}  // namespace muster::soak
