// A run drawn from a seed reports, and its checkpoints are validated: by ranks that do not train, by all of them at the
// end, or by both. Some validations end late, throw or hang, on one rank or on all, and they may replace a metric of
// the report. Or the ranks' learning rates begin to differ. A second start, in which nothing goes wrong, does what the
// first one has left. The rows and event files are compared with a plain model.
#include "soak/validated_runs.hpp"

#include "base/file.hpp"
#include "muster/muster.hpp"
#include "observe/tensorboard.hpp"
#include "soak/dice.hpp"
#include "support/job.hpp"

#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace muster::soak::validated_runs {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

/// Longer than a validation takes on a busy machine.
constexpr auto timeout = 2s;

/// What a validation does.
enum class Way { ends, ends_late, throws, hangs };
constexpr const char* names_of_ways[] = {"ends", "ends late", "throws", "hangs"};

struct Report {
  bool is_validated = false;
  Way way = Way::ends;
  int rank = -1;  ///< the validating rank that does so, modulo their number; negative: all of them
};

struct Plan {
  std::vector<Report> reports = {};
  int workers = 1, spares = 0;
  bool replaces = false;  ///< validations give the score, as reports do
  bool waits = false;     ///< training waits for each validation until one hangs; so the spares meet that one
  bool async_save = false, tensorboard = false, may_fuse = true;
  std::int64_t differs_at = 0;  ///< report before which the learning rates begin to differ; 0: they do not
  int differs_on = 0;           ///< rank with another learning rate

  const Report& of(std::int64_t number) const { return reports.at(static_cast<std::size_t>(number - 1)); }
};

bool has_tensorboard() {
  try {
    detail::observe::require_tensorboard();
    return true;
  } catch (const Error&) {
    return false;
  }
}

Plan draw(std::uint64_t seed, int ranks) {
  Dice dice(seed * 0x9e3779b97f4a7c15ULL + 53 + static_cast<std::uint64_t>(ranks));
  Plan plan{.workers = dice.between(1, ranks)};
  plan.spares = ranks - plan.workers;
  plan.replaces = dice.chance(0.5);
  plan.async_save = dice.chance(0.3);
  plan.waits = plan.spares > 0 && !plan.async_save && dice.chance(0.5);
  plan.tensorboard = dice.chance(0.5) && has_tensorboard();
  plan.may_fuse = dice.chance(0.5);
  for (int reports = dice.between(2, 6); reports > 0; --reports)
    plan.reports.push_back(
        {.is_validated = dice.chance(0.8),
         .way = dice.one_of({Way::ends, Way::ends, Way::ends, Way::ends_late, Way::throws, Way::hangs}),
         .rank = dice.between(-1, 3)});
  if (plan.workers > 1 && dice.chance(0.2)) {
    plan.differs_at = dice.between(1, static_cast<int>(plan.reports.size()));
    plan.differs_on = dice.below(plan.workers);
  }
  return plan;
}

std::string describe(const Plan& plan) {
  std::string text = std::to_string(plan.workers) + " workers, " + std::to_string(plan.spares) + " others" +
                     (plan.replaces ? ", replaces the score" : "") + (plan.waits ? ", waits" : "") +
                     (plan.async_save ? ", async" : "") + (plan.tensorboard ? ", tensorboard" : "") +
                     ", rates differ at " + std::to_string(plan.differs_at) + "\n";
  for (const auto& report : plan.reports)
    text += std::string("  ") +
            (report.is_validated ? names_of_ways[static_cast<int>(report.way)] : "is not validated") + " on rank " +
            std::to_string(report.rank) + "\n";
  return text;
}

/// Validations of programs up to this one hang no longer. A thread that was left behind looks at it.
std::atomic<int> released = 0;

