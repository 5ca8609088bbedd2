// Plays random programs of optimizers with muster and without, and compares the weights. The programs have several
// optimizers over overlapping parameters, prepared or not, fused or not. Between steps they clip, scale, freeze, write
// and save.
//   mpirun -n RANKS optimizers --first SEED --count PROGRAMS
//   mpirun -n RANKS optimizers --seed SEED         one program, printed action by action
// The reference is this process alone, with torch's own optimizers, on the batches of all ranks. A program that a fused
// optimizer cannot play correctly may end with an Error, the same on all ranks. Ends with 1 if anything differs or a
// program ends in any other way.
#include "gradients/prepared_model.hpp"
#include "muster/ema.hpp"
#include "muster/error.hpp"
#include "muster/mixed_precision.hpp"
#include "muster/optimizer.hpp"
#include "muster/process_group.hpp"
#include "muster/state.hpp"
#include "optim/optimizer_step.hpp"
#include "soak/dice.hpp"
#include "soak/driver.hpp"
#include "soak/net.hpp"
#include "state/stateful.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace muster::soak {
namespace {

/// Rounding error in double precision; a line search amplifies it.
constexpr double tolerance = 1e-10, tolerance_of_lbfgs = 1e-6;
/// If two losses are this close, a line search has narrowed its interval down to rounding, and rounding decides the
/// step.
constexpr double rounding_of_losses = 1e-10;
enum class Kind { sgd, adam, amsgrad, adamw, rmsprop, adagrad, lbfgs };
constexpr const char* names_of_kinds[] = {"SGD", "Adam", "AMSGrad", "AdamW", "RMSprop", "Adagrad", "LBFGS"};

struct Choice {
  Kind kind = Kind::sgd;
  double lr = 0.01, momentum = 0, weight_decay = 0, max_grad_norm = 0;
  bool nesterov = false, centered = false;
  bool prepared = true;
  Fuse fuse = Fuse::always;
  bool whole = true;
  std::vector<int> branches = {};  ///< branches whose parameters it has, unless `whole`
  bool ends = false;               ///< it has the parameters before and after the branches
};

/// The next action of a training function.
struct Act {
  enum class Kind {
    toggle,   ///< freezes or unfreezes a branch
    zero,     ///< zero_grad(`flag`): true sets gradients to none
    pass,     ///< backward(), each rank on its own batches
    average,  ///< average_gradients() of a prepared optimizer
    clip,     ///< clips an optimizer's gradients by hand to the norm `number`
    unscale,  ///< the scaler's unscale_() for an optimizer
    step,
    write,              ///< the same on all ranks
    write_alias,        ///< through an alias detached before preparation, or after it
    write_on_one_rank,  ///< on one rank only, if anything is fused there; ends the program
    touch,              ///< a write that changes nothing
    perturb,            ///< moves along the gradients, as sharpness-aware minimisation does
    restore,
    reload,  ///< loads the optimizer's state into a new optimizer
    ema,
    look_at_averages,  ///< swaps the averages of weights in for a moment
    rate,              ///< multiplies the learning rate by `number`
  } kind = Kind::zero;
  int optimizer = 0;
  int branch = 0;
  bool flag = true;
  double number = 1;
  Pass pass = {};
  Change change = {};
};
constexpr const char* names_of_acts[] = {
    "freeze or not",   "zero",  "pass",    "average", "clip",   "unscale", "step", "write",        "alias",
    "write somewhere", "touch", "perturb", "restore", "reload", "ema",     "look", "learning rate"};

struct Plan {
  std::uint64_t seed = 0;
  int ranks = 1;
  int micro_batches = 0;  ///< per rank, with virtual workers; 0: no virtual workers
  Model model;
  std::vector<Choice> optimizers;
  std::vector<Act> acts;
  bool scales = false;
  bool shares_memory = true;
  bool progress_thread = false;
  enum class Alias { none, before, after, two_parameters } alias = Alias::none;
};

// --- drawing ---------------------------------------------------------------------------------------------------------

Pass draw_pass(Dice& dice, const Plan& plan, bool sync) {
  Pass pass;
  pass.sync = sync;
  pass.weighted = plan.micro_batches > 0 || dice.chance(0.4);
  const int parts = plan.ranks * std::max(1, plan.micro_batches);
  for (int r = 0; r < parts; ++r) {
    Part part;
    part.samples = dice.between(1, 4);
    part.data = dice.word() % 1'000'000'000;
    part.weight = pass.weighted ? dice.below(4) : 1;
    auto& used = part.branches.emplace_back();
    for (int b = 0; b < static_cast<int>(plan.model.branches.size()); ++b)
      if (dice.chance(0.85)) used.push_back(b);
    pass.ranks.push_back(std::move(part));
  }
  if (std::ranges::all_of(pass.ranks, [](const Part& part) { return part.weight == 0; })) pass.ranks[0].weight = 1;
  return pass;
}

Choice draw_optimizer(Dice& dice, bool whole, int branches) {
  Choice choice{.whole = whole};
  choice.kind = whole && dice.chance(0.6)
                    ? dice.one_of({Kind::sgd, Kind::sgd, Kind::adam, Kind::adamw})
                    : dice.one_of({Kind::sgd, Kind::adam, Kind::amsgrad, Kind::adamw, Kind::rmsprop, Kind::adagrad});
  choice.lr = dice.real(0.002, 0.02);
  choice.momentum = dice.chance(0.6) ? dice.real(0.3, 0.9) : 0;
  choice.nesterov = choice.momentum > 0 && dice.chance(0.4);
  choice.centered = dice.chance(0.3);
  choice.weight_decay = dice.chance(0.4) ? dice.real(0.001, 0.05) : 0;
  choice.prepared = dice.chance(0.8);
  choice.fuse = dice.chance(0.8) ? Fuse::always : Fuse::never;
  if (choice.prepared && dice.chance(0.3)) choice.max_grad_norm = dice.real(0.02, 1);
  for (int b = 0; !whole && b < branches; ++b)
    if (dice.chance(0.5)) choice.branches.push_back(b);
  choice.ends = !whole && (choice.branches.empty() || dice.chance(0.5));
  return choice;
}

Plan draw(std::uint64_t seed, int ranks) {
  Dice dice(seed * 7919 + static_cast<std::uint64_t>(ranks));
  Plan plan;
  plan.seed = seed;
  plan.ranks = ranks;
  if (dice.chance(0.1)) plan.micro_batches = dice.between(1, 3);
  plan.shares_memory = dice.chance(0.85);
  plan.progress_thread = dice.chance(0.2);
  plan.model.width = dice.between(2, 6);
  const int branches = dice.between(2, 5);
  for (int b = 0; b < branches; ++b) {
    using B = Branch::Kind;
    Branch branch{.kind = dice.one_of({B::linear, B::linear, B::wide, B::scale, B::shift, B::embedding, B::tied,
                                       B::transposed, B::norm}),
                  .frozen = dice.chance(0.15)};
    // Gradients of 16 KB and more can have memory of their own.
    branch.size = branch.kind == B::wide && dice.chance(0.5) ? 2500 / plan.model.width : dice.between(2, 9);
    plan.model.branches.push_back(branch);
  }
  const bool virtual_workers = plan.micro_batches > 0;
  const int count = dice.one_of({1, 1, 2, 2, 3});
  plan.scales = dice.chance(0.25);
  if (plan.scales && count > 1) {
    // Each parameter belongs to one optimizer, so that it is divided by the scale once.
    Choice rest = draw_optimizer(dice, false, branches), some = rest;
    some = draw_optimizer(dice, false, branches);
    rest.branches.clear();
    for (int b = 0; b < branches; ++b)
      if (std::ranges::find(some.branches, b) == some.branches.end() &&
          plan.model.branches[static_cast<std::size_t>(b)].kind != Branch::Kind::tied)
        rest.branches.push_back(b);
    rest.ends = !some.ends;
    plan.optimizers = {some, rest};
  } else {
    for (int i = 0; i < count; ++i) plan.optimizers.push_back(draw_optimizer(dice, dice.chance(0.65), branches));
    if (!plan.scales && !virtual_workers && dice.chance(0.15)) {
      auto& last = plan.optimizers.back();
      last.kind = Kind::lbfgs;
      last.prepared = true;
      last.max_grad_norm = 0;
      last.lr = 0.3;
      last.ends = !last.whole;  // an optimizer over a tied branch alone has no parameters
      // torch's LBFGS needs contiguous gradients.
      for (auto& branch : plan.model.branches)
        if (branch.kind == Branch::Kind::transposed) branch.kind = Branch::Kind::linear;
    }
  }
  if (dice.chance(0.15))
    plan.alias = dice.one_of({Plan::Alias::before, Plan::Alias::after, Plan::Alias::two_parameters});

  using A = Act::Kind;
  const auto which = [&] { return dice.below(static_cast<int>(plan.optimizers.size())); };
  const auto prepared = [&]() -> std::optional<int> {
    for (std::size_t i = 0; i < plan.optimizers.size(); ++i)
      if (plan.optimizers[i].prepared) return static_cast<int>(i);
    return std::nullopt;
  };
  const auto write = [&](A kind) {
    plan.acts.push_back({.kind = kind,
                         .change = {.kind = dice.one_of({Change::Kind::in_place, Change::Kind::pointer,
                                                         Change::Kind::data, Change::Kind::other_memory}),
                                    .parameter = dice.below(100)}});
  };
  const bool all_prepared = std::ranges::all_of(plan.optimizers, &Choice::prepared);
  const int steps = dice.between(3, 7);
  const bool risky = dice.chance(0.5);  // may do what only unfused optimizers support
  for (int step = 0; step < steps; ++step) {
    if (dice.chance(0.15)) plan.acts.push_back({.kind = A::toggle, .branch = dice.below(branches)});
    if (dice.chance(0.1)) plan.acts.push_back({.kind = A::rate, .optimizer = which(), .number = dice.real(0.5, 1.5)});
    const bool adds_up = !plan.scales && !virtual_workers && dice.chance(0.15);
    if (!adds_up) plan.acts.push_back({.kind = A::zero, .flag = virtual_workers || dice.chance(0.7)});
    bool adds_up_only = false;  // the step averages the sums of passes in no_sync()
    if (!virtual_workers && dice.chance(0.2)) {
      plan.acts.push_back({.kind = A::pass, .pass = draw_pass(dice, plan, false)});
      adds_up_only = all_prepared && !plan.scales && dice.chance(0.3);
    }
    if (!adds_up_only) plan.acts.push_back({.kind = A::pass, .pass = draw_pass(dice, plan, true)});
    if (!virtual_workers && !adds_up_only && dice.chance(0.2)) {
      if (risky && !plan.scales && dice.chance(0.3))
        plan.acts.push_back({.kind = A::clip, .optimizer = which(), .number = dice.real(0.01, 1)});
      plan.acts.push_back({.kind = A::pass, .pass = draw_pass(dice, plan, dice.chance(0.5))});
      if (!plan.acts.back().pass.sync) plan.acts.push_back({.kind = A::pass, .pass = draw_pass(dice, plan, true)});
    }
    bool averages = false;
    if (const auto it = prepared(); it && dice.chance(0.35)) {
      averages = true;
      plan.acts.push_back({.kind = A::average, .optimizer = *it});
    }
    const bool reads = averages || (risky && !adds_up_only);  // the program may read the gradients
    if (!virtual_workers && !plan.scales && reads && dice.chance(0.12)) {
      plan.acts.push_back({.kind = A::perturb, .number = dice.real(0.01, 0.2)});
      plan.acts.push_back({.kind = A::zero, .flag = dice.chance(0.7)});
      plan.acts.push_back({.kind = A::pass, .pass = draw_pass(dice, plan, true)});
      plan.acts.push_back({.kind = A::restore});
      averages = false;
    }
    std::vector<int> order;
    for (std::size_t i = 0; i < plan.optimizers.size(); ++i)
      if (dice.chance(0.85)) order.push_back(static_cast<int>(i));
    dice.shuffle(order);
    if (plan.scales)
      for (const int i : order)
        if (dice.chance(0.4)) plan.acts.push_back({.kind = A::unscale, .optimizer = i});
    const bool may_clip = averages || (risky && !adds_up_only);
    if ((plan.scales ? plan.acts.back().kind == A::unscale : may_clip) && dice.chance(0.3))
      plan.acts.push_back({.kind = A::clip, .optimizer = plan.acts.back().optimizer, .number = dice.real(0.01, 1)});
    if (dice.chance(0.15)) write(A::write);
    for (const int i : order) {
      const auto& choice = plan.optimizers[static_cast<std::size_t>(i)];
      Act act{.kind = A::step, .optimizer = i};
      if (choice.kind == Kind::lbfgs) act.pass = draw_pass(dice, plan, true);
      plan.acts.push_back(std::move(act));
      if (dice.chance(0.1)) write(A::write);
    }
    if (dice.chance(0.15)) write(A::write);
    if (plan.alias != Plan::Alias::none && dice.chance(0.3)) plan.acts.push_back({.kind = A::write_alias});
    if (dice.chance(0.15)) plan.acts.push_back({.kind = A::touch, .flag = dice.chance(0.5)});
    if (dice.chance(0.4)) plan.acts.push_back({.kind = A::ema});
    if (dice.chance(0.15)) plan.acts.push_back({.kind = A::look_at_averages});
    if (dice.chance(0.12)) plan.acts.push_back({.kind = A::reload, .optimizer = which()});
    if (risky && dice.chance(0.08)) write(A::write_on_one_rank);
  }
  return plan;
}

std::string describe(const Plan& plan) {
  std::ostringstream text;
  text << "width " << plan.model.width << ", branches";
  for (const auto& b : plan.model.branches) text << ' ' << static_cast<int>(b.kind) << (b.frozen ? "(frozen)" : "");
  for (const auto& o : plan.optimizers) {
    text << "\n  " << names_of_kinds[static_cast<int>(o.kind)] << (o.prepared ? ", prepared" : ", plain")
         << (o.fuse == Fuse::always ? ", to be fused" : "") << ", max norm " << o.max_grad_norm << ", over ";
    if (o.whole) text << "all";
    for (const int b : o.branches) text << b << ' ';
    if (o.ends) text << "and the ends";
  }
  text << "\n  micro-batches " << plan.micro_batches << (plan.scales ? ", scaled" : "")
       << (plan.shares_memory ? "" : ", in buckets") << ", alias " << static_cast<int>(plan.alias) << '\n';
  return text.str();
}

std::string describe(const Act& act) {
  std::ostringstream text;
  text << names_of_acts[static_cast<int>(act.kind)] << " optimizer " << act.optimizer << " branch " << act.branch
       << " number " << act.number << (act.flag ? " flag" : "") << (act.pass.sync ? "" : " without averaging");
  if (act.kind == Act::Kind::write || act.kind == Act::Kind::write_on_one_rank)
    text << " of kind " << static_cast<int>(act.change.kind) << " to parameter " << act.change.parameter;
  return text.str() + "\n";
}

// --- playing ---------------------------------------------------------------------------------------------------------

template <class Use>
auto with_optimizer(const Choice& c, std::vector<at::Tensor> parameters, Use&& use) {
  namespace o = torch::optim;
  switch (c.kind) {
    case Kind::sgd:
      return use(o::SGD(std::move(parameters),
                        o::SGDOptions(c.lr).momentum(c.momentum).weight_decay(c.weight_decay).nesterov(c.nesterov)));
    case Kind::adam:
    case Kind::amsgrad:
      return use(o::Adam(std::move(parameters),
                         o::AdamOptions(c.lr).eps(0.01).weight_decay(c.weight_decay).amsgrad(c.kind == Kind::amsgrad)));
    case Kind::adamw:
      return use(o::AdamW(std::move(parameters), o::AdamWOptions(c.lr).eps(0.01).weight_decay(c.weight_decay)));
    case Kind::rmsprop:
      return use(o::RMSprop(
          std::move(parameters),
          o::RMSpropOptions(c.lr).eps(0.01).momentum(c.momentum).centered(c.centered).weight_decay(c.weight_decay)));
    case Kind::adagrad:
      return use(o::Adagrad(std::move(parameters), o::AdagradOptions(c.lr).eps(0.01).weight_decay(c.weight_decay)));
    default:
      return use(o::LBFGS(std::move(parameters),
                          o::LBFGSOptions(c.lr).max_iter(4).history_size(3).line_search_fn("strong_wolfe")));
  }
}

/// What both sides do in the same way.
class Player {
 public:
  explicit Player(const Plan& plan) : plan_(plan), net_(plan.model, plan.seed * 100) {
    if (plan.alias == Plan::Alias::before) alias_ = net_->each().front().detach();
    if (plan.alias == Plan::Alias::two_parameters)
      for (std::size_t b = 0; b < plan.model.branches.size(); ++b)
        if (plan.model.branches[b].kind == Branch::Kind::linear) {
          auto& bias = net_->of_branch(static_cast<int>(b))[1];
          bias.set_data(net_->each().front().detach());
          break;
        }
    ema_.resize(net_->each().size());
  }
  virtual ~Player() = default;

