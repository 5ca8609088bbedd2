#include "soak/program.hpp"

#include "soak/dice.hpp"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <utility>

namespace muster::soak {
namespace {

Model draw_model(Dice& dice, bool sparse) {
  using Kind = Branch::Kind;
  Model model;
  if (dice.chance(0.08)) return model;  // a model of two parameters with one element each
  model.width = dice.one_of({1, 2, 3, 8, 16, 46, 64, 96});
  const int branches = dice.between(1, 5);
  for (int i = 0; i < branches; ++i) {
    Branch branch;
    branch.kind = dice.one_of({Kind::linear, Kind::linear, Kind::wide, Kind::scale, Kind::shift, Kind::embedding,
                               Kind::tied, Kind::transposed, Kind::convolution, Kind::norm});
    if (sparse && dice.chance(0.4)) branch.kind = Kind::sparse_embedding;
    switch (branch.kind) {
      case Kind::wide: {
        // At most 4 MB of doubles.
        const int most = std::min(8192, (4 << 20) / 8 / model.width);
        branch.size = dice.chance(0.15) ? most : dice.between(1, std::min(most, 300));
        break;
      }
      case Kind::embedding:
      case Kind::sparse_embedding:
        branch.size = dice.one_of({1, 7, 50, 300});
        break;
      case Kind::convolution:
        branch.size = dice.one_of({1, 4, 30});
        break;
      default:
        break;
    }
    branch.frozen = dice.chance(0.12);
    model.branches.push_back(branch);
  }
  return model;
}

OptimizerSetting draw_setting(Dice& dice, Program::Optimizer kind, bool sparse) {
  OptimizerSetting setting;
  setting.lr = dice.real(0.0005, 0.02);
  if (sparse) return setting;
  if (dice.chance(0.5)) setting.weight_decay = dice.real(0.001, 0.1);
  if (kind == Program::Optimizer::sgd) {
    if (dice.chance(0.6)) setting.momentum = dice.real(0.1, 0.9);
    if (setting.momentum > 0 && dice.chance(0.3))
      setting.nesterov = true;
    else if (dice.chance(0.3))
      setting.dampening = dice.real(0.1, 0.6);
  } else {
    setting.lr *= 0.2;
    setting.beta1 = dice.real(0.5, 0.95);
    setting.beta2 = dice.real(0.9, 0.999);
    setting.eps = dice.one_of({1e-8, 1e-6, 1e-3});
  }
  return setting;
}

/// Passes that add up to one average have weights of the program's own, all or none.
bool draw_given(Dice& dice, const Program& program) {
  return program.given == Program::Given::always || (program.given == Program::Given::at_times && dice.chance(0.5));
}

Pass draw_pass(Dice& dice, const Program& program, const std::vector<int>& models, bool sync, bool given) {
  Pass pass;
  pass.sync = sync;
  pass.given = given;
  const bool large = dice.chance(0.3), none = dice.chance(0.05);
  pass.weighted = dice.chance(0.5);
  const bool alike = dice.chance(0.4), in_turn = dice.chance(0.7);
  for (int r = 0; r < program.ranks; ++r) {
    Part part;
    part.samples = dice.between(1, 5);
    part.weight = pass.weighted ? (dice.chance(0.15) ? 0 : part.samples) : 1;
    if (given && !none && !dice.chance(0.15))
      part.given = large ? dice.real(1, 1e6) : dice.one_of({1e-3, 0.7, 1.0, 5.0, 33.0});
    part.data = dice.word();
    part.models = models;
    if (!in_turn) dice.shuffle(part.models);
    for (const auto& model : program.models) {
      std::vector<int> used;
      for (std::size_t b = 0; b < model.branches.size(); ++b)
        if (dice.chance(0.75)) used.push_back(static_cast<int>(b));
      if (dice.chance(0.3)) dice.shuffle(used);
      part.branches.push_back(std::move(used));
    }
    if (alike && r > 0) part.branches = pass.ranks.front().branches;
    pass.ranks.push_back(std::move(part));
  }
  if (pass.weighted && std::all_of(pass.ranks.begin(), pass.ranks.end(), [](const Part& p) { return p.weight == 0; }))
    pass.ranks.front().weight = pass.ranks.front().samples;
  return pass;
}

void let_throw(Dice& dice, Pass& pass, Pass::Throws who) {
  pass.throws = who;
  const auto chosen = static_cast<std::size_t>(dice.below(static_cast<int>(pass.ranks.size())));
  for (std::size_t r = 0; r < pass.ranks.size(); ++r)
    if (who == Pass::Throws::everywhere || r == chosen) pass.ranks[r].throws_at = dice.between(0, 4);
}

/// `left`: the model whose last pass some ranks left by an exception; -1 if none. Its next pass comes first and
/// averages.
Step draw_step(Dice& dice, const Program& program, bool last, int left) {
  const bool after_exception = left >= 0;
  Step step;
  const auto count = static_cast<int>(program.models.size());
  std::vector<int> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  if (dice.chance(0.25))
    for (int m = 0; m < count; ++m) step.settings.push_back(draw_setting(dice, program.optimizer, false));
  if (dice.chance(0.15)) {
    const int m = dice.below(count);
    const auto branches = static_cast<int>(program.models[static_cast<std::size_t>(m)].branches.size());
    if (branches > 0) step.toggle.emplace_back(m, dice.below(branches));
  }
  step.before = program.max_grad_norm > 0 || after_exception || dice.chance(0.7) ? Zero::to_none
                : dice.chance(0.5)                                               ? Zero::in_place
                                                                                 : Zero::no;
  const auto add = [&](std::vector<Pass>& to, bool sync, const std::vector<int>& models, bool given) {
    to.push_back(draw_pass(dice, program, models, sync, given));
  };
  // One loss over all models, a loss for each model, or a loss for one of them.
  std::vector<std::vector<int>> losses;
  const int way = dice.below(3);
  if (count == 1 || way == 0)
    losses = {all};
  else if (way == 1)
    losses = {{0}, {1}};
  else
    losses = {{dice.below(count)}};
  if (after_exception) losses = {{left}};
  if (!after_exception && dice.chance(0.15)) {
    for (const auto& loss : losses) add(step.discarded, dice.chance(0.5), loss, draw_given(dice, program));
    // If a loss is over several models, an exception may come before a rank has reached all of them.
    if (losses.back().size() == 1 && dice.chance(0.3)) let_throw(dice, step.discarded.back(), Pass::Throws::everywhere);
  }
  for (const auto& loss : losses) {
    const bool given = draw_given(dice, program);
    if (!after_exception && dice.chance(0.25))
      for (int i = dice.between(1, 2); i > 0; --i) add(step.passes, false, loss, given);
    add(step.passes, true, loss, given);
    if (dice.chance(0.12)) add(step.passes, true, loss, draw_given(dice, program));
  }
  for (const auto& loss : losses)
    for (const int m : loss) step.steps.push_back(m);
  if (!after_exception && !last && program.ranks > 1 && dice.chance(0.05)) {
    // The ranks that throw continue. The others get an error where they would wait for them.
    step.steps = {dice.below(count)};
    step.passes = {draw_pass(dice, program, step.steps, true, draw_given(dice, program))};
    let_throw(dice, step.passes.front(), Pass::Throws::somewhere);
    return step;
  }
  if (dice.chance(0.3)) {
    for (int i = dice.between(1, 3); i > 0; --i) {
      Change change;
      change.kind = static_cast<Change::Kind>(dice.below(5));
      change.model = dice.below(count);
      change.parameter = dice.below(1000);
      step.changes.push_back(change);
    }
  }
  step.evaluate = dice.chance(0.2);
  return step;
}

}  // namespace

Program draw(std::uint64_t seed, int ranks) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + static_cast<std::uint64_t>(ranks));
  Program program;
  program.seed = seed;
  program.ranks = ranks;
  program.optimizer = dice.one_of({Program::Optimizer::sgd, Program::Optimizer::adam, Program::Optimizer::adamw});
  const bool sparse = program.optimizer == Program::Optimizer::sgd && dice.chance(0.3);
  const int models = dice.chance(0.3) ? 2 : 1;
  for (int m = 0; m < models; ++m) program.models.push_back(draw_model(dice, sparse));
  program.fuse = dice.chance(0.6);
  if (!sparse && dice.chance(0.2)) program.max_grad_norm = dice.real(0.01, 2);
  program.exchange = program.fuse || dice.chance(0.5) ? Program::Exchange::shared
                     : dice.chance(0.7)               ? Program::Exchange::buckets
                                                      : Program::Exchange::hook;
  program.progress_thread = dice.chance(0.3);
  program.given = dice.chance(0.6) ? Program::Given::never
                  : program.fuse   ? Program::Given::always
                                   : dice.one_of({Program::Given::always, Program::Given::at_times});
  program.bucket_bytes = dice.one_of({16, 1024, 65536, 4 << 20});
  for (int m = 0; m < models; ++m) program.settings.push_back(draw_setting(dice, program.optimizer, sparse));
  const int steps = dice.between(3, 10);
  for (int i = 0; i < steps; ++i) {
    const auto* before = i > 0 ? &program.steps.back() : nullptr;
    const bool left = before != nullptr && before->passes.back().throws == Pass::Throws::somewhere;
    program.steps.push_back(draw_step(dice, program, i + 1 == steps, left ? before->steps.front() : -1));
    if (sparse)
      for (auto& setting : program.steps.back().settings) setting = {.lr = setting.lr};
  }
  return program;
}