ValidationFunction validation_of(std::shared_ptr<const Plan> plan, int program, bool is_calm) {
  return [plan = std::move(plan), program, is_calm](Session& session, const Checkpoint& checkpoint) -> Config {
    std::int64_t number = 0;
    checkpoint.load("number", number);
    const auto& report = plan->of(number);
    const bool is_it = report.rank < 0 || report.rank % session.world_size() == session.world_rank();
    if (is_it && !is_calm) {
      if (report.way == Way::ends_late) std::this_thread::sleep_for(300ms);
      if (report.way == Way::throws) throw std::runtime_error("no such file");
      while (report.way == Way::hangs && released < program) std::this_thread::sleep_for(1ms);
    }
    session.barrier();  // where the others wait
    Config metrics{{"doubled", 2 * number}};
    if (plan->replaces) metrics["score"] = -number;
    return metrics;
  };
}

void train(Session& session, const Plan& plan, const fs::path& run, bool is_calm) {
  auto net = session.prepare_model(torch::nn::Linear(1, 1));
  auto optimizer = session.prepare_optimizer(torch::optim::SGD(net->parameters(), 0.25),
                                             {.fuse = plan.may_fuse ? Fuse::automatic : Fuse::never});
  std::int64_t number = 0;
  auto state = session.state({{"number", number}});
  state.restore();
  bool waits = plan.waits && !is_calm;
  while (number < static_cast<std::int64_t>(plan.reports.size())) {
    ++number;
    if (!is_calm && number == plan.differs_at && session.world_rank() == plan.differs_on)
      optimizer.param_groups().front().options().set_lr(0.125);
    optimizer.zero_grad();
    net->forward(at::ones({1, 1})).sum().backward();
    optimizer.step();
    const auto& report = plan.of(number);
    session.report({{"number", number}, {"score", number}}, state, {.validation = report.is_validated});
    if (!report.is_validated || !waits) continue;
    const auto found = run / ("checkpoint_00000" + std::to_string(number - 1)) / "validation.json";
    while (session.world_rank() == 0 && !fs::exists(found)) std::this_thread::sleep_for(1ms);
    waits = report.way != Way::hangs;
  }
}

void require(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

/// The status of each report. `chances`: the groups of ranks that can validate, one after the other. A validation that
/// hangs takes one away: that of the spares, or that of all who are left.
std::vector<std::string> statuses_of(const Plan& plan, int chances) {
  std::vector<std::string> statuses;
  for (const auto& report : plan.reports) {
    auto& status = statuses.emplace_back();
    if (!report.is_validated) continue;
    status = "validated";
    if (report.way == Way::throws) status = "validation_failed";
    if (report.way == Way::hangs) status = "validation_timeout";
    if (chances == 0) status = "pending_validation";
    if (report.way == Way::hangs && chances > 0) --chances;
  }
  return statuses;
}

std::vector<std::string> statuses_in(const std::vector<Json>& rows) {
  std::vector<std::string> statuses;
  for (const auto& row : rows) statuses.push_back(row.value("checkpoint_status", ""));
  return statuses;
}

std::string text_of(const std::vector<std::string>& statuses) {
  std::string text;
  for (const auto& status : statuses) text += " " + (status.empty() ? "none" : status);
  return text;
}

/// Checks the values of the rows against their statuses.
void check_values(const Plan& plan, const std::vector<Json>& rows) {
  std::int64_t number = 0;
  for (const auto& row : rows) {
    ++number;
    const bool is_validated = row.value("checkpoint_status", "") == "validated";
    const auto doubled = row.value("doubled", Json());
    require(row.at("number") == number && row.at("training_iteration") == number &&
                row.at("score") == (is_validated && plan.replaces ? -number : number) &&
                (is_validated ? doubled == 2 * number : doubled.is_null()),
            "row " + std::to_string(number) + " is " + row.dump());
  }
}

/// The first start, in which validations go wrong.
void check_first(const Plan& plan, int code, const std::vector<Json>& rows) {
  const auto ended = " with " + std::to_string(code) + " after" + text_of(statuses_in(rows));
  check_values(plan, rows);
  if (plan.differs_at > 0) {
    require(code == static_cast<int>(ExitCode::user_error), "learning rates differ, and it ends" + ended);
    require(static_cast<std::int64_t>(rows.size()) == plan.differs_at - 1, "it ends in another report:" + ended);
    return;
  }
  const auto found = statuses_in(rows);
  const bool by_spares = plan.spares > 0 && found == statuses_of(plan, 2);
  const bool by_all = !plan.waits && found == statuses_of(plan, 1);
  require(by_spares || by_all, "it ends" + ended);
  const bool is_left = std::ranges::find(found, "pending_validation") != found.end();
  require(code == static_cast<int>(is_left ? ExitCode::stopped : ExitCode::done), "it ends" + ended);
}

/// The last start. `before`: the statuses after the first one.
void check_last(const Plan& plan, int code, const std::vector<Json>& rows, const std::vector<std::string>& before) {
  check_values(plan, rows);
  const auto found = statuses_in(rows), planned = statuses_of(plan, static_cast<int>(plan.reports.size()) + 1);
  const auto ended = "it ends with " + std::to_string(code) + " after" + text_of(found);
  require(code == 0 && rows.size() == plan.reports.size(), ended);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool is_decided = i < before.size() && before[i] != "pending_validation";
    const std::string now = plan.reports[i].is_validated ? "validated" : "";
    // What the first start has found without telling its row is told now.
    const bool may_be_found = plan.differs_at > 0 && found[i] == planned[i];
    require(found[i] == (is_decided ? before[i] : now) || may_be_found, ended);
  }
}

