#include "muster/sweep.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "comm/agreement.hpp"
#include "comm/make_world.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/on_ranks.hpp"
#include "comm/timeout.hpp"
#include "launch/part.hpp"
#include "launch/settings.hpp"
#include "launch/supervised.hpp"
#include "muster/version.hpp"
#include "observe/history.hpp"
#include "run/run_folder.hpp"
#include "session/stop.hpp"
#include "sweep/asha.hpp"
#include "sweep/folder.hpp"
#include "sweep/group.hpp"
#include "sweep/table.hpp"
#include "trainer/trainable.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>

namespace muster {
namespace detail::sweep {
namespace {

/// Timeout of groups that have no trial left and wait for the other groups: longer than any sweep takes.
constexpr std::chrono::hours no_timeout{24 * 365};

void check(const SweepOptions& options, const Launch& launch) {
  const auto require = [](bool holds, const std::string& fact, const char* remedy) {
    if (!holds) throw Error(ExitCode::usage, "starting a sweep", fact, remedy);
  };
  const auto count = [](auto number) { return std::to_string(number); };
  require(options.num_samples >= 1, "num_samples is " + count(options.num_samples), "Give it 1 or more");
  require(options.ranks_per_trial >= 1, "ranks_per_trial is " + count(options.ranks_per_trial), "Give it 1 or more");
  require(options.ranks_per_trial <= launch.size(),
          "a trial needs " + counted(options.ranks_per_trial, "rank") + " and the launch has " + count(launch.size()),
          "Start it with as many ranks, or give ranks_per_trial fewer");
  require(!launch.flags().workers, "--workers is set", "ranks_per_trial says how many ranks train together");
  require(launch.flags().resume != Resume::path, "--resume names a path", "A sweep is continued by its --name");
  require(comm::threads_may_call_mpi(), "MPI was initialised without MPI_THREAD_MULTIPLE",
          "Ask for it in MPI_Init_thread, or leave that to muster::Launch: a thread distributes the trials");
  require(options.metric.empty() || options.mode, "the metric \"" + options.metric + "\" has no mode",
          "Give SweepOptions::mode: ScoreOrder::min, as for a loss, or ScoreOrder::max");
  if (const auto& scheduler = options.scheduler) {
    require(!options.metric.empty(), "the scheduler has no metric to compare trials by", "Name one in metric");
    require(
        scheduler->grace_period >= 1 && scheduler->reduction_factor >= 2 && scheduler->max_t >= scheduler->grace_period,
        "asha has grace_period " + count(scheduler->grace_period) + ", reduction_factor " +
            count(scheduler->reduction_factor) + " and max_t " + count(scheduler->max_t),
        "Give it 1 ≤ grace_period ≤ max_t, and a reduction_factor of 2 or more");
  }
}

/// True if `settings`, of --config or --set, have a value for the setting with this full name, for a part of it, or for
/// a whole that contains it.
bool has_value_for(const Json& settings, std::string_view name) {
  const auto* place = &settings;
  for (bool more = true; more && place->is_object();) {
    const auto dot = name.find('.');
    const auto found = place->find(std::string(name.substr(0, dot)));
    if (found == place->end()) return false;
    place = &*found;
    more = dot != name.npos;
    if (more) name.remove_prefix(dot + 1);
  }
  return true;
}

/// Returns "optimizer.lr=0.1" as {"optimizer": {"lr": 0.1}}. A value that is no JSON becomes text.
Json settings_in(const std::string& set) {
  const auto equals = std::min(set.find('='), set.size());
  const auto text = set.substr(std::min(equals + 1, set.size()));
  auto value = detail::json_from_text(detail::json_text_lossy(detail::json_if_valid(text).value_or(Json(text))));
  for (auto name = set.substr(0, equals);;) {
    const auto dot = name.rfind('.');
    Json outer = Json::object();
    outer[dot == name.npos ? name : name.substr(dot + 1)] = std::move(value);
    if (dot == name.npos) return outer;
    value = std::move(outer);
    name.resize(dot);
  }
}

/// Removes a setting by its full name, such as "optimizer.lr".
void remove_setting(Json& settings, std::string_view name) {
  auto* place = &settings;
  for (auto dot = name.find('.'); dot != name.npos; dot = name.find('.')) {
    const auto inner = place->is_object() ? place->find(std::string(name.substr(0, dot))) : place->end();
    if (inner == place->end()) return;
    place = &*inner;
    name.remove_prefix(dot + 1);
  }
  if (place->is_object()) place->erase(std::string(name));
}

std::map<std::string, Json> by_name(const Json& settings) {
  const auto all = settings_of(settings);
  return {all.begin(), all.end()};
}

/// Throws an Error if --set or --config give a setting that the space chooses, since that value would replace it in all
/// trials.
void check_settings(const Space& space, const LaunchFlags& flags) {
  std::vector<Json> files;
  for (const auto& file : flags.config_files) files.push_back(launch::read_config(file));
  for (const auto& [name, domain] : space) {
    const auto file = std::ranges::find_if(files, [&](const Json& settings) { return has_value_for(settings, name); });
    const bool in_file = file != files.end();
    const auto set =
        std::ranges::find_if(flags.set, [&](const auto& text) { return has_value_for(settings_in(text), name); });
    if (in_file || set != flags.set.end())
      throw Error(
          ExitCode::usage, "starting a sweep",
          (in_file ? flags.config_files[static_cast<std::size_t>(file - files.begin())].string() : "--set " + *set) +
              " sets " + name + ", which the space chooses",
          "Leave it out there, or in the space");
  }
}

Json rows_of(const std::vector<Trial>& trials) {
  Json rows = Json::array();
  for (const auto& trial : trials) rows.push_back(to_json(trial));
  return rows;
}

std::vector<Trial> trials_in(const Json& rows, const std::filesystem::path& folder) {
  std::vector<Trial> trials;
  for (const auto& row : rows)
    trials.push_back(trial_of(row, folder / row.at("trial").get<std::string>(), "reading a trial"));
  return trials;
}

/// Reads the trials from their folders. Without `same_space`, throws an Error if a trial has other settings than its
/// point in the space. With `same_space`, the settings in the folder are used: on another machine, exp() and log() may
/// have given another last bit.
std::vector<Trial> read_trials(const std::filesystem::path& folder, const std::vector<TrialSettings>& points,
                               bool same_space) {
  std::vector<Trial> trials;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const auto name = name_of(static_cast<int>(i));
    Trial trial{.name = name, .config = points[i].config, .path = folder / name};
    if (const auto row = read_trial(trial.path)) {
      if (!same_space && row->config != trial.config)
        throw Error(ExitCode::usage, "starting the sweep " + folder.string(),
                    name + " had the settings " + detail::json_text(row->config) + " and would now have " +
                        detail::json_text(trial.config),
                    "Give the same space and --seed, or choose another --name");
      trial = *row;
    }
    trials.push_back(std::move(trial));
  }
  return trials;
}

/// Returns the scores at the rungs, from the reports of earlier starts.
std::vector<Scores> read_scores(const SweepWork& work, const std::string& metric, ScoreOrder mode) {
  std::vector<Scores> scores(work.rungs.size());
  for (std::size_t i = 0; !scores.empty() && i < work.trials.size(); ++i) try {
      for (const auto& one : comparisons_in(observe::History::read(work.trials[i].path), work.rungs, metric, mode))
        scores[one.rung][static_cast<int>(i)] = one.score;
    } catch (const Error& error) {
      log::warn(str("comparing the trials without those of one of them: ", error.what()));
    }
  return scores;
}

/// Returns the settings that all trials share, without those that the space chooses: the trainer's settings, replaced
/// by those of --config and --set. If the Trainable is not a trainer's, only those of the flags are known.
Json common_settings(const SweepWork& work) {
  const auto& flags = work.launch.flags();
  Json settings = Json::object();
  if (const auto* trainer = work.trainable.target<trainer::TrainerTrainable>()) {
    settings = launch::resolve(trainer->default_config(), flags.config_files, flags.set);
  } else {
    for (const auto& file : flags.config_files) settings.update(launch::read_config(file), /*merge_objects=*/true);
    for (const auto& set : flags.set) settings.update(settings_in(set), /*merge_objects=*/true);
  }
  for (const auto& [name, domain] : work.options.space) remove_setting(settings, name);
  return settings;
}

/// Throws an Error if the sweep is continued with another seed, another scheduler, other settings or fewer samples than
/// its sweep.json has.
void require_same_start(const Json& before, const Json& now, const std::filesystem::path& folder) {
  const auto refuse = [&](const std::string& what, const Json& was, const Json& is) {
    throw Error(ExitCode::usage, "starting the sweep " + folder.string(),
                what + " was " + detail::json_text(was) + " and would now be " + detail::json_text(is),
                "Give the same settings and --seed, or choose another --name");
  };
  const auto differs = [&](const char* key) { return before.contains(key) && before.at(key) != now.at(key); };
  const auto samples_in = [](const Json& sweep) {
    const auto samples = sweep.value("num_samples", Json());
    return samples.is_number() ? samples.get<double>() : 0;
  };
  if (samples_in(before) > samples_in(now))
    throw Error(ExitCode::usage, "starting the sweep " + folder.string(),
                "trials that are done would be left out: num_samples was " +
                    detail::json_text(before.at("num_samples")) + " and is " + detail::json_text(now.at("num_samples")),
                "Give as many as before or more, or choose another --name");
  if (differs("seed")) refuse("the seed", before.at("seed"), now.at("seed"));
  if (differs("scheduler"))
    throw Error(ExitCode::usage, "starting the sweep " + folder.string(),
                "the scheduler was " + detail::json_text(before.at("scheduler")) + " and would now be " +
                    detail::json_text(now.at("scheduler")),
                "Give the same scheduler, or choose another --name");
  if (!differs("settings")) return;
  const auto was = by_name(before.at("settings")), is = by_name(now.at("settings"));
  const auto value = [](const auto& settings, const std::string& name) {
    const auto found = settings.find(name);
    return found == settings.end() ? Json() : found->second;
  };
  // Earlier versions of muster stored texts of --set as null.
  const auto may_be_kept_as_null = [&](const std::string& name) {
    return was.contains(name) && was.at(name).is_null() && value(is, name).is_string();
  };
  for (const auto* settings : {&was, &is})
    for (const auto& [name, unused] : *settings)
      if (value(was, name) != value(is, name) && !may_be_kept_as_null(name))
        refuse("the setting \"" + name + "\"", value(was, name), value(is, name));
}

Json to_json(const std::optional<Asha>& scheduler) {
  if (!scheduler) return "none";
  return {{"grace_period", scheduler->grace_period},
          {"reduction_factor", scheduler->reduction_factor},
          {"max_t", scheduler->max_t}};
}

Json to_json(const Space& space) {
  Json all = Json::array();
  for (const auto& [name, domain] : space)
    all.push_back(Json::array({name, static_cast<int>(domain.kind()), domain.values()}));
  return all;
}

/// Returns the options that must be equal on all ranks.
Json comparable(const SweepOptions& options) {
  return {{"space", to_json(options.space)},
          {"num_samples", options.num_samples},
          {"ranks_per_trial", options.ranks_per_trial},
          {"metric", options.metric},
          {"mode", options.mode ? order_of(options) == ScoreOrder::max ? "max" : "min" : "not given"},
          {"scheduler", to_json(options.scheduler)},
          {"name", options.name},
          {"storage_path", options.storage_path.string()}};
}

Json about(const SweepWork& work) {
  const auto& options = work.options;
  return {{"muster_version", MUSTER_VERSION},
          {"program", work.launch.program()},
          {"seed", work.seed},
          {"settings", work.settings},
          {"space", to_json(options.space)},
          {"num_samples", options.num_samples},
          {"ranks_per_trial", options.ranks_per_trial},
          {"num_ranks", work.launch.size()},
          {"scheduler", to_json(options.scheduler)},
          {"metric", options.metric},
          {"mode", order_of(options) == ScoreOrder::max ? "max" : "min"}};
}

/// Throws an Error if the sweep is continued with another metric or mode although the scheduler has already decided by
/// the old one: the trials that it has ended cannot be compared by the new one.
void require_same_comparison(const SweepWork& work, const Json& before, const Json& now) {
  const auto text = [](const Json& sweep) {
    return "the " + sweep.value("mode", std::string()) + " of \"" + sweep.value("metric", std::string()) + "\"";
  };
  if (!work.options.scheduler || text(before) == text(now)) return;
  const auto mode = before.value("mode", std::string()) == "min" ? ScoreOrder::min : ScoreOrder::max;
  const auto scores = read_scores(work, before.value("metric", std::string()), mode);
  if (std::ranges::all_of(scores, &Scores::empty)) return;
  throw Error(ExitCode::usage, "starting the sweep " + work.folder.string(),
              "the scheduler has compared trials by " + text(before) + " and would now compare them by " + text(now),
              "Give the same metric and mode, or choose another --name");
}

/// Reads the metrics and the checkpoint of a trial from its run, if its trial.json is older or was written for another
/// metric.
void read_run(Trial& trial, const std::string& metric) {
  try {
    const auto run = Result::from_path(trial.path);
    trial.metrics = row_to_compare(run.metrics, run.metrics_history, metric);
    trial.checkpoint = run.checkpoint;
  } catch (const Error&) {
    // The trial was lost before its run began; or the run is damaged, which the trial reports when it continues.
  }
}

/// Reads the metrics again for trials whose row was chosen by another metric. Keeps metrics that a user's own Trainable
/// has added.
void read_metrics(std::vector<Trial>& trials, const std::string& metric) {
  for (auto& trial : trials) {
    const auto before = trial.metrics;
    if (trial.status == TrialStatus::running || before.is_null()) continue;
    read_run(trial, metric);
    if (!trial.metrics.contains(metric)) trial.metrics = before;
    if (trial.metrics != before) write_trial(trial, read_lost_starts(trial.path));
  }
}

/// Finds the trials that were lost: this launch holds the run's lock, so a trial that is marked as running is not
/// running. Each of them waits again, or has failed for good. `forgives`: true if trials that had failed for good are
/// tried again. Returns the lost starts of each trial.
std::vector<LostStarts> find_lost_trials(std::vector<Trial>& trials, const std::string& metric, bool forgives) {
  std::vector<LostStarts> all;
  for (auto& trial : trials) {
    auto& lost_starts = all.emplace_back(read_lost_starts(trial.path));
    if (forgives && trial.status == TrialStatus::failed && lost_starts.are_final()) {
      lost_starts = {};
      write_trial(trial);
    }
    if (trial.status != TrialStatus::running) continue;
    lost_starts.count = run::is_progress(points_of(trial.path), lost_starts.furthest) ? 0 : lost_starts.count + 1;
    trial.status = lost_starts.are_final() ? TrialStatus::failed : TrialStatus::waiting;
    read_run(trial, metric);
    if (lost_starts.are_final())
      trial.error = Error(ExitCode::user_error, "running " + trial.name,
                          "a rank was lost in " + counted(lost_starts.count, "start") + " without progress",
                          "Look into its logs; a start of the sweep by hand tries it again");
    write_trial(trial, lost_starts);
    if (lost_starts.count > 0)
      log::warn(trial.error ? std::string(trial.error->what())
                            : trial.name + " ran when a rank was lost, and had made no progress; it goes last");
  }
  return all;
}

/// The order in which trials are run: trials that have begun, new ones, lost ones, and last those lost repeatedly.
enum Priority { begun, fresh, lost, lost_again };

std::vector<int> left_to_do(const std::vector<Trial>& trials, const std::vector<LostStarts>& lost_starts) {
  const auto priority_of = [&](std::size_t i) {
    if (lost_starts[i].count > 0) return lost_starts[i].count < LostStarts::max_lost_starts ? lost : lost_again;
    return trials[i].status != TrialStatus::waiting || trials[i].checkpoint ? begun : fresh;
  };
  std::vector<int> numbers;
  for (const auto priority : {begun, fresh, lost, lost_again})
    for (std::size_t i = 0; i < trials.size(); ++i) {
      const bool ended =
          has_ended_well(trials[i].status) || (trials[i].status == TrialStatus::failed && lost_starts[i].are_final());
      if (!ended && priority_of(i) == priority) numbers.push_back(static_cast<int>(i));
    }
  return numbers;
}

/// Takes the seed of the sweep that is continued, unless --seed is given, and draws the trials' settings by it.
/// Collective.
void take_seed(SweepWork& work, const Communicator& world) {
  const auto& flags = work.launch.flags();
  work.seed =
      comm::run_on_root(world, [&] { return run::seed_of(flags, read_json_if_intact(work.folder / table_file)); });
  if (work.seed != flags.seed)
    work.trial_settings = sample_space(work.options.space, work.options.num_samples, work.seed);
}

/// Determines on rank 0 which trials exist already and which are left to do. Collective.
void prepare(SweepWork& work, const Communicator& world, bool is_restart) {
  const auto found = comm::run_on_root(world, [&]() -> Json {
    const bool there = std::filesystem::exists(work.folder / table_file);
    const auto resume = work.launch.flags().resume;
    if (there && resume == Resume::never && !is_restart)
      throw Error(ExitCode::usage, "starting the sweep " + work.folder.string(),
                  "--resume never is set and it has trials", "Choose another --name, or remove that folder");
    if (!there && resume == Resume::must)
      throw Error(ExitCode::data, "resuming the sweep " + work.folder.string(), "it has not been started yet",
                  "Use --resume auto to start afresh");
    work.settings = common_settings(work);
    const auto before = read_json_if_intact(work.folder / table_file);
    if (there && !before.is_object())
      log::warn((work.folder / table_file).string() + " is damaged, and is written again from the files of the trials");
    const auto now = about(work);
    if (before.is_object()) require_same_start(before, now, work.folder);
    work.trials = read_trials(work.folder, work.trial_settings,
                              before.is_object() && before.value("space", Json()) == now.at("space"));
    if (before.is_object()) require_same_comparison(work, before, now);
    std::filesystem::remove(work.folder / stopping_file);
    const auto& metric = work.options.metric;
    if (before.is_object() && before.value("metric", metric) != metric) read_metrics(work.trials, metric);
    const auto lost_starts = find_lost_trials(work.trials, metric, /*forgives=*/!is_restart);
    write_tables(work.folder, work.trials, now);
    Json scores = Json::array();
    for (const auto& rung : read_scores(work, metric, order_of(work.options))) {
      auto& entries = scores.emplace_back(Json::array());
      for (const auto& [trial, score] : rung) entries.push_back({trial, score});
    }
    Json counts = Json::array();
    for (const auto& of_trial : lost_starts) counts.push_back(of_trial.count);
    return Json{rows_of(work.trials), scores, left_to_do(work.trials, lost_starts), counts};
  });
  work.trials = trials_in(found[0], work.folder);
  for (const auto& entries : found[1]) {
    auto& rung = work.scores.emplace_back();
    for (const auto& entry : entries) rung[entry[0]] = entry[1].get<double>();
  }
  work.to_do = found[2].get<std::vector<int>>();
  for (const auto& count : found[3]) work.lost_starts.push_back({.count = count.get<int>()});
}

/// Runs the trials in to_do on `groups` groups of ranks. Collective over the launch.
void run_on_groups(const SweepWork& work, const Communicator& world, int groups) {
  const int group = world.rank() / work.options.ranks_per_trial;
  const auto timeout = comm::timeout(world);
  TrialQueue queue(world, work.scores, timeout);
  const auto ranks = comm::make_separate_world(world.split(std::min(group, groups)));
  comm::set_final_grace(ranks, timeout);  // so that a failed trial does not end the other trials
  // A rank that belongs to no group waits below for the groups. If it receives a signal meanwhile, it asks them to
  // stop.
  std::optional<std::jthread> listener;
  if (group >= groups)
    listener.emplace([&](const std::stop_token& over) {
      for (; !over.stop_requested(); std::this_thread::sleep_for(std::chrono::milliseconds(50)))
        if (work.launch.stop_requested()) return ask_others_to_stop(work.folder);
    });
  const auto error = comm::attempt_on_all(world, {.done = no_timeout, .failed = timeout}, [&] {
    if (group >= groups) return;  // these ranks belong to no group
    try {
      run_trials(work, queue, ranks);
    } catch (const comm::RanksMissing&) {
      throw;
    } catch (...) {
      if (ranks.rank() == 0) ask_others_to_stop(work.folder);
      throw;
    }
  });
  if (error) throw *error;
}

/// Runs all trials on all groups. Trials that were lost repeatedly run alone, one at a time, to find out which trial
/// loses ranks. Collective over the launch.
void run_all(SweepWork& work, const Communicator& world) {
  const auto again = std::ranges::find_if(work.to_do, [&](int trial) {
    return work.lost_starts[static_cast<std::size_t>(trial)].count >= LostStarts::max_lost_starts;
  });
  const std::vector<int> suspects(again, work.to_do.end());
  work.to_do.erase(again, work.to_do.end());
  const int groups = world.size() / work.options.ranks_per_trial;
  work.one_at_a_time = groups == 1;
  if (!work.to_do.empty()) run_on_groups(work, world, groups);
  if (suspects.empty()) return;
  work.to_do = suspects;
  work.one_at_a_time = true;
  run_on_groups(work, world, 1);
}

std::ptrdiff_t waiting_in(const SweepResult& sweep) {
  return std::ranges::count(sweep.trials, TrialStatus::waiting, &Trial::status);
}

/// Returns the error with which the sweep ends in its present state, the same on all ranks; none if it ends well.
/// `asked`: true if it was asked to stop.
std::optional<Error> error_of(const SweepResult& sweep, const std::string& name, bool asked) {
  const auto agreed = [](const Error& error) { return Error(error.code(), std::string(error.what())); };
  const auto& trials = sweep.trials;
  const auto ended = std::ranges::count_if(trials, [](const Trial& trial) { return has_ended_well(trial.status); });
  if (const auto waiting = waiting_in(sweep); waiting > 0) {
    const bool saved =
        ended > 0 || std::ranges::any_of(trials, [](const Trial& trial) { return trial.checkpoint.has_value(); });
    if (!asked)
      return agreed(Error(saved ? ExitCode::stopped : ExitCode::retry, "the sweep",
                          str(waiting, " of ", counted(trials.size(), "trial"),
                              " stopped without a request; the warnings above name the cause"),
                          "Start it again with --name " + name + " to go on"));
    return agreed(
        Error(saved ? ExitCode::stopped : ExitCode::retry, "the sweep",
              str("stopped on request, ", waiting, " of ", counted(trials.size(), "trial"),
                  waiting == 1 ? " is left" : " are left", saved ? ", state saved" : ", and there is no state saved"),
              "Start it again with --name " + name + " to go on"));
  }
  if (ended == 0) {
    const auto& first = trials.front();
    return agreed(
        Error(first.error ? first.error->code() : ExitCode::user_error, "the sweep",
              "no trial has ended well; " + first.name + ": " + (first.error ? first.error->what() : "failed"),
              "Mend the cause and start it again with --name " + name + ": failed trials are tried again"));
  }
  const auto has_metric = [&](const Trial& trial) {
    return trial.metrics.is_object() && trial.metrics.value(sweep.metric, Json()).is_number();
  };
  if (sweep.metric.empty() || std::ranges::any_of(trials, has_metric)) return {};
  std::vector<Json> rows;
  for (const auto& trial : trials)
    if (trial.metrics.is_object()) rows.push_back(trial.metrics);
  return agreed(missing_metric(sweep.metric, rows));
}

}  // namespace
}  // namespace detail::sweep