  Net& net() noexcept { return net_; }
  bool search_ends_in_rounding() const noexcept { return search_ends_in_rounding_; }
  const std::vector<at::Tensor>& averages() const noexcept { return ema_; }

  void play(const Act& act) {
    using K = Act::Kind;
    const at::NoGradGuard no_grad;
    auto& optimizer = *optimizers_[static_cast<std::size_t>(act.optimizer)];
    const auto parameters = net_->each();
    switch (act.kind) {
      case K::toggle:
        return toggle(net_, act.branch);
      case K::zero:
        return net_->zero_grad(act.flag);
      case K::pass: {
        const at::AutoGradMode grad(true);
        return static_cast<void>(pass(act.pass));
      }
      case K::clip:
        torch::nn::utils::clip_grad_norm_(of_optimizer(plan_.optimizers[static_cast<std::size_t>(act.optimizer)]),
                                          act.number);
        return;
      case K::step: {
        const at::AutoGradMode grad(true);
        loss_before_.reset();
        return step(act);
      }
      case K::write: {
        std::vector<Net> nets{net_};
        return apply(act.change, nets);
      }
      case K::write_alias: {
        if (plan_.alias == Plan::Alias::after && !alias_.defined()) alias_ = parameters.front().detach();
        if (alias_.defined()) alias_.mul_(0.95);
        return;
      }
      case K::touch:
        for (auto& p : parameters)
          if (act.flag) p.data().clamp_(-1e6, 1e6);
        return;
      case K::perturb:
        before_.clear();
        for (auto& p : parameters) {
          before_.push_back(p.detach().clone());
          if (p.grad().defined()) p.add_(p.grad(), act.number);
        }
        return;
      case K::restore:
        for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(before_[i]);
        return;
      case K::ema:
        for (std::size_t i = 0; i < ema_.size(); ++i)
          ema_[i] = ema_[i].defined() ? ema_[i].lerp(parameters[i].detach(), 0.3) : parameters[i].detach().clone();
        return ema();
      case K::rate:
        for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * act.number);
        return;
      case K::look_at_averages:
        return look_at_averages();
      case K::average:
        return average(act.optimizer);
      case K::unscale:
        return unscale(act.optimizer);
      case K::reload:
        return reload(act.optimizer);
      case K::write_on_one_rank:
        return write_on_one_rank(act);
    }
  }