std::string describe(const Program& program) {
  std::ostringstream text;
  static const char* const kinds[] = {"linear", "wide", "scale",      "shift",       "embedding",
                                      "sparse", "tied", "transposed", "convolution", "norm"};
  static const char* const optimizers[] = {"SGD", "Adam", "AdamW"};
  static const char* const exchanges[] = {"shared", "buckets", "hook"};
  text << "seed " << program.seed << ", " << program.ranks << " ranks, "
       << optimizers[static_cast<int>(program.optimizer)] << (program.fuse ? " fused, " : ", ")
       << exchanges[static_cast<int>(program.exchange)] << (program.progress_thread ? " with a thread" : "");
  if (program.max_grad_norm > 0) text << ", clipped at " << program.max_grad_norm;
  for (const auto& model : program.models) {
    text << "\n  model of width " << model.width << ":";
    for (const auto& branch : model.branches)
      text << ' ' << kinds[static_cast<int>(branch.kind)] << '(' << branch.size << (branch.frozen ? ", frozen)" : ")");
  }
  text << "\n";
  return text.str();
}

std::string describe(const Step& step) {
  static const char* const zeros[] = {"no zero_grad", "zero_grad", "zero_grad in place"};
  std::ostringstream text;
  text << "  " << zeros[static_cast<int>(step.before)];
  if (!step.settings.empty()) text << ", other options";
  for (const auto& [model, branch] : step.toggle) text << ", frozen or not " << model << '.' << branch;
  const auto show = [&](const Pass& pass) {
    text << "\n    " << (pass.sync ? "pass" : "pass without averaging");
    for (const auto& part : pass.ranks) {
      text << " | weight "
           << (pass.given      ? std::to_string(part.given) + " given"
               : pass.weighted ? std::to_string(part.weight)
                               : "even")
           << ", models";
      for (const int m : part.models) {
        text << ' ' << m << ":";
        for (const int b : part.branches[static_cast<std::size_t>(m)]) text << b << ' ';
      }
      if (part.throws_at >= 0) text << "throws at " << part.throws_at;
    }
  };
  for (const auto& pass : step.discarded) show(pass);
  if (!step.discarded.empty()) text << "\n    zero_grad";
  for (const auto& pass : step.passes) show(pass);
  text << "\n    step of";
  for (const int m : step.steps) text << ' ' << m;
  for (const auto& change : step.changes)
    text << ", change " << static_cast<int>(change.kind) << " of " << change.model << '.' << change.parameter;
  if (step.evaluate) text << ", evaluation";
  text << "\n";
  return text.str();
}

}  // namespace muster::soak