std::optional<Trial> SweepResult::best() const {
  using namespace detail::sweep;
  const Trial* best = nullptr;
  double most = 0;
  for (const auto& trial : trials) {
    const auto found = trial.metrics.is_object() ? trial.metrics.find(metric) : trial.metrics.end();
    if (!has_ended_well(trial.status) || found == trial.metrics.end() || !found->is_number()) continue;
    const auto score = *score_of(trial.metrics, metric, mode);
    if (best != nullptr && score <= most) continue;
    best = &trial;
    most = score;
  }
  return best == nullptr ? std::nullopt : std::optional(*best);
}

Sweep::Sweep(Launch& launch, Trainable trainable, SweepOptions options)
    : launch_(launch), trainable_(std::move(trainable)), options_(std::move(options)) {}

SweepResult Sweep::fit() {
  using namespace detail::sweep;
  namespace comm = detail::comm;
  const auto& world = launch_.communicator();
  const auto& flags = launch_.flags();
  SweepWork work{.launch = launch_, .trainable = trainable_, .options = options_};
  comm::check_on_all(world, {.done = comm::timeout(world), .failed = comm::final_grace(world)}, [&] {
    check(options_, launch_);
    work.trial_settings = sample_space(options_.space, options_.num_samples, flags.seed);
  });
  comm::require_same_options(world, "the sweep", comparable(options_));
  comm::run_on_root(world, [&] { check_settings(options_.space, flags); });
  if (options_.scheduler) work.rungs = rungs_of(*options_.scheduler);

  const detail::run::RunFolder run(world, launch_, {.name = options_.name, .storage_path = options_.storage_path},
                                   detail::launch::LaunchPart::next_sweep_number(launch_));
  work.folder = run.path();
  take_seed(work, world);
  prepare(work, world, run.is_restart());
  work.refresh = [&] {
    write_tables(work.folder, read_trials(work.folder, work.trial_settings, /*same_space=*/true), about(work));
  };
  const bool has_failed = std::ranges::count(work.trials, TrialStatus::failed, &Trial::status) > 0;
  if (world.rank() == 0)
    detail::log::info(detail::str(
        "sweep ", work.folder, ": ", detail::counted(work.trials.size(), "trial"), ", ",
        work.to_do.empty()
            ? has_failed ? "some have failed for good, nothing is left to do"
                         : "all of them done; choose another --name to begin a new one"
            : detail::str(work.to_do.size(), " to do, ", world.size() / options_.ranks_per_trial, " at a time")));
  if (!work.to_do.empty()) try {
      run_all(work, world);
    } catch (const Error& error) {
      if (world.rank() == 0 && error.agreed()) run.write_error(error.what());
      throw;
    }

  SweepResult result{.path = work.folder, .metric = options_.metric, .mode = order_of(options_)};
  const auto end = detail::json_from_text(comm::run_on_root(world, [&] {
    work.refresh();
    const bool asked = std::filesystem::exists(work.folder / stopping_file);
    for (const char* file : {detail::run_names::stop, stopping_file})
      detail::session::StopFile(work.folder / file).remove();
    return detail::json_text_lossy(
        Json{rows_of(read_trials(work.folder, work.trial_settings, /*same_space=*/true)), asked});
  }));
  result.trials = trials_in(end[0], work.folder);
  result.error = error_of(result, run.name(), end[1].get<bool>());
  if (world.rank() != 0) return result;
  if (flags.progress != Progress::none) std::fputs(table_of(result).c_str(), stderr);
  if (result.error && result.error->code() == ExitCode::retry && waiting_in(result) > 0)
    detail::launch::tell_supervisor(detail::launch::message_stopped, work.folder.string());
  return result;
}

}  // namespace muster
