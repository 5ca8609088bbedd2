#include "muster/doctor.hpp"

#include "base/cpus.hpp"
#include "base/json.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/text.hpp"
#include "comm/mpi_scope.hpp"
#include "comm/mpi_threads.hpp"
#include "comm/timeout.hpp"
#include "doctor/checks.hpp"
#include "doctor/shared_storage.hpp"
#include "launch/launcher.hpp"
#include "launch/openmp.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

namespace muster {
namespace {

using namespace detail::doctor;
using Clock = std::chrono::steady_clock;
using Print = std::function<void(const Examination&)>;
using enum Finding::Severity;

constexpr std::chrono::seconds program_timeout{5}, mpi_timeout{20}, step_timeout{60};
/// How much longer than rank 0 the other ranks wait before they end the job, so that rank 0 can print the result first.
constexpr std::chrono::seconds rank_0_prints{5};

const char* environment(const char* name) { return std::getenv(name); }

Json run(const std::vector<std::string>& words) {
  auto end = detail::run_program(words, program_timeout);
  return end.succeeded() ? Json(std::move(end.output)) : Json();
}

void add(Findings& to, Findings more, const std::string& host) {
  for (auto& finding : more) {
    if (finding.hosts.empty()) finding.hosts = {host};
    to.push_back(std::move(finding));
  }
}

/// Returns the facts of a node, without those of its ranks.
Json look_at_node(const DoctorOptions& options) {
  return {{"libraries", look_at_libraries()},
          {"memory", look_at_memory()},
          {"cores", look_at_node_cores()},
          {"network", look_at_network()},
          {"storage", look_at_storage(options.storage)}};
}

Findings check_node(const Json& node, const std::vector<Json>& ranks, int nodes, int memory_ranks) {
  Findings findings;
  const auto append = [&](Findings more) { std::ranges::move(more, std::back_inserter(findings)); };
  append(check_libraries(node.at("libraries")));
  append(check_memory(node.at("memory"), memory_ranks));
  append(check_cores(node.at("cores"), ranks));
  append(check_storage(node.at("storage")));
  append(check_network(node.at("network"), nodes));
  return findings;
}

/// If a step does not end in time, for example because a file server does not answer, ends the process. On rank 0, it
/// first prints what is known.
class StepWatchdog {
 public:
  StepWatchdog(const Print& print, Examination examination, bool prints)
      : print_(print), examination_(std::move(examination)), prints_(prints) {}
  StepWatchdog(const StepWatchdog&) = delete;
  StepWatchdog& operator=(const StepWatchdog&) = delete;
  ~StepWatchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Call it when the next step begins.
  void begin(std::string step) {
    {
      const std::lock_guard lock(mutex_);
      step_ = std::move(step);
      until_ = Clock::now() + step_timeout + (prints_ ? std::chrono::seconds(0) : rank_0_prints);
    }
    changed_.notify_all();
  }
  /// Call it when the result was printed. If the process hangs afterwards, it is ended without another result.
  void printed() {
    const std::lock_guard lock(mutex_);
    prints_ = false;
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (Clock::now() < until_) {
        changed_.wait_until(lock, until_);
        continue;
      }
      if (prints_) {
        examination_.findings.insert(
            examination_.findings.begin(),
            {may_pass,
             "time",
             detail::str(step_, " has not ended within ", step_timeout.count(), " s"),
             "Look at the network (OMPI_MCA_btl_tcp_if_include chooses it), the nodes and the file server",
             {examination_.host}});
        print_(examination_);
      }
      std::_Exit(static_cast<int>(ExitCode::retry));
    }
  }

