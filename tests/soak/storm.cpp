// Plays random training programs with muster and without, and compares them after every pass and step.
//   mpirun -n RANKS storm --first SEED --count PROGRAMS
//   mpirun -n RANKS storm --seed SEED              one program, told step by step
// Ends with 1 if any differs, and names it by the command that shows it again. A program that ends by an error or does
// not end takes the others after it along; the last line says which it was.
#include "comm/world.hpp"
#include "soak/prepared.hpp"
#include "soak/reference.hpp"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <optional>
#include <string>
#include <string_view>

namespace muster::soak {
namespace {

/// Rounding, in double precision.
constexpr double tolerance = 1e-10;
/// A wait that lasts longer is a hang; a loaded machine needs more than it seems.
constexpr std::chrono::seconds patience{20};

/// torch's warnings, of strides for one, are not what is looked for.
class Silence final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

char last_words[256];  ///< said when a program does not end

void complain(int) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, last_words, std::string_view(last_words).size());
  ::_exit(1);
}

/// How far apart two tensors are, relative to the larger of 1 and what is wanted; a gradient that is missing on one
/// side is infinitely far.
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
        return (gradients ? "the gradient of " : "") + here[i].key() + " of model " + std::to_string(m) + " is " +
               std::to_string(apart) + (std::isinf(apart) ? " (there on one side only, or NaN)" : "") + " away";
    }
  }
  return std::nullopt;
}

/// What differs between the program with muster and without. Collective.
std::optional<std::string> play(const Program& program, const Communicator& world, bool aloud) {
  const auto tell = [&](const std::string& text) {
    if (aloud && world.rank() == 0) std::fputs(text.c_str(), stderr);
  };
  tell(describe(program));
  const auto have = make_prepared(program, world);
  const auto want = make_reference(program);
  Side* const sides[] = {have.get(), want.get()};
  std::optional<std::string> difference;
  int number = 0;
  const auto check = [&](bool gradients) {
    if (difference) return;
    if (const auto found = compare(*have, *want, gradients))
      difference = "in step " + std::to_string(number) + " " + *found + " on rank " + std::to_string(world.rank());
  };
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
      if (pass.sync && !thrown) check(true);
    }
    for (auto* side : sides) {
      if (thrown)
        side->zero_grad(Zero::to_none);
      else
        for (const int m : step.steps) side->step(m);
    }
    check(false);
    for (auto* side : sides) {
      for (const auto& change : step.changes) apply(change, side->nets());
      if (step.evaluate) side->evaluate();
    }
    check(false);
    ++number;
  }
  return difference;
}

struct Choice {
  std::uint64_t first = 1;
  int count = 100;
  bool aloud = false;
};

Choice choose(int argc, char** argv) {
  Choice choice;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view flag = argv[i];
    const auto value = std::strtoull(argv[i + 1], nullptr, 10);
    if (flag == "--first") choice.first = value;
    if (flag == "--count") choice.count = static_cast<int>(value);
    if (flag == "--seed") choice = {value, 1, true};
  }
  return choice;
}

int run(const Communicator& world, const Choice& choice) {
  int differing = 0;
  for (int i = 0; i < choice.count; ++i) {
    const auto seed = choice.first + static_cast<std::uint64_t>(i);
    const auto again = "mpirun -n " + std::to_string(world.size()) + " storm --seed " + std::to_string(seed);
    std::snprintf(last_words, sizeof last_words, "did not end: %s\n", again.c_str());
    ::alarm(static_cast<unsigned>(3 * patience.count()));
    std::optional<std::string> difference;
    try {
      difference = play(draw(seed, world.size()), world, choice.aloud);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "ended by an error on rank %d (%s): %s\n", world.rank(), error.what(), again.c_str());
      detail::comm::abort(1);
    }
    if (difference && world.rank() == 0) std::fprintf(stderr, "differs %s: %s\n", difference->c_str(), again.c_str());
    const auto ranks = world.all_reduce(std::int64_t{difference.has_value()});
    if (ranks > 0 && world.rank() == 0 && !difference)
      std::fprintf(stderr, "differs on other ranks only: %s\n", again.c_str());
    differing += ranks > 0;
  }
  ::alarm(0);
  if (world.rank() == 0)
    std::printf("%d programs on %d ranks from seed %llu on, %d differ\n", choice.count, world.size(),
                static_cast<unsigned long long>(choice.first), differing);
  return differing > 0 ? 1 : 0;
}

}  // namespace
}  // namespace muster::soak

int main(int argc, char** argv) {
  const muster::detail::comm::MpiScope environment;
  muster::detail::comm::set_time_limit(environment.world(), muster::soak::patience);
  muster::soak::Silence silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  ::signal(SIGALRM, muster::soak::complain);
  return muster::soak::run(environment.world(), muster::soak::choose(argc, argv));
}