/// Checks that TensorBoard has the metrics of each validation once, and those that it replaces apart.
void check_events(const Plan& plan, const fs::path& run, const std::vector<Json>& rows) {
  std::string events;
  for (const auto& entry : fs::directory_iterator(run))
    if (entry.path().filename().string().starts_with("events.")) events += detail::read_file(entry.path());
  const auto count = [&](const std::string& tag) {
    std::ptrdiff_t found = 0;
    for (auto at = events.find(tag); at != events.npos; at = events.find(tag, at + 1)) ++found;
    return found;
  };
  const auto statuses = statuses_in(rows);
  const auto validated = std::ranges::count(statuses, "validated");
  require(count("doubled") == validated && count("validation/score") == (plan.replaces ? validated : 0),
          "the event files have " + std::to_string(count("doubled")) + " of " + std::to_string(validated) +
              " validations, and " + std::to_string(count("validation/score")) + " scores of them");
}

}  // namespace

std::string play(const Round& round, const Communicator& world) {
  static int programs = 0;
  const int program = ++programs;
  const auto plan = std::make_shared<const Plan>(draw(round.seed, world.size()));
  if (round.aloud && world.rank() == 0) std::fputs(describe(*plan).c_str(), stderr);
  const auto start = [&](bool is_calm) {
    const auto run = round.folder / "run";
    return test::run(
        {.storage = round.folder,
         .flags = {"--log-level", round.aloud ? "warn" : "off"},
         .options = {.scaling_config = {.num_workers = plan->workers},
                     .run_config = {.name = "run",
                                    .checkpoint_config = {.async_save = plan->async_save},
                                    .tensorboard = plan->tensorboard},
                     .validation = {.function = validation_of(plan, program, is_calm), .timeout = timeout}}},
        [=](Session& session, const Config&) { train(session, *plan, run, is_calm); });
  };
  // What is wrong on some rank.
  const auto wrong_in = [&](const std::function<void()>& check) -> std::string {
    std::string here;
    try {
      check();
    } catch (const std::logic_error& wrong) {
      here = wrong.what();
    }
    for (const auto& there : world.all_gather(here))
      if (!there.empty()) return there;
    return {};
  };
  auto [code, result] = start(false);
  released = program;
  auto rows = result ? result->metrics_history : std::vector<Json>();
  if (const auto wrong = wrong_in([&, code = code] { check_first(*plan, code, rows); }); !wrong.empty()) return wrong;
  if (code != 0) {
    const auto before = statuses_in(rows);
    std::tie(code, result) = start(true);
    rows = result ? result->metrics_history : std::vector<Json>();
    const auto wrong = wrong_in([&, code = code] { check_last(*plan, code, rows, before); });
    if (!wrong.empty()) return "in the second start: " + wrong;
  }
  return wrong_in([&] {
    if (plan->tensorboard && world.rank() == 0) check_events(*plan, round.folder / "run", rows);
  });
}

}  // namespace muster::soak::validated_runs
