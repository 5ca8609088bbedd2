#include "train/validation.hpp"

#include "base/log.hpp"
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/validation_file.hpp"
#include "checkpoint/retention.hpp"
#include "checkpoint/rollbacks.hpp"
#include "checkpoint/tier.hpp"
#include "comm/agreement.hpp"
#include "comm/on_ranks.hpp"
#include "comm/wait.hpp"
#include "comm/whereabouts.hpp"
#include "comm/world.hpp"
#include "observe/history.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::detail::train {
namespace {

using namespace std::chrono_literals;
using checkpoint::Tier;

/// Ranks that do not train wait for as long as it takes.
constexpr std::chrono::hours as_long_as_it_takes{24 * 365};
/// Of the time that a run has, for what follows the last validation.
constexpr auto reserve = 1s;
/// What a validation may take besides: to hear that it is given up, and to write what was found.
constexpr auto besides = 30s;
/// From one look for a checkpoint that is still being written to the next.
constexpr auto between_looks = 100ms;

/// The names that validations of this run have given before.
Json nulls_for(const Tier& tier, const Json& reported) {
  Json nulls = Json::object();
  for (const auto& [index, path] : tier.list().published)
    if (const auto fields = checkpoint::read_validation(path))
      for (const auto& [name, value] : fields->items())
        if (!reported.contains(name)) nulls[name] = nullptr;
  return nulls;
}

}  // namespace

std::string Validation::Found::text() const {
  return Json{
      {"index", of.index}, {"training_iteration", of.training_iteration}, {"fields", fields}, {"warning", warning}}
      .dump(-1, ' ', false, Json::error_handler_t::replace);
}

Validation::Found Validation::Found::from(const std::string& text) {
  const auto json = Json::parse(text);
  return {.of = {json.at("index").get<int>(), json.at("training_iteration").get<std::int64_t>()},
          .fields = json.at("fields"),
          .warning = json.at("warning").get<std::string>()};
}

Validation::Validation(std::shared_ptr<const Plan> plan, std::shared_ptr<const RunFolder> run, at::Device device)
    : plan_(std::move(plan)), run_(std::move(run)), device_(device) {
  const auto& world = plan_->world();
  if (!possible() || plan_->workers == world.size() || !comm::threads_may_call_mpi()) return;
  leader_ = plan_->workers;
  mailbox_.emplace(world);
  const auto side = world.split(plan_->works() ? 0 : 1);
  if (!plan_->works()) beside_ = ground(side);
}

std::shared_ptr<const ValidationGround> Validation::ground(const Communicator& ranks) const {
  const auto apart = comm::make_world_apart(ranks);
  if (comm::threads_may_call_mpi()) comm::set_time_limit(apart, plan_->options.validation.timeout);
  return std::make_shared<ValidationGround>(ValidationGround{plan_, run_, device_, apart});
}

std::filesystem::path Validation::path_of(int index) const { return Tier(run_->path()).published(index); }

std::vector<Validation::Pending> Validation::pending(const Tell& tell,
                                                     const std::vector<checkpoint::Rollback>& rollbacks) const {
  std::vector<Pending> pending;
  for (const auto& [index, path] : Tier(run_->path()).list().published) try {
      if (checkpoint::rolled_back(rollbacks, index)) continue;  // its row is another report's now
      const auto reported = checkpoint::read_manifest(path).metrics;
      if (checkpoint::status_in(reported) != CheckpointStatus::pending_validation) continue;
      const auto iteration = reported.value("training_iteration", std::int64_t{0});
      if (const auto found = checkpoint::read_validation(path))
        tell(iteration, *found);
      else
        pending.push_back({index, iteration});
    } catch (const Error& error) {
      log::warn("looking whether " + path.filename().string() + " waits for a validation: " + error.what());
    }
  return pending;
}

void Validation::resume(const Tell& tell, const std::vector<checkpoint::Rollback>& rollbacks) {
  const Tell pay = [&](std::int64_t iteration, const Json& fields) { tell_row(iteration, fields, tell); };
  for (const auto& [index, iteration] : pending(pay, rollbacks))
    request(Checkpoint::from_directory(path_of(index)), iteration);
}

void Validation::request(const Checkpoint& checkpoint, std::int64_t training_iteration) {
  const auto index = Tier::index_of(checkpoint.path().filename());
  if (!index || !mailbox_) return;
  {
    const std::lock_guard lock(owing_);
    owed_.insert(training_iteration);
  }
  mailbox_->send(leader_, Json{{"validate", *index}, {"training_iteration", training_iteration}}.dump());
}