  const Print& print_;
  Examination examination_;
  bool prints_, over_ = false;
  std::string step_ = "the start";
  Clock::time_point until_ = Clock::now() + step_timeout;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::thread thread_{[this] { watch(); }};
};

ExitCode finish(Examination& examination, Findings findings, const Print& print) {
  examination.findings = merged(std::move(findings));
  print(examination);
  return examination.exit_code();
}

/// Returns the first line with words in it, at most 200 bytes of it. Open MPI prints lines of dashes around messages.
std::string first_words(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (line.find_first_not_of(" -=\t\r") != std::string::npos) return line.substr(line.find_first_not_of(' '), 200);
  return "it printed nothing";
}

MpiStart try_mpi_alone(const std::vector<std::string>& command) {
  using Kind = detail::ProgramEnd::Kind;
  const auto end = detail::run_program(command, mpi_timeout, /*errors=*/true);
  MpiStart start{.calls_from_threads = end.output.find("multiple") != std::string::npos};
  if (end.succeeded()) return start;
  start.may_pass = end.kind == Kind::out_of_time;
  start.problem = start.may_pass ? detail::str("it did not start here within ", mpi_timeout.count(), " s")
                                 : "it does not start here without a launcher: " + first_words(end.output);
  start.remedy =
      "Look from the nodes where you train: srun --mpi=pmix -n 2 muster doctor, or mpirun -n 2 muster doctor";
  return start;
}

ExitCode examine_alone(const DoctorOptions& options, const Print& print) {
  detail::launch::undo_openmp_binding();
  auto network = look_at_network();
  Examination examination{.host = network.at("host"), .launcher = ""};
  StepWatchdog watch(print, examination, true);
  watch.begin("starting MPI");
  const auto start = try_mpi_alone(options.start_mpi);
  watch.begin("trying the storage " + options.storage.string());
  auto node = look_at_node(options);
  watch.begin("asking Slurm");
  node["mpi"] = look_at_mpi(detail::comm::mpi_library(), environment, run);
  node["slurm"] = look_at_slurm(environment, run);
  const std::vector<Json> ranks{look_at_rank_cores(environment)};
  Findings findings;
  add(findings, check_mpi(node.at("mpi"), start), examination.host);
  add(findings, check_node(node, ranks, 1, /*as `muster run` starts*/ detail::count_usable_cores()), examination.host);
  add(findings, check_slurm(node.at("slurm"), std::chrono::system_clock::now()), examination.host);
  node["ranks"] = ranks;
  examination.facts[examination.host] = std::move(node);
  const auto code = finish(examination, std::move(findings), print);
  watch.printed();
  return code;
}

/// Reports that the launcher has started each rank alone, so that nothing else can be examined. One rank prints it.
ExitCode report_separate_worlds(const detail::launch::SeparateWorlds& worlds, Examination examination,
                                const Print& print) {
  examination.findings = {{to_mend, "MPI", worlds.fact, worlds.remedy, {examination.host}}};
  if (worlds.is_printed_here) print(examination);
  return ExitCode::missing_package;
}

/// Makes the checks in which all ranks take part together. Returns the findings on rank 0.
Findings look_together(const Communicator& world, const DoctorOptions& options, StepWatchdog& watch,
                       Examination& examination) {
  const auto& topology = world.topology();
  watch.begin("the first messages between the ranks");
  world.barrier();
  const auto clock = std::chrono::system_clock::now();
  const auto begin = Clock::now();
  const auto sum = world.all_reduce(std::int64_t{1});
  const std::chrono::duration<double, std::milli> took = Clock::now() - begin;

  watch.begin("trying the storage " + options.storage.string());
  Json own{{"cores", look_at_rank_cores(environment)}};
  if (topology.local_rank == 0) own["node"] = look_at_node(options);
  if (topology.local_rank == 0)
    own["node"]["clock_s"] = std::chrono::duration<double>(clock.time_since_epoch()).count();
  own["mpi"] = detail::comm::mpi_library();
  watch.begin("reading on all nodes what rank 0 has written");
  if (topology.num_nodes > 1) {
    auto shared = try_shared_storage(world, options.storage);
    if (own.contains("node")) own["node"]["shared_storage"] = std::move(shared);
  }
  watch.begin("gathering what the ranks have found");
  const auto all = world.all_gather(detail::json_text_lossy(own));
  if (world.rank() != 0) return {};

  Findings findings;
  std::vector<std::vector<Json>> ranks(static_cast<std::size_t>(topology.num_nodes));
  std::vector<Json> nodes(ranks.size());
  std::vector<std::string> hosts(ranks.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    const auto one = detail::json_from_text(all[r]);
    const auto node = static_cast<std::size_t>(topology.node_of_rank[r]);
    ranks[node].push_back(one.at("cores"));
    if (!one.contains("node")) continue;
    nodes[node] = one.at("node");
    nodes[node]["mpi"] = one.at("mpi");
    hosts[node] = topology.hosts[r];
  }
  std::vector<Json> compared;
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    auto& node = nodes[n];
    add(findings, check_node(node, ranks[n], topology.num_nodes, static_cast<int>(ranks[n].size())), hosts[n]);
    if (node.contains("shared_storage"))
      add(findings, check_shared_storage(node.at("shared_storage"), hosts[0]), hosts[n]);
    compared.push_back({{"host", hosts[n]},
                        {"muster", node.at("libraries").at("muster")},
                        {"libtorch", node.at("libraries").at("libtorch")},
                        {"hdf5", node.at("libraries").at("hdf5")},
                        {"mpi", node.at("mpi")},
                        {"cpu", node.at("cores").at("model")},
                        {"huge_pages", node.at("memory").at("huge_pages")},
                        {"memory_bytes", node.at("memory").at("memory_bytes")},
                        {"clock_s", node.at("clock_s")}});
    node["ranks"] = ranks[n];
  }
  for (auto& difference : check_differences(compared)) findings.push_back(std::move(difference));

