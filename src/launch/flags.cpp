#include "launch/flags.hpp"

#include "base/host.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/number.hpp"
#include "comm/on_ranks.hpp"
#include "launch/openmp.hpp"
#include "launch/settings.hpp"
#include "muster/version.hpp"

#include <locale.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <string_view>

namespace muster::detail::launch {
namespace {

// Each flag of muster's except --threads and --log-level gets the same value on all ranks, whether it is given on the
// command line or in the environment. The ranks must communicate for this, since launchers pass the command line to
// other hosts, but not always the environment.

/// The values of options or of environment variables, by name.
using Values = std::map<std::string, std::vector<std::string>>;

std::string pack(const Values& values) { return json_to_cbor(values); }

Values unpack(const std::string& packed) { return json_from_cbor(packed).get<Values>(); }

constexpr std::string_view variable_prefix = "MUSTER_";
constexpr const char* option_group = "muster";  ///< CLI11's group of muster's own options; their heading in the help

bool has_variable(const CLI::Option& option) { return option.get_envname().starts_with(variable_prefix); }

/// True if the option must have the same value on all ranks.
bool is_shared(const CLI::Option& option) {
  const auto name = option.get_name();
  return name == "--set" || (has_variable(option) && name != "--threads" && name != "--log-level");
}

/// The value of the option's environment variable; empty if it is not set.
std::string variable(const CLI::Option& option) { return value_of(option.get_envname()); }

/// The MUSTER_… variables of `app`'s options that are set on this rank.
Values environment_of(const CLI::App& app) {
  Values set;
  for (const auto* option : app.get_options())
    if (has_variable(*option))
      if (auto value = variable(*option); !value.empty()) set[option->get_envname()] = {std::move(value)};
  return set;
}

/// This rank's values of the shared options. Call it after app.parse(). Throws an Error if the parser did not accept an
/// environment variable.
Values shared_values(const CLI::App& app) {
  Values shared;
  for (const auto* option : app.get_options()) {
    if (const auto value = variable(*option); has_variable(*option) && option->count() == 0 && !value.empty())
      throw Error(ExitCode::usage, "reading the environment",
                  option->get_envname() + "=" + value + " is not a valid value for " + option->get_name(),
                  "Unset it, or give it a value as --help says");
    if (!is_shared(*option) || option->count() == 0) continue;
    auto& values = shared[option->get_name()] = option->results();
    if (option->get_multi_option_policy() == CLI::MultiOptionPolicy::TakeLast) values = {values.back()};
  }
  return shared;
}

/// While it lives, this thread reads numbers as C does, with a decimal point, whatever locale the program has set.
class PlainNumbers {
 public:
  PlainNumbers()
      : plain_(::newlocale(LC_NUMERIC_MASK, "C", ::duplocale(::uselocale(locale_t{})))), before_(::uselocale(plain_)) {}
  PlainNumbers(const PlainNumbers&) = delete;
  PlainNumbers& operator=(const PlainNumbers&) = delete;
  ~PlainNumbers() {
    ::uselocale(before_);
    ::freelocale(plain_);
  }