bool Validation::owes(std::int64_t training_iteration) const {
  const std::lock_guard lock(owing_);
  return owed_.contains(training_iteration);
}

void Validation::tell_row(std::int64_t training_iteration, const Json& fields, const Tell& tell) {
  tell(training_iteration, fields);
  const std::lock_guard lock(owing_);
  owed_.erase(training_iteration);
}

void Validation::take(const Tell& tell) {
  if (!mailbox_) return;
  while (const auto text = mailbox_->receive()) take(Found::from(*text), tell);
}

void Validation::take(const Found& found, const Tell& tell) {
  if (taken_.contains(found.of.index)) return;
  if (!found.warning.empty()) log::warn(found.warning);
  if (found.fields.is_null()) return;
  taken_.insert(found.of.index);
  tell_row(found.of.training_iteration, found.fields, tell);
}

void Validation::training_has_ended() {
  if (mailbox_) mailbox_->send(leader_, Json{{"end", attempt_}}.dump());
}

void Validation::serve() {
  if (!beside_) return;
  const auto& world = plan_->world();
  ending_ = false;
  const auto served = [&] {
    while (const auto text = mailbox_->receive()) hear(Json::parse(*text));
    if (leads()) lead();
    return ending_ && !job_;
  };
  comm::wait_until(served, as_long_as_it_takes, [&] { comm::hear_alarm(world); });
}

void Validation::hear(const Json& letter) {
  if (letter.contains("validate")) {
    const int index = letter.at("validate");
    const std::int64_t iteration = letter.at("training_iteration");
    if (const auto known = found_.find(index); known != found_.end())
      mailbox_->send(0, known->second.text());
    else if (!current_ || current_->index != index)
      waiting_[index] = {index, iteration};
  } else if (letter.contains("begin")) {
    job_.reset();
    job_.emplace(beside_, path_of(letter.at("begin")));
  } else if (letter.contains("leave")) {
    job_.reset();
    stuck_ = stuck_ || letter.at("leave").get<bool>();
  } else if (letter.at("end") == attempt_) {
    ending_ = true;
    // The workers wait for it from here on.
    if (job_) comm::keep_alive(plan_->world(), plan_->options.validation.timeout + besides);
  }
}

void Validation::tell_others(const Json& letter) {
  for (int rank = leader_ + 1; rank < plan_->world().size(); ++rank) mailbox_->send(rank, letter.dump());
}

void Validation::lead() {
  if (job_) {
    const auto verdict = judge(ending_);
    if (verdict == Verdict::goes_on) return;
    end_job(verdict);
    comm::keep_alive(plan_->world(), 0ms);
  }
  if (ending_)
    tell_others({{"end", attempt_}});
  else
    begin_next();
}

void Validation::end_job(Verdict verdict) {
  const auto found = conclude(*std::exchange(current_, std::nullopt), verdict);
  stuck_ = verdict != Verdict::over || !job_->finding().together;
  tell_others({{"leave", stuck_}});
  job_.reset();
  mailbox_->send(0, found.text());
  if (!found.fields.is_null()) found_[found.of.index] = found;
}

void Validation::begin_next() {
  if (stuck_ || waiting_.empty() || Clock::now() - looked_ < between_looks || !may_begin(false)) return;
  looked_ = Clock::now();
  for (const auto& [index, of] : waiting_) {
    if (std::error_code ignored; !std::filesystem::exists(path_of(index), ignored)) continue;  // not yet, or never
    tell_others({{"begin", index}});
    job_.emplace(beside_, path_of(index));
    current_ = of;
    waiting_.erase(index);
    return;
  }
}

Validation::Verdict Validation::judge(bool at_the_end) const {
  if (job_->over()) return Verdict::over;
  if (job_->taken() >= plan_->options.validation.timeout) return Verdict::too_long;
  if (!at_the_end) return Verdict::goes_on;
  const auto left = plan_->launch.time_left();
  return (left ? *left < reserve : plan_->launch.stop_requested()) ? Verdict::no_time : Verdict::goes_on;
}

bool Validation::may_begin(bool asked_to_stop) const {
  const auto left = plan_->launch.time_left();
  if (!left) return !asked_to_stop && !plan_->launch.stop_requested();
  return *left > slowest_ + reserve && (!asked_to_stop || slowest_ > Clock::duration{});
}

