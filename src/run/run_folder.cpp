#include "run/run_folder.hpp"

#include "base/json.hpp"
#include "base/log.hpp"
#include "base/run_names.hpp"
#include "checkpoint/fast_tier.hpp"
#include "comm/on_ranks.hpp"
#include "comm/rank_status.hpp"
#include "launch/supervised.hpp"
#include "muster/error.hpp"
#include "run/failures.hpp"
#include "run/params.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <utility>

namespace muster::detail::run {
namespace {

/// Throws an Error if another program made the run with these params.
void require_same_program(const Json& params, const std::string& program, const std::filesystem::path& folder) {
  const auto maker = params.is_object() ? params.value("program", Json()) : Json();
  if (maker.is_string() && maker != program)
    throw Error(
        ExitCode::usage, "starting the run " + folder.string(),
        "this run was made by " + maker.get<std::string>() + ", and this is " + program + "; nothing was changed",
        "Choose another --name");
}

/// Makes the folder. True if it did not exist: then this process owns it, even if another process chooses the same name
/// at this moment. Also true if the folder cannot be made; the caller tries again and reports the error.
bool claim(const std::filesystem::path& folder) {
  const auto storage = folder.parent_path();
  make_directories(storage);
  std::error_code error;
  const bool made = std::filesystem::create_directory(folder, error);
  if (made && ::access(storage.c_str(), R_OK) == 0) sync_directory(storage);
  return made || (error && error != std::errc::file_exists);
}

/// Returns NAME, NAME_2, NAME_3, … for the numbers 1, 2, 3, …
std::string numbered_name(const std::string& name, int number) { return number == 1 ? name : str(name, "_", number); }

/// True if this process may use the folder: the folder is new, or an earlier start of the same `muster run` or of the
/// same requeued Slurm job has used it.
bool take(const std::filesystem::path& folder) {
  const auto supervisor = launch::supervisor();
  if (supervisor && read_failures(folder, supervisor->id)) return true;
  const bool is_new = claim(folder);
  const char* const restarts = std::getenv("SLURM_RESTART_COUNT");
  if (std::getenv("SLURM_JOB_ID") == nullptr || restarts == nullptr || std::atoi(restarts) == 0) return is_new;
  // In a requeued job, each start of the program needs a folder of its own: the start that creates this file gets the
  // folder.
  const auto mark = folder / str(".slurm_restart.", restarts);
  const int descriptor = ::open(mark.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor >= 0) ::close(descriptor);
  return descriptor >= 0 || errno != EEXIST;
}

/// Returns NAME, the name of this process's first run, and the name of its present run: NAME, then NAME_2, NAME_3, …
/// for further runs. In a Slurm job, NAME is PROGRAM_JOB; otherwise PROGRAM_TIME, with the time when `muster run` began
/// or, without it, when this process began its first run. If another start has this name, .2, .3, … is appended to it.
std::pair<std::string, std::string> default_name(const std::string& program, const std::filesystem::path& storage) {
  static std::map<std::filesystem::path, std::string> names;  // NAME for each storage and program
  static std::set<std::filesystem::path> taken;               // names that this process has used
  auto& own = names[storage / program];
  if (own.empty()) {
    const char* const job = std::getenv("SLURM_JOB_ID");
    const auto supervisor = launch::supervisor();
    const auto first = program + "_" +
                       (job != nullptr ? job
                        : supervisor   ? supervisor->started
                                       : run_names::time_now());
    own = first;
    for (int start = 2; !take(storage / own); ++start) own = str(first, ".", start);
  }
  auto name = own;
  for (int i = 2; !taken.insert(storage / name).second; ++i) name = numbered_name(own, i);
  return {own, name};
}

/// Warns if two trainers of this process use the same run, since the second one continues where the first has ended.
void warn_of_same_run(const std::filesystem::path& run, int trainer) {
  static std::map<std::filesystem::path, int> trainers;
  const auto [known, is_new] = trainers.try_emplace(run, trainer);
  if (!is_new && std::exchange(known->second, trainer) != trainer)
    log::warn("the run " + run.string() +
              " is that of an earlier trainer of this program, and this one goes on with it. Give each trainer a "
              "RunConfig::name of its own, or none");
}

}  // namespace

std::uint64_t seed_of(const LaunchFlags& flags, const Json& params) {
  const auto saved = params.is_object() ? params.value("seed", Json()) : Json();
  return flags.has_seed || !saved.is_number_unsigned() ? flags.seed : saved.get<std::uint64_t>();
}

void check_run_name(const std::string& name) {
  if (!is_utf8(name))
    throw Error(ExitCode::usage, "reading the run's name " + json_text_lossy(Json(name)), "it is not UTF-8",
                "Choose another --name; --storage says where the run lies");
  const bool plain =
      !name.empty() && name.size() <= 200 && name.front() != '.' && name.front() != '-' && name.front() != ' ' &&
      name.back() != ' ' &&
      std::none_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == '/' || c == 0x7f; }) &&
      is_utf8(name);
  if (!plain)
    throw Error(ExitCode::usage, "reading the run's name \"" + name + "\"",
                "it is not the name of a folder: no '/', no leading '.' or '-', no space around it, no control "
                "characters, 1 to 200 bytes of UTF-8",
                "Choose another --name; --storage says where the run lies");
  if (name.starts_with("checkpoint_"))
    throw Error(ExitCode::usage, "reading the run's name \"" + name + "\"",
                "names that begin with checkpoint_ are those of checkpoints", "Choose another --name");
}