 protected:
  virtual double pass(const Pass& pass) = 0;
  virtual void step(const Act& act) = 0;
  virtual void ema() {}
  virtual void look_at_averages() {}
  virtual void average(int) {}
  virtual void unscale(int) {}
  virtual void reload(int) {}
  virtual void write_on_one_rank(const Act&) {}

  std::vector<at::Tensor> of_optimizer(const Choice& choice) {
    const auto each = net_->each();
    if (choice.whole) return each;
    std::vector<at::Tensor> mine;
    for (const int b : choice.branches)
      for (auto& p : net_->of_branch(b)) mine.push_back(p);
    const auto named = net_->named_parameters();
    if (choice.ends) mine.insert(mine.end(), {named["in"], named["out"]});
    std::erase_if(mine, [&](const at::Tensor& p) {
      return std::ranges::none_of(each, [&](const at::Tensor& q) { return q.is_same(p); });
    });
    return mine;
  }
  at::Tensor closure(const Act& act) {
    net_->zero_grad();
    const double loss = pass(act.pass);
    if (const auto before = std::exchange(loss_before_, loss))
      search_ends_in_rounding_ = search_ends_in_rounding_ || std::abs(loss - *before) < rounding_of_losses;
    return at::full({}, loss, at::kDouble);
  }