Validation::Found Validation::conclude(const Pending& of, Verdict verdict) {
  const auto path = path_of(of.index);
  const auto name = path.filename().string();
  Found found{.of = of};
  if (verdict == Verdict::no_time) {
    found.warning = name + " is not validated yet; started again, the run does it";
    return found;
  }
  const auto& timeout = plan_->options.validation.timeout;
  try {
    Json fields = Json::object();
    auto status = CheckpointStatus::validated;
    if (verdict == Verdict::over && !job_->finding().error) {
      fields = job_->finding().metrics;
      slowest_ = std::max(slowest_, job_->taken());
    } else {
      const bool too_long = job_->taken() >= timeout;
      status = too_long ? CheckpointStatus::validation_timeout : CheckpointStatus::validation_failed;
      found.warning = "validating " + name + ": ";
      if (verdict == Verdict::over)
        found.warning += job_->finding().error->what();
      else
        found.warning += "given up after " + std::to_string(timeout.count()) +
                         " ms (ValidationConfig::timeout); its ranks validate nothing more in this job";
      fields = nulls_for(Tier(run_->path()), checkpoint::read_manifest(path).metrics);
    }
    fields[checkpoint::status_name] = checkpoint::text_of(status);
    checkpoint::write_validation(path, fields);
    found.fields = std::move(fields);
  } catch (const std::exception& error) {
    found.warning += (found.warning.empty() ? "" : ". And ") +
                     ("what the validation of " + name + " has found is not kept: ") + error.what();
  }
  return found;
}

Json Validation::begin_finish(bool stopped, const std::optional<Error>& error, bool prunes) {
  // By way of the ranks, since a file that was just written elsewhere may not be seen here yet.
  Json known = Json::array();
  if (mailbox_) {
    if (leads() && job_) end_job(job_->over() ? Verdict::over : Verdict::no_time);
    for (const auto& [index, found] : found_) known.push_back(found.text());
    const auto told = Json::parse(plan_->world().broadcast(Json{known, slowest_.count(), stuck_}.dump(), leader_));
    known = told[0];
    slowest_ = std::max(slowest_, Clock::duration(told[1].get<Clock::rep>()));
    if (beside_) {
      stuck_ = told[2];
      job_.reset();
    }
  }
  return Json::parse(comm::on_root(plan_->world(), [&] {
    auto history = observe::History::of_all(run_->path());
    const Tell tell = [&](std::int64_t iteration, const Json& fields) { history.validated(iteration, fields); };
    take(tell);
    for (const auto& text : known) take(Found::from(text.get<std::string>()), tell);
    Json left = Json::array();
    for (const auto& of : pending(tell, checkpoint::read_rollbacks(run_->path())))
      if (!taken_.contains(of.index)) left.push_back({of.index, of.training_iteration});
    if ((error && !stopped) || !may_begin(stopped)) left.clear();
    if (left.empty() && prunes) checkpoint::prune(Tier(run_->path()), plan_->options.run_config.checkpoint_config);
    return left.dump();
  }));
}

void Validation::finish(const std::optional<Error>& error, bool has_trained) {
  if (!possible()) return;
  const auto& world = plan_->world();
  const bool first = world.rank() == 0;
  const bool stopped = error && error->code() == ExitCode::stopped;
  // A start that does not train, or was refused, removes no checkpoint.
  const bool prunes = has_trained && (!error || stopped);
  const auto left = begin_finish(stopped, error, prunes);
  if (left.empty()) return;
  const auto group = world.split(stuck_ ? 1 : 0);
  if (stuck_) return;
  const auto all = ground(group);
  for (const auto& entry : left) {
    if (comm::on_root(group, [&] { return std::string(may_begin(stopped) ? "begin" : "end"); }) == "end") break;
    comm::keep_alive(world, plan_->options.validation.timeout + besides);
    const Pending of{entry[0].get<int>(), entry[1].get<std::int64_t>()};
    job_.emplace(all, path_of(of.index));
    auto verdict = Verdict::goes_on;
    if (first)
      comm::wait_until([&] { return (verdict = judge(true)) != Verdict::goes_on; }, as_long_as_it_takes,
                       [&] { comm::hear_alarm(world); });
    // The first decides; another may have waited too long for it, and gone out of step.
    const bool given_up = first && verdict != Verdict::over, apart = job_->over() && !job_->finding().together;
    stuck_ = group.all_reduce(std::int64_t{given_up || apart}, ReduceOp::max) != 0;
    if (first) {
      auto history = observe::History::of_all(run_->path());
      take(conclude(of, verdict),
           [&](std::int64_t iteration, const Json& fields) { history.validated(iteration, fields); });
    }
    job_.reset();
    if (stuck_) break;
  }
  comm::keep_alive(world, 0ms);
  if (first && prunes) checkpoint::prune(Tier(run_->path()), plan_->options.run_config.checkpoint_config);
}

}  // namespace muster::detail::train