 private:
  locale_t plain_, before_;
};

/// Gives each shared option without a value on this rank the value of rank 0. Call it after app.parse().
void fill_in(CLI::App& app, const Values& of_rank_0) {
  const PlainNumbers plain;
  for (auto* option : app.get_options()) {
    const auto found = of_rank_0.find(option->get_name());
    if (!is_shared(*option) || option->count() > 0 || found == of_rank_0.end()) continue;
    option->add_result(found->second);
    option->run_callback();
  }
}

/// Throws an Error for the first option that has a value on some rank but another value, or none, on rank 0. `values`
/// and `hosts` are indexed by rank.
void require_equal(const std::vector<Values>& values, const std::vector<std::string>& hosts) {
  const auto on_rank = [&](std::size_t rank, const std::string& name) {
    std::string text;
    if (const auto found = values[rank].find(name); found == values[rank].end())
      text = " not given";
    else
      for (const auto& value : found->second) text += " " + value;
    return str(text, " on rank ", rank, " (", hosts[rank], ")");
  };
  for (std::size_t rank = 1; rank < values.size(); ++rank)
    for (const auto& [name, value] : values[rank]) {
      const auto found = values[0].find(name);
      if (found != values[0].end() && found->second == value) continue;
      throw Error(ExitCode::usage, "comparing what the ranks were given",
                  name + " is" + on_rank(rank, name) + " and" + on_rank(0, name),
                  "Give all ranks the same, by the command line or in the environment of every host");
    }
}

// Validators check the text of a value before CLI11 converts it to the flag's type; whole_number() also rewrites it.

/// Returns a validator whose error for a bad value is "VALUE is PROBLEM".
CLI::Validator check_value(const std::function<bool(std::string& value)>& is_good, const std::string& problem) {
  return {[=](std::string& value) { return is_good(value) ? "" : "\"" + value + "\" is " + problem; }, ""};
}

CLI::Validator not_empty() {
  return check_value([](const std::string& value) { return !value.empty(); }, "empty");
}

CLI::Validator yes_or_no() {
  static const std::set<std::string> words{"1", "+", "t", "true",  "y", "yes", "on",  "enable",
                                           "0", "-", "f", "false", "n", "no",  "off", "disable"};
  return check_value([](const std::string& text) { return words.contains(CLI::detail::to_lower(text)); },
                     "neither true nor false");
}

CLI::Validator whole_number(std::uint64_t least, std::uint64_t most) {
  const auto is_good = [=](std::string& text) {
    const auto value = parse_number<std::uint64_t>(text);
    if (!value || *value < least || *value > most) return false;
    text = std::to_string(*value);  // CLI11 would read 010 as octal 8
    return true;
  };
  return check_value(is_good, str("no whole number from ", least, " to ", most));
}

std::optional<double> parse_seconds(std::string_view text) {
  const auto value = parse_number<double>(text);
  return value && *value >= 0.001 && *value <= 1e9 ? value : std::nullopt;
}

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

CLI::Validator number_of_seconds() {
  return check_value([](const std::string& text) { return parse_seconds(text).has_value(); },
                     "no number of seconds from 0.001 to 1000000000");
}

/// Returns FIRST and LAST of "FIRST:LAST", and zeros for "auto"; empty for any other text.
std::optional<std::pair<std::int64_t, std::int64_t>> parse_steps(const std::string& text) {
  std::pair<std::int64_t, std::int64_t> steps{0, 0};
  if (text == "auto") return steps;
  const char* const end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, steps.first);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != ':') return {};
  const auto last = std::from_chars(first.ptr + 1, end, steps.second);
  if (last.ec != std::errc() || last.ptr != end || steps.first < 1 || steps.second < steps.first) return {};
  return steps;
}

CLI::Validator steps_of_profile() {
  return check_value([](const std::string& text) { return parse_steps(text).has_value(); },
                     "no range of steps such as 100:109, from 1 on; auto stands for the usual ones");
}

CLI::Validator duration() {
  const auto is_good = [](const std::string& text) {
    try {
      parse_duration(text);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  return check_value(is_good, "no duration such as 90, 45s, 30m, 1h30m, HH:MM:SS or D-HH:MM:SS");
}

/// CLI11's error text. If the value comes from the environment, the text names the variable and not the option.
std::string fact_of(const CLI::App& app, const CLI::ParseError& error) {
  std::string fact = error.what();
  std::replace(fact.begin(), fact.end(), '\n', ' ');
  for (const auto* option : app.get_options()) {
    const auto& name = option->get_name();
    const bool is_meant = fact.starts_with(name + ": ") || fact.starts_with("Could not convert: " + name + " = ");
    const bool is_given = std::ranges::find(app.parse_order(), option) != app.parse_order().end();
    if (is_meant && !is_given && has_variable(*option) && !variable(*option).empty())
      return fact.replace(fact.find(name), name.size(), option->get_envname());
  }
  return fact;
}

/// Throws an Error for an option such as "--name=": CLI11 would take the next word as its value.
void refuse_missing_values(int argc, char** argv) {
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i)
    if (const std::string_view word = argv[i]; word.starts_with("--") && word.find('=') == word.size() - 1)
      throw Error(ExitCode::usage, "reading the command line", str(word, " has no value"), "Give it one");
}

/// Throws an Error for a flag of muster's that is given several times, since one of the values would be ignored.
void refuse_repeated_flags(const CLI::App& app) {
  for (const auto* option : app.get_options())
    if (option->get_group() == option_group && option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll &&
        option->count() > 1)
      throw Error(ExitCode::usage, "reading the command line",
                  str(option->get_name(), " is given ", option->count(), " times"), "Give it once");
}

/// Warns of MUSTER_SET, and of each MUSTER_… variable that nothing reads and whose name is close to the variable of one
/// of `app`'s options.
void warn_of_unknown_variables(const CLI::App& app) {
  std::vector<std::string> known;
  for (const auto* option : app.get_options())
    if (has_variable(*option)) known.push_back(option->get_envname().substr(variable_prefix.size()));
  for (const auto& name : variable_names(variable_prefix)) {
    const auto word = name.substr(variable_prefix.size());
    if (word == "SET") log::warn("nothing reads the variable " + name + "; give --set on the command line");
    const auto close = nearest_match(word, known);
    if (!close.empty() && close != word)
      log::warn(str("nothing reads the variable ", name, "; did you mean ", variable_prefix, close, "?"));
  }
}

}  // namespace