  const Plan& plan_;
  Net net_;
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers_;

 private:
  at::Tensor alias_;
  std::vector<at::Tensor> before_, ema_;
  std::optional<double> loss_before_;  ///< the last loss of the closure in the step under way
  bool search_ends_in_rounding_ = false;
};

class ReferencePlayer final : public Player {
 public:
  explicit ReferencePlayer(const Plan& plan) : Player(plan) {
    for (const auto& choice : plan.optimizers)
      with_optimizer(choice, of_optimizer(choice), [&](auto optimizer) {
        optimizers_.push_back(std::make_unique<std::decay_t<decltype(optimizer)>>(std::move(optimizer)));
      });
  }

 private:
  double pass(const Pass& pass) override {
    double all = 0;
    for (const auto& part : pass.ranks) all += part.weight;
    auto loss = at::zeros({}, at::kDouble);
    for (const auto& part : pass.ranks)
      if (part.weight > 0) loss = loss + net_->loss(part, 0, false) * (part.weight / all);
    auto parameters = net_->each();
    std::erase_if(parameters, [](const at::Tensor& p) { return !p.requires_grad(); });
    const auto gradients = torch::autograd::grad({loss}, parameters, {}, std::nullopt, false, true);
    // backward() itself may give two parameters gradients in the same memory.
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      auto& gradient = parameters[i].mutable_grad();
      if (gradients[i].defined()) gradient = gradient.defined() ? gradient + gradients[i] : gradients[i].clone();
    }
    return loss.item<double>();
  }
  void step(const Act& act) override {
    const auto& choice = plan_.optimizers[static_cast<std::size_t>(act.optimizer)];
    auto& optimizer = *optimizers_[static_cast<std::size_t>(act.optimizer)];
    if (choice.kind == Kind::lbfgs) return static_cast<void>(optimizer.step([&] { return closure(act); }));
    if (choice.max_grad_norm > 0) torch::nn::utils::clip_grad_norm_(of_optimizer(choice), choice.max_grad_norm);
    optimizer.step();
  }
};