  if (sum == world.size())
    findings.push_back({ok,
                        "ranks",
                        detail::counted(world.size(), "rank") + " on " + detail::counted(topology.num_nodes, "node") +
                            detail::formatted("; a sum over all of them took %.2g ms", took.count()),
                        "",
                        {hosts[0]}});

  watch.begin("asking Slurm");
  nodes[0]["mpi"] = look_at_mpi(detail::comm::mpi_library(), environment, run);
  nodes[0]["slurm"] = look_at_slurm(environment, run);
  add(findings,
      check_mpi(nodes[0]["mpi"], {.launcher = examination.launcher,
                                  .ranks = world.size(),
                                  .calls_from_threads = detail::comm::threads_may_call_mpi()}),
      hosts[0]);
  add(findings, check_slurm(nodes[0].at("slurm"), std::chrono::system_clock::now()), hosts[0]);
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    // Two nodes may have the same host name, as containers do.
    const auto name = examination.facts.contains(hosts[n]) ? detail::str(hosts[n], " (", n, ")") : hosts[n];
    examination.facts[name] = std::move(nodes[n]);
  }
  return findings;
}

ExitCode examine_ranks(const detail::launch::StartedBy& start, const DoctorOptions& options, const Print& print) {
  using detail::launch::separate_worlds, detail::launch::srun_without_pmix;
  const auto network = look_at_network();
  Examination examination{.host = network.at("host"), .launcher = start.launcher, .ranks = start.processes};
  if (const auto worlds = srun_without_pmix(environment, detail::comm::mpi_library()))
    return report_separate_worlds(*worlds, examination, print);
  auto if_it_hangs = examination;
  const char* const here = environment("OMPI_COMM_WORLD_LOCAL_SIZE");
  const int nodes = here != nullptr && std::atoi(here) == start.processes ? 1 : 2;  // 2 stands for two or more
  add(if_it_hangs.findings, check_network(network, nodes), examination.host);
  StepWatchdog watch(print, std::move(if_it_hangs), start.number == 0);
  watch.begin("starting MPI on all ranks");
  detail::log::configure(0, detail::log::Level::error);  // no warnings: the findings will say the same
  const detail::comm::MpiScope mpi;
  const auto& world = mpi.world();
  if (const auto worlds = separate_worlds(environment, world.size(), detail::comm::mpi_library()))
    return report_separate_worlds(*worlds, examination, print);
  detail::comm::set_timeout(world, step_timeout);
  examination.ranks = world.size();
  examination.nodes = world.topology().num_nodes;
  try {
    auto findings = look_together(world, options, watch, examination);
    auto code = ExitCode::done;
    if (world.rank() == 0) code = finish(examination, std::move(findings), print);
    watch.printed();
    return static_cast<ExitCode>(world.all_reduce(static_cast<std::int64_t>(code)));
  } catch (const Error& error) {
    // The ranks do not answer each other any more. So each rank exits without finalising MPI, which would wait for all.
    if (world.rank() == 0)
      finish(examination,
             {{may_pass,
               "ranks",
               error.what(),
               "Look at these nodes and at the network between them",
               {examination.host}}},
             print);
    else
      std::this_thread::sleep_for(rank_0_prints);
    std::_Exit(static_cast<int>(ExitCode::retry));
  }
}

}  // namespace

ExitCode Examination::exit_code() const {
  const auto has = [&](Finding::Severity severity) {
    return std::ranges::any_of(findings, [&](const Finding& one) { return one.severity == severity; });
  };
  return has(to_mend) ? ExitCode::missing_package : has(may_pass) ? ExitCode::retry : ExitCode::done;
}

ExitCode examine(const DoctorOptions& options, const std::function<void(const Examination&)>& print) {
  detail::launch::forget_other_launchers(detail::comm::mpi_library());
  const auto start = detail::launch::started_by(environment);
  return start ? examine_ranks(*start, options, print) : examine_alone(options, print);
}

bool start_mpi_alone() {
  const detail::comm::MpiScope mpi;
  return detail::comm::threads_may_call_mpi();
}

}  // namespace muster
