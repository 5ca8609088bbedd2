// Plays random training programs with muster and without, and compares them after every pass and step. Every third
// program is also played by DataParallel, whose weights and gradients must have the same bits as a session's.
//   mpirun -n RANKS storm --first SEED --count PROGRAMS
//   mpirun -n RANKS storm --seed SEED              one program, printed step by step
// Ends with 1 if anything differs, and prints the command that repeats the program. A program that ends with an error
// or does not end also ends the programs after it; the last line says which one it was.
#include "soak/driver.hpp"
#include "soak/prepared.hpp"
#include "soak/reference.hpp"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::soak {
namespace {

/// Rounding error in double precision.
constexpr double tolerance = 1e-10;
/// The difference of two tensors, relative to the larger of 1 and the wanted value. It is infinite if only one of them
/// is defined.
double distance(const at::Tensor& have, const at::Tensor& want) {
  if (have.defined() != want.defined()) return INFINITY;
  if (!have.defined()) return 0;
  const auto dense = have.is_sparse() ? have.to_dense() : have;
  const auto apart = ((dense - want).abs() / (want.abs() + 1)).max().item<double>();
  return std::isnan(apart) ? INFINITY : apart;
}

/// The first difference, if there is one.
std::optional<std::string> compare(Side& have, Side& want, bool gradients) {
  const at::NoGradGuard no_grad;
  for (std::size_t m = 0; m < have.nets().size(); ++m) {
    if (gradients && !have.shows_averages(static_cast<int>(m))) continue;
    const auto here = have.nets()[m]->named_parameters(), there = want.nets()[m]->named_parameters();
    for (std::size_t i = 0; i < here.size(); ++i) {
      const auto& a = here[i].value();
      const auto& b = there[i].value();
      const auto apart = gradients ? distance(a.grad(), b.grad()) : distance(a, b);
      if (apart > tolerance)
        return c10::str(gradients ? "the gradient of " : "", here[i].key(), " of model ", m, " is ", apart,
                        std::isinf(apart) ? " (there on one side only, or NaN)" : "", " away");
    }
  }
  return std::nullopt;
}

/// Plays the program on all sides, step by step. `check(step, gradients)` is called after each average of gradients and
/// after each change of the weights.
template <class Check>
void play(const Program& program, const std::vector<Side*>& sides, const std::function<void(const std::string&)>& tell,
          const Check& check) {
  tell(describe(program));
  int number = 0;
  for (const auto& step : program.steps) {
    tell(describe(step));
    for (auto* side : sides) {
      side->set(step.settings);
      for (const auto& [model, branch] : step.toggle) toggle(side->nets()[static_cast<std::size_t>(model)], branch);
      side->zero_grad(step.before);
      for (const auto& pass : step.discarded) side->pass(pass);
      if (!step.discarded.empty()) side->zero_grad(Zero::to_none);
    }
    bool thrown = false;
    for (const auto& pass : step.passes) {
      for (auto* side : sides) side->pass(pass);
      thrown = thrown || pass.throws != Pass::Throws::none;
      if (pass.sync && !thrown) check(number, true);
    }
    for (auto* side : sides) {
      if (thrown)
        side->zero_grad(Zero::to_none);
      else
        for (const int m : step.steps) side->step(m);
    }
    check(number, false);
    for (auto* side : sides) {
      for (const auto& change : step.changes) apply(change, side->nets());
      if (step.evaluate) side->evaluate();
    }
    check(number, false);
    ++number;
  }
}

/// The program as DataParallel can play it.
Program for_own_loop(Program program) {
  if (program.exchange == Program::Exchange::buckets) program.exchange = Program::Exchange::shared;
  for (auto& step : program.steps)
    for (auto* const passes : {&step.discarded, &step.passes})
      for (auto& pass : *passes) pass.weighted = false;
  return program;
}

/// Plays the program on one side; returns all weights and gradients on the way, where there is a gradient.
std::vector<at::Tensor> record(const Program& program, const std::unique_ptr<Side>& side,
                               const std::function<void(const std::string&)>& tell) {
  std::vector<at::Tensor> all;
  play(program, {side.get()}, tell, [&](int, bool gradients) {
    const at::NoGradGuard no_grad;
    for (std::size_t m = 0; m < side->nets().size(); ++m)
      for (const auto& parameter : side->nets()[m]->parameters())
        if (!gradients)
          all.push_back(parameter.detach().clone());
        else if (side->shows_averages(static_cast<int>(m)))
          all.push_back(parameter.grad().defined() ? parameter.grad().detach().to_dense().clone() : at::Tensor());
  });
  return all;
}

/// Returns the difference between the program with muster and without, or with DataParallel. Collective.
std::string play(const Round& round, const Communicator& world) {
  const auto tell = [&](const std::string& text) {
    if (round.aloud && world.rank() == 0) std::fputs(text.c_str(), stderr);
  };
  const auto program = draw(round.seed, world.size());
  std::string difference;
  {
    const auto have = make_prepared(program, world);
    const auto want = make_reference(program);
    play(program, {have.get(), want.get()}, tell, [&](int step, bool gradients) {
      if (!difference.empty()) return;
      if (const auto found = compare(*have, *want, gradients))
        difference = "in step " + std::to_string(step) + " " + *found + " on rank " + std::to_string(world.rank());
    });
  }
  if (round.seed % 3 != 0 || world.all_reduce(std::int64_t{!difference.empty()}) > 0) return difference;
  // One after the other: where only some ranks throw, the others wait until these go on in the same program.
  const auto own = for_own_loop(program);
  const auto in_session = record(own, make_prepared(own, world), tell);
  const auto in_own_loop = record(own, make_own_loop(own, world), tell);
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() && (!a.defined() || a.equal(b));
  };
  if (!std::ranges::equal(in_session, in_own_loop, same)) return "DataParallel has other bits than a session";
  return {};
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  using namespace muster;
  return soak::drive(argc, argv, "storm", [](const Communicator& world) {
    // Ranks on one node, each on a node of its own, and two on each node but the first.
    const std::vector worlds{world, soak::on_nodes(world, [](int rank) { return rank; }),
                             soak::on_nodes(world, [](int rank) { return (rank + 1) / 2; })};
    return [worlds](const soak::Round& round) { return soak::play(round, worlds[round.seed % worlds.size()]); };
  });
}