class MusterPlayer final : public Player {
 public:
  MusterPlayer(const Plan& plan, const Communicator& world)
      : Player(plan), world_(world), ema_(net_.ptr(), {.decay = 0.7}) {
    const bool fixed = plan.micro_batches > 0;
    const int count = std::max(1, plan.micro_batches);
    const detail::gradients::ParallelContext context{
        .communicator = world,
        .new_group = [world] { return make_process_group(world); },
        .steps = steps_,
        .no_sync_depth = no_sync_depth_,
        .share_memory = plan.shares_memory && !fixed,
        .share = {.total = count * world.size(), .first = count * world.rank(), .count = count, .fixed = fixed}};
    models_ = {detail::gradients::PreparedModel::prepare(net_.ptr(), context,
                                                         {.progress_thread = plan.progress_thread && !fixed})};
    if (plan.scales)
      scaler_ = std::make_unique<GradScaler>(world.duplicate(), at::kCPU, GradScalerOptions{.init_scale = 64});
    optimizers_.resize(plan.optimizers.size());
    prepared_.resize(plan.optimizers.size());
    for (std::size_t i = 0; i < plan.optimizers.size(); ++i) make(i);
  }

  /// True if something that fused optimizers do not support was done while one was fused, and that one has not stepped
  /// since.
  bool in_doubt() const noexcept { return in_doubt_; }
  /// True if nothing is fused any more, so that no later step can detect this.
  bool undetectable() const { return in_doubt_ && !any_fused(); }