std::filesystem::path absolute_path(const std::filesystem::path& path) {
  if (path.empty()) throw Error(ExitCode::usage, "looking at a path", "no name is given", "Name a file or a folder");
  const auto whole = std::filesystem::absolute(path).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

RunFolder::RunFolder(const Communicator& world, const Launch& launch, const RunConfig& config, int trainer) {
  const auto& flags = launch.flags();
  const auto level = config.logging_config.level.empty() ? "info" : config.logging_config.level;
  log::level_from_name(level);  // throws if the name is wrong, before anything is created
  const bool numbered = flags.name && config.name != *flags.name;
  // While a rank waits for a lock, the other ranks wait for it and must not time out.
  const auto announce_wait = [&](std::chrono::milliseconds most) { comm::keep_alive(world, most); };
  const auto take_lock = [&](bool is_root) {
    lock_.emplace(path_, is_root, RunLock::default_patience, announce_wait);
    comm::keep_alive(world, std::chrono::milliseconds(0));
  };
  const auto decided = comm::run_on_root(world, [&] {
    auto storage = flags.storage.value_or(config.storage_path);
    if (storage.empty()) storage = "runs";
    if (storage.string().find("://") != std::string::npos)
      throw Error(ExitCode::usage, "opening the storage " + storage.string(), "it is a URL",
                  "Name a folder on a file system that all nodes share");
    if (storage.string() == "~" || storage.string().starts_with("~/"))
      throw Error(ExitCode::usage, "opening the storage " + storage.string(), "the shell has not replaced the ~",
                  "Leave the ~ out of quotes, or write $HOME");
    storage = std::filesystem::absolute(storage).lexically_normal();
    std::error_code ignored;  // make_directories() reports errors
    made_storage_ = std::filesystem::symlink_status(storage, ignored).type() == std::filesystem::file_type::not_found;
    name_ = flags.name.value_or(config.name);
    // The value of --name with which the whole program can be started again.
    std::string name_flag = flags.name.value_or("");
    if (name_.empty() && !flags.name) std::tie(name_flag, name_) = default_name(launch.program(), storage);
    check_run_name(name_);
    if (numbered) name_ = numbered_name(name_, trainer);
    path_ = storage / name_;
    if (!is_utf8(path_.string()))
      throw Error(ExitCode::usage, "opening the storage " + storage.string(), "its path is not UTF-8",
                  "Choose another --storage");
    make_directories(path_);
    require_own_directory(path_);
    if (flags.name) require_same_program(read_json_if_intact(path_ / run_names::sweep), launch.program(), path_);
    make_directories(path_ / run_names::logs);
    require_own_directory(path_ / run_names::logs);
    take_lock(/*is_root=*/true);
    if (const auto file = path_ / run_names::params; std::filesystem::exists(status_of(file))) {
      params_ = read_json(file);
      options_from_params(params_, file);
      if (flags.name) require_same_program(params_, launch.program(), path_);
    }
    const auto supervisor = launch::supervisor();
    is_restart_ = supervisor && read_failures(path_, supervisor->id);
    if (flags.resume == Resume::never && !is_restart_ &&
        (newest_checkpoint_index(path_) >= 0 || checkpoint::may_hold_newer(*storage::tier_of(path_))))
      throw Error(ExitCode::usage, "starting the run " + path_.string(), "--resume never is set and it has checkpoints",
                  "Choose another --name, or remove that folder");
    if (supervisor && !is_restart_) write_failures(path_, supervisor->id, {});
    launch::tell_supervisor(launch::message_run, path_.string());
    return Json{path_.string(), name_, params_, is_restart_, name_flag};
  });
  path_ = decided[0].get<std::string>();
  name_ = decided[1];
  params_ = decided[2];
  is_restart_ = decided[3];
  const std::string name_flag = decided[4];
  how_to_go_on_ = "Start it again " + (name_flag.empty() ? "" : "with --name " + name_flag + " ") + "to go on";
  if (numbered)
    for (int i = 1; i < trainer; ++i) earlier_runs_.push_back(path_.parent_path() / numbered_name(*flags.name, i));
  check_shared(world);

  // If a rank cannot open its log file, all ranks throw here.
  const auto ranks = comm::run_on_all(world, [&] {
    log::set_level(log::level_from_name(flags.log_level.value_or(level)));
    const auto& logging = config.logging_config;
    const bool keeps = logging.file && (logging.per_rank || world.rank() == 0);
    log::write_to(keeps ? log::file_of_rank(path_, world.rank()) : std::filesystem::path());
    if (world.rank() != 0) take_lock(/*is_root=*/false);
    return Json{lock_->sees_root_lock(), RunLock::this_process()};
  });
  comm::run_on_root(world, [&] {
    bool holds = true;
    std::vector<std::string> processes;
    for (const auto& rank : ranks) {
      holds = holds && rank[0].get<bool>();
      processes.push_back(rank[1]);
    }
    if (!holds) lock_->take_lease(processes);
    for (const char* name : {run_names::params, run_names::history, run_names::table, run_names::error,
                             run_names::passes, "steps_back.json", run_names::trial, run_names::sweep,
                             run_names::sweep_table, ".token", ".owner", "logs/.owner"})
      remove_unfinished(path_ / name);
    warn_of_same_run(path_, trainer);
  });
}

void RunFolder::require_not_replaced() const {
  if (!lock_) return;
  const auto doing = "writing into the run " + path_.string();
  if (lock_->is_gone())
    throw Error(ExitCode::usage, doing, "the folder was moved away or removed while the job runs",
                "Start again with the --storage and --name of the folder to go on with");
  if (lock_->is_replaced())
    throw Error(ExitCode::usage, doing, "the folder was moved away while the job runs, and another one is there",
                "Start again with the --storage and --name of the folder to go on with");
  if (lock_->is_lock_replaced())
    throw Error(ExitCode::usage, doing, "its file .lock was removed while the job runs, and another job has the run",
                "Wait for that job, or start again with another --name");
}

bool RunFolder::is_in_run_of_earlier_trainer(const std::filesystem::path& path) const {
  return std::ranges::any_of(earlier_runs_, [&](const auto& run) {
    std::error_code ignored;  // the path may not exist
    return path == run || path.parent_path() == run || std::filesystem::equivalent(path, run, ignored) ||
           std::filesystem::equivalent(path.parent_path(), run, ignored);
  });
}

void RunFolder::remove_if_unused(const Communicator& world) {
  if (log::path().parent_path() == path_ / run_names::logs) log::write_to({});
  lock_.reset();
  world.barrier();
  if (world.rank() != 0) return;
  static const std::set<std::string> files_of_every_run{run_names::params, run_names::history, run_names::table,
                                                        run_names::status, run_names::logs,    ".lock"};
  std::error_code ignored;  // files that remain do no harm
  for (const auto& entry : std::filesystem::directory_iterator(path_, ignored))
    if (!files_of_every_run.contains(entry.path().filename())) return;
  std::filesystem::remove_all(path_, ignored);
  if (made_storage_) std::filesystem::remove(path_.parent_path(), ignored);
}

void RunFolder::check_shared(const Communicator& world) const {
  if (world.topology().num_nodes == 1) return;
  const auto file = path_ / ".token";
  const auto token = comm::run_on_root(world, [&] {
    const auto value = str(std::random_device{}(), ::getpid());
    write_file(file, value);
    return value;
  });
  std::string seen = token;
  if (world.topology().local_rank == 0) {
    try {
      seen = read_file(file);
    } catch (const Error&) {
      seen.clear();
    }
  }
  const auto all = world.all_gather(seen);
  if (world.rank() == 0) std::filesystem::remove(file);
  for (std::size_t r = 0; r < all.size(); ++r)
    if (all[r] != token)
      throw Error(
          ExitCode::usage, "opening the run " + path_.string(),
          "the host " + world.topology().hosts[r] + " does not see the same folder as " + world.topology().hosts[0],
          "Choose a --storage on a file system that all nodes share");
}

void RunFolder::write_params(Json params) {
  params_ = std::move(params);
  write_file(path_ / run_names::params, json_text(params_, 2) + "\n");
}

void RunFolder::mark_finished(const Json& returned) noexcept {
  clear_error();
  try {
    params_["finished"] = true;
    // As the file will have it: bytes that are not UTF-8, and numbers that JSON does not have, are replaced.
    params_["return_value"] = json_from_text(json_text_lossy(returned));
    write_params(params_);
  } catch (const std::exception& error) {
    log::warn(
        str("training is finished, but this could not be saved, so a new start goes on from the newest checkpoint: ",
            error.what()));
  }
}

void RunFolder::restore_params(Json params) noexcept {
  if (params == params_) return;
  try {
    write_params(std::move(params));
  } catch (const std::exception& error) {
    log::warn(str("params.json could not be restored: ", error.what()));
  }
}

void RunFolder::clear_error() const noexcept {
  std::error_code ignored;  // if the file cannot be removed, the next failure replaces it
  std::filesystem::remove(path_ / run_names::error, ignored);
}

void RunFolder::write_error(const std::string& text) const noexcept {
  try {
    write_file(path_ / run_names::error, text + "\n");
    launch::tell_supervisor(launch::message_cause, path_.string());
  } catch (const std::exception& error) {
    log::warn(str("error.txt, with the cause of the failure, could not be written: ", error.what()));
  }
}

void RunFolder::write_error(const Communicator& world, const comm::RanksMissing& lost) const noexcept {
  std::this_thread::sleep_for(lost.report_delay());
  write_error(str("rank ", world.rank(), " (", world.topology().hosts[static_cast<std::size_t>(world.rank())],
                  "): ", lost.what()));
}

}  // namespace muster::detail::run