std::optional<std::chrono::milliseconds> timeout_at_start(int argc, const char* const* argv) {
  constexpr std::string_view flag = "--timeout", flag_and_value = "--timeout=";
  const char* const variable = std::getenv("MUSTER_TIMEOUT");
  std::string_view value = variable == nullptr ? "" : variable;
  for (int i = 1; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    const std::string_view word = argv[i];
    if (word == flag && i + 1 < argc) value = argv[i + 1];
    if (word.starts_with(flag_and_value)) value = word.substr(flag_and_value.size());
  }
  const auto seconds = parse_seconds(value);
  return seconds ? std::optional(milliseconds_of(*seconds)) : std::nullopt;
}

Flags::Flags(int argc, char** argv, const std::string& version)
    : argc_(argc), argv_(argv), program_(std::filesystem::path(argv[0]).filename()) {
  app.name(program_);
  app.set_version_flag("--version",
                       program_ + " " + (version.empty() ? "" : version + ", ") + "muster " MUSTER_VERSION);
  const auto option = [this](const char* name, auto& value, const char* help) {
    std::string variable(variable_prefix);
    for (const char* c = name + 2; *c != '\0'; ++c)
      variable += *c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(*c)));
    return app.add_option(name, value, help)->envname(variable)->group(option_group)->take_last()->check(not_empty());
  };
  option("--storage", storage_, "Folder of the runs, on a file system that all\nnodes share [runs]");
  option("--name", name_, "The run's name [program and Slurm job id, or\nprogram and time]");
  const auto list = [this](const char* name, auto& values, const char* help) {
    return app.add_option(name, values, help)
        ->group(option_group)
        ->type_size(1)
        ->take_all()
        ->allow_extra_args(false);  // it takes one word as its value, not all that follow
  };
  list("--config", config_, "JSON file with settings of the program;\nrepeatable, the later one wins")
      ->envname("MUSTER_CONFIG")
      ->check(not_empty());
  list("--set", set_, "One setting, as in --set lr=0.01; repeatable");
  option("--resume", resume_, "auto, never, must, or the path of a checkpoint or\nrun [auto]");
  option("--seed", seed_, "Seed of the weights and of the order of the\ndata [the run's, at first 0]")
      ->transform(whole_number(0, std::numeric_limits<std::uint64_t>::max()));
  option("--workers", workers_, "Ranks that train [all]")->transform(whole_number(1, std::numeric_limits<int>::max()));
  option("--threads", threads_, "Threads of torch per rank [its share of the CPUs]")
      ->transform(whole_number(1, most_threads));
  option("--bind", bind_, "cores: each rank gets cores of its own;\nauto: if it gets two or more; or none [auto]")
      ->check(CLI::IsMember({"auto", "cores", "none"}));
  option("--backend", backend_, "auto, mpi, gloo, nccl, or by device:\ncpu:mpi,cuda:nccl [auto]");
  option("--timeout", timeout_, "Seconds that ranks wait for each other before\nthe job ends [1800]")
      ->check(number_of_seconds());
  option("--time-limit", time_limit_, "Save and stop within that time, as in 1h30m\n[that of the batch job]")
      ->check(duration());
  option("--progress", progress_, "auto, bar, plain or none [auto]")
      ->check(CLI::IsMember({"auto", "bar", "plain", "none"}));
  app.add_flag("--tensorboard", tensorboard_, "Write files for TensorBoard to the run's folder")
      ->envname("MUSTER_TENSORBOARD")
      ->group(option_group)
      ->check(yes_or_no());
  app.add_flag("--profile{auto}", profile_,
               "Write a trace of some steps, as in\n--profile=100:109; auto: the 11th to the 20th")
      ->envname("MUSTER_PROFILE")
      ->group(option_group)
      ->take_last()
      ->check(steps_of_profile());
  app.add_flag("--profile-operators", profile_operators_, "Write a trace with libtorch's operators, too")
      ->envname("MUSTER_PROFILE_OPERATORS")
      ->group(option_group)
      ->check(yes_or_no());
  option("--log-level", log_level_, "trace, debug, info, warn, error or off [info]");
}