  /// True if this action may end with an Error.
  bool may_refuse(const Act& act) const {
    using K = Act::Kind;
    return in_doubt_ &&
           (act.kind == K::step || act.kind == K::average || act.kind == K::unscale || act.kind == K::reload);
  }
  /// Updates the flags after an action that ended without an Error.
  void note_played(const Act& act) {
    using K = Act::Kind;
    const bool plain = act.kind == K::step && !plan_.optimizers[static_cast<std::size_t>(act.optimizer)].prepared;
    if (act.kind == K::pass && act.pass.sync) has_local_gradients_ = any_fused();
    if (act.kind == K::average || act.kind == K::unscale) has_local_gradients_ = false;
    if (act.kind == K::step && !plain && !is_fused(act.optimizer)) has_local_gradients_ = false;
    // The scaler averages the gradients before an optimizer that is not fused.
    if (act.kind == K::step && plain && plan_.scales) has_local_gradients_ = false;
    if (act.kind == K::step && !plain && is_fused(act.optimizer)) in_doubt_ = false;
    const bool reads = plain || act.kind == K::clip || act.kind == K::perturb;
    if (any_fused() && ((reads && has_local_gradients_) || act.kind == K::write_on_one_rank)) in_doubt_ = true;
    if (act.kind == K::write_on_one_rank && any_fused()) wrote_on_one_rank_ = true;
  }
  bool wrote_on_one_rank() const noexcept { return wrote_on_one_rank_; }

 private:
  void make(std::size_t i) {
    const auto& choice = plan_.optimizers[i];
    with_optimizer(choice, of_optimizer(choice), [&](auto own) {
      using O = std::decay_t<decltype(own)>;
      prepared_[i] = nullptr;
      if (!choice.prepared) return void(optimizers_[i] = std::make_unique<O>(std::move(own)));
      auto step = detail::optim::make_optimizer_step(own, models_,
                                                     {.max_grad_norm = choice.max_grad_norm, .fuse = choice.fuse});
      auto prepared = std::make_unique<PreparedOptimizer<O>>(std::move(own), std::move(step));
      average_[i] = [raw = prepared.get()] { raw->average_gradients(); };
      prepared_[i] = prepared.get();
      optimizers_[i] = std::move(prepared);
    });
  }
  bool is_fused(int optimizer) const {
    const auto* const prepared = prepared_[static_cast<std::size_t>(optimizer)];
    return prepared && prepared->fused();
  }
  bool any_fused() const {
    return std::ranges::any_of(prepared_, [](const auto* one) { return one && one->fused(); });
  }

  double pass(const Pass& pass) override {
    if (std::exchange(scaled_, false)) scaler_->update();
    std::optional<NoSync> scope;
    if (!pass.sync) scope.emplace(no_sync_depth_);
    const int count = std::max(1, plan_.micro_batches);
    double loss = 0;
    for (int m = 0; m < count; ++m) {
      const auto& part = pass.ranks[static_cast<std::size_t>(world_.rank() * count + m)];
      *weight_ = {.micro_batch = m, .micro_batches = count, .number = ++batches_, .total = count * world_.size()};
      if (pass.weighted) {
        weight_->local = part.weight;
        for (const auto& each : pass.ranks) weight_->global += each.weight;
      }
      const auto mine = net_->loss(part, 0, false);
      (scaler_ ? scaler_->scale(mine) : mine).backward();
      loss = mine.item<double>();
    }
    return loss;
  }
  void step(const Act& act) override {
    const auto& choice = plan_.optimizers[static_cast<std::size_t>(act.optimizer)];
    auto& optimizer = *optimizers_[static_cast<std::size_t>(act.optimizer)];
    if (choice.kind == Kind::lbfgs) return static_cast<void>(optimizer.step([&] { return closure(act); }));
    if (!scaler_) return static_cast<void>(optimizer.step());
    if (!scaler_->step(optimizer)) throw std::logic_error("a step was left out");
    scaled_ = true;
  }
  void ema() override { ema_.update(); }
  void look_at_averages() override { const auto scope = ema_.apply(); }
  void average(int optimizer) override { average_.at(static_cast<std::size_t>(optimizer))(); }
  void unscale(int optimizer) override {
    scaler_->unscale_(*optimizers_[static_cast<std::size_t>(optimizer)]);
    scaled_ = true;
  }
  void reload(int optimizer) override {
    const auto i = static_cast<std::size_t>(optimizer);
    detail::state::ParameterPaths paths;
    for (const auto& p : net_->named_parameters()) paths.emplace(p.value().unsafeGetTensorImpl(), p.key());
    if (std::exchange(scaled_, false)) scaler_->update();
    auto saved = StateEntry(*optimizers_[i]).object()->save(paths);
    for (auto& [path, tensor] : saved.tensors) tensor = tensor.clone();
    const auto old = std::move(optimizers_[i]);
    make(i);
    StateEntry(*optimizers_[i]).object()->load(saved, paths);
  }
  void write_on_one_rank(const Act& act) override {
    if (!any_fused() || world_.rank() != world_.size() - 1) return;
    auto parameters = net_->each();
    std::erase_if(parameters, [](const at::Tensor& p) { return !p.requires_grad(); });
    auto p = parameters[static_cast<std::size_t>(act.change.parameter) % parameters.size()];
    p.data().add_(0.5);
  }

  Communicator world_;
  std::shared_ptr<detail::step::BatchWeight> weight_ = std::make_shared<detail::step::BatchWeight>();
  std::shared_ptr<detail::step::Steps> steps_ = std::make_shared<detail::step::Steps>();
  const std::int64_t scope_ = steps_->enter_scope(weight_);
  std::shared_ptr<int> no_sync_depth_ = std::make_shared<int>(0);
  std::vector<std::shared_ptr<detail::gradients::PreparedModel>> models_;
  std::unique_ptr<GradScaler> scaler_;
  EMA ema_;
  std::vector<const detail::optim::Prepared*> prepared_;
  std::map<std::size_t, std::function<void()>> average_;
  std::int64_t batches_ = 0;
  bool has_local_gradients_ = false;  ///< .grad holds this rank's gradients, not averages
  bool in_doubt_ = false;             ///< see in_doubt()
  bool wrote_on_one_rank_ = false;
  bool scaled_ = false;  ///< the scaler's update() is due
};