std::string Flags::read() {
  const PlainNumbers plain;
  refuse_missing_values(argc_, argv_);
  try {
    app.parse(argc_, argv_);
    refuse_repeated_flags(app);
    return pack(shared_values(app));
  } catch (const CLI::ParseError& error) {
    std::ostringstream out, problem;
    help_.reset();
    if (app.exit(error, out, problem) == 0) {
      help_ = out.str();
      return pack({});
    }
    throw Error(ExitCode::usage, "reading the command line", fact_of(app, error),
                app.get_name() + " --help lists the flags");
  }
}

bool Flags::parse(const Communicator& world) {
  const auto here = environment_of(app);
  for (const auto& [name, of_rank_0] : unpack(world.broadcast(pack(here))))
    if (!here.contains(name)) ::setenv(name.c_str(), of_rank_0.front().c_str(), 1);
  std::vector<Values> values;
  for (const auto& packed : comm::run_on_all(world, [&] { return read(); })) values.push_back(unpack(packed));
  if (world.all_reduce(std::int64_t{help_.has_value()}, ReduceOp::max) != 0) {
    if (world.rank() == 0 && help_) std::cout << *help_ << std::flush;
    return false;
  }
  require_equal(values, world.topology().hosts);
  fill_in(app, values[0]);
  return true;
}

LaunchFlags Flags::resolve() const {
  warn_of_unknown_variables(app);
  LaunchFlags flags;
  flags.set = set_;
  flags.seed = seed_;
  flags.has_seed = app.count("--seed") > 0;
  if (!storage_.empty()) flags.storage = storage_;
  if (!name_.empty()) flags.name = name_;
  flags.config_files = {config_.begin(), config_.end()};
  if (!backend_.empty()) flags.backend = backend_;
  if (workers_ > 0) flags.workers = workers_;
  if (threads_ > 0) flags.threads = threads_;
  flags.bind = bind_ == "auto" ? Bind::automatic : bind_ == "cores" ? Bind::cores : Bind::none;
  if (timeout_ > 0) flags.timeout = milliseconds_of(timeout_);
  if (!time_limit_.empty()) flags.time_limit = parse_duration(time_limit_);
  static const std::map<std::string, Resume> resumes{
      {"auto", Resume::automatic}, {"never", Resume::never}, {"must", Resume::must}};
  const auto resume = resumes.find(resume_);
  flags.resume = resume == resumes.end() ? Resume::path : resume->second;
  if (flags.resume == Resume::path) flags.resume_path = resume_;
  static const std::map<std::string, Progress> modes{
      {"auto", Progress::automatic}, {"bar", Progress::bar}, {"plain", Progress::plain}, {"none", Progress::none}};
  flags.progress = modes.at(progress_);
  flags.tensorboard = tensorboard_;
  if (!profile_.empty()) flags.profile = parse_steps(profile_);
  flags.profile_operators = profile_operators_;
  if (app.get_option("--log-level")->count() > 0) flags.log_level = log_level_;
  return flags;
}

}  // namespace muster::detail::launch