double distance(const at::Tensor& have, const at::Tensor& want) {
  const auto apart = ((have - want).abs() / (want.abs() + 1)).max().item<double>();
  return std::isnan(apart) ? INFINITY : apart;
}

bool diverges(Net& net) {
  const auto each = net->each();
  return std::ranges::any_of(each, [](const at::Tensor& p) { return !(p.detach().abs().max().item<double>() < 1e4); });
}

/// Returns what is wrong with the program, the same on all ranks; empty if nothing is. Collective.
std::string play(const Plan& plan, const Communicator& world, bool aloud) {
  const auto tell = [&](const std::string& text) {
    if (aloud && world.rank() == 0) std::fputs(text.c_str(), stderr);
  };
  const auto anywhere = [&](const std::string& here) {
    for (const auto& other : world.all_gather(here))
      if (!other.empty()) return other;
    return std::string();
  };
  tell(describe(plan));
  MusterPlayer have(plan, world);
  ReferencePlayer want(plan);
  const bool searches = std::ranges::any_of(plan.optimizers, [](const Choice& c) { return c.kind == Kind::lbfgs; });
  int number = 0;
  for (const auto& act : plan.acts) {
    tell(std::to_string(number) + ": " + describe(act));
    std::string error;
    try {
      have.play(act);
    } catch (const Error& refused) {
      error = refused.what();
    }
    if (!error.empty()) {
      tell("  refused: " + error + "\n");
      std::string wrong;
      if (!have.may_refuse(act)) wrong = "refused without need: " + error;
      for (const auto& other : world.all_gather(error))
        if (other != error) wrong = "the ranks' errors differ: " + error + "; " + other;
      return anywhere(wrong);
    }
    want.play(act);
    have.note_played(act);
    if (aloud && !plan.scales) {
      const at::NoGradGuard no_grad;
      const auto here = have.net()->named_parameters(), there = want.net()->named_parameters();
      for (std::size_t i = 0; i < here.size(); ++i) {
        const auto &a = here[i].value().grad(), &b = there[i].value().grad();
        if (a.defined() != b.defined())
          tell("  gradient of " + here[i].key() + (a.defined() ? ": only here\n" : ": only there\n"));
        else if (a.defined() && distance(a, b) > tolerance)
          tell("  gradient of " + here[i].key() + " is " + std::to_string(distance(a, b)) + " away\n");
      }
    }
    if (have.undetectable()) return {};
    // A diverging search has no result to compare: rounding decides how far it gets.
    if (searches && (diverges(want.net()) || want.search_ends_in_rounding())) return {};
    if (act.kind == Act::Kind::step && !have.in_doubt()) {
      if (have.wrote_on_one_rank()) return "a write on one rank was not seen";
      const at::NoGradGuard no_grad;
      std::string wrong, bytes;
      const auto here = have.net()->named_parameters(), there = want.net()->named_parameters();
      for (std::size_t i = 0; i < here.size(); ++i) {
        const auto apart = distance(here[i].value(), there[i].value());
        if (!(apart <= (searches ? tolerance_of_lbfgs : tolerance)) && wrong.empty())
          wrong = here[i].key() + " is " + std::to_string(apart) + " away after act " + std::to_string(number);
        const auto values = here[i].value().contiguous();
        bytes.append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
      }
      if (const auto found = anywhere(wrong); !found.empty()) return found;
      for (const auto& other : world.all_gather(bytes))
        if (other != bytes) wrong = "weights differ by rank after act " + std::to_string(number);
      if (const auto found = anywhere(wrong); !found.empty()) return found;
    }
    ++number;
  }
  if (have.in_doubt()) return {};
  std::string wrong;
  for (std::size_t i = 0; i < want.averages().size(); ++i)
    if (want.averages()[i].defined() &&
        !(distance(have.averages()[i], want.averages()[i]) <= (searches ? tolerance_of_lbfgs : tolerance)))
      wrong = "an average of weights differs";
  return anywhere(wrong);
}

std::string play(const Round& round, const Communicator& world) {
  return play(draw(round.seed, world.size()), world, round.aloud);
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "optimizers", [](const Communicator& world) {
    return [&world](const soak::Round& round) { return soak::play(round, world); };
  });
}
