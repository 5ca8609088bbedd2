#include "base/supervisor_message.hpp"
#include "launch/job_end.hpp"
#include "launch/launcher.hpp"
#include "launch/settings.hpp"
#include "muster/error.hpp"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

namespace muster::detail::launch::launch_test {
namespace {

std::string message(const std::function<void()>& action, ExitCode expected) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), expected) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no Error was thrown";
  return {};
}

const Json defaults{{"lr", 0.1}, {"epochs", 10}, {"model", {{"width", 64}, {"name", "mlp"}}}, {"free", nullptr}};

TEST(Settings, FlagsWinOverTheProgram) {
  const auto config = resolve(defaults, {}, {"lr=1", "model.width=32", "model.name=12", "free=[1,2]"});
  EXPECT_EQ(config.at("lr"), 1.0);
  EXPECT_TRUE(config.at("lr").is_number_float());
  EXPECT_EQ(config.at("model").at("width"), 32);
  EXPECT_EQ(config.at("model").at("name"), "12") << "text stays text";
  EXPECT_EQ(config.at("free").size(), 2u);
  EXPECT_EQ(config.at("epochs"), 10);
}

TEST(Settings, NameTheNearestKnownKey) {
  EXPECT_NE(message([] { resolve(defaults, {}, {"epoch=1"}); }, ExitCode::usage).find("\"epochs\""), std::string::npos);
  EXPECT_NE(message([] { resolve(defaults, {}, {"model.widht=1"}); }, ExitCode::usage).find("\"model.width\""),
            std::string::npos);
}

TEST(Settings, ListAllKeysWhereNoneIsNear) {
  const auto text = message([] { resolve(defaults, {}, {"nope=1"}); }, ExitCode::usage);
  EXPECT_NE(text.find("It has epochs, free, lr, model, model.name, model.width"), std::string::npos) << text;
  EXPECT_NE(message([] { resolve({}, {}, {"lr=1"}); }, ExitCode::usage).find("no settings at all"), std::string::npos);
}

TEST(Settings, NearestCountsEdits) {
  const std::vector<std::string> words{"NAME", "STORAGE", "TIME_LIMIT"};
  for (const auto& [word, near] : std::map<std::string, std::string>{{"NMAE", "NAME"},
                                                                     {"NAM", "NAME"},
                                                                     {"HOME", ""},
                                                                     {"STORAGES", "STORAGE"},
                                                                     {"TIMELIMIT", "TIME_LIMIT"},
                                                                     {"X", ""},
                                                                     {"", ""}})
    EXPECT_EQ(nearest_match(word, words), near) << word;
}

TEST(Settings, RefuseAnotherKind) {
  message([] { resolve(defaults, {}, {"epochs=many"}); }, ExitCode::usage);
  for (const char* value : {"1.5", "null", "1e300", "18446744073709551615", "9223372036854775808"})
    message([=] { resolve(defaults, {}, {std::string("epochs=") + value}); }, ExitCode::usage);
  for (const char* setting : {"lr=null", "model=null", "model.width=null"})
    message([=] { resolve(defaults, {}, {setting}); }, ExitCode::usage);
  EXPECT_EQ(resolve(defaults, {}, {"free=null", "epochs=1e3"}).at("epochs"), 1000);
  message([] { resolve(defaults, {}, {"lr"}); }, ExitCode::usage);
  message([] { resolve(defaults, {"/nonexistent.json"}, {}); }, ExitCode::data);
  // A name that params.json could not hold.
  const double infinite = std::numeric_limits<double>::infinity();
  for (const Json& value : std::vector<Json>{infinite, {1, -infinite}, std::nan(""), "\xff"})
    EXPECT_NE(message(
                  [&] {
                    resolve({{"model", {{"clip", value}}}}, {}, {});
                  },
                  ExitCode::usage)
                  .find("\"model.clip\" is NaN, infinite or a text that is not UTF-8"),
              std::string::npos);
}

TEST(Settings, AFileLiesBetween) {
  const std::string path = testing::TempDir() + "muster-settings.json";
  std::ofstream(path) << R"({"lr": 0.5, "epochs": 3, "model": {"width": 8}})";
  const auto config = resolve(defaults, {path}, {"epochs=4"});
  EXPECT_EQ(config.at("lr"), 0.5);
  EXPECT_EQ(config.at("epochs"), 4);
  EXPECT_EQ(config.at("model").at("name"), "mlp");
  for (const auto& [content, words] :
       std::map<std::string, std::string>{{R"({"lr": )", "line 1, column 8"},
                                          {R"({"lr": 1, "lr": 2})", "\"lr\" comes twice"},
                                          {R"({"model": {"width": 1, "width": 2}})", "\"width\" comes twice"},
                                          {"[1]", "reading the configuration " + path + ": it is not a JSON object"},
                                          {R"({"lr": null})", "\"lr\" is a number"}}) {
    std::ofstream(path) << content;
    const auto text = message([&] { resolve(defaults, {path}, {}); }, ExitCode::data);
    EXPECT_NE(text.find(words), std::string::npos) << text;
    EXPECT_EQ(text.find("exception"), std::string::npos) << text;
  }
  std::ofstream(path) << R"({"model.width": 4})";
  const auto dotted = message([&] { resolve(defaults, {path}, {}); }, ExitCode::data);
  EXPECT_NE(dotted.find("has a dot, as only --set writes it"), std::string::npos) << dotted;
  EXPECT_NE(dotted.find(R"({"model":{"width":4}})"), std::string::npos) << dotted;
  std::ofstream(path) << R"({"learning_rate": 1})";
  message([&] { resolve(defaults, {path}, {}); }, ExitCode::data);
  std::remove(path.c_str());
}

TEST(Settings, OfTwoFilesTheLaterWinsAndEachIsChecked) {
  const std::string first = testing::TempDir() + "muster-first.json",
                    second = testing::TempDir() + "muster-second.json";
  std::ofstream(first) << R"({"lr": 0.5, "model": {"width": 8, "name": "cnn"}})";
  std::ofstream(second) << R"({"epochs": 3, "model": {"width": 16}})";
  const auto config = resolve(defaults, {first, second}, {});
  EXPECT_EQ(config.at("lr"), 0.5);
  EXPECT_EQ(config.at("epochs"), 3);
  EXPECT_EQ(config.at("model"), (Json{{"width", 16}, {"name", "cnn"}}));
  std::ofstream(first) << R"({"learning_rate": 1})";
  EXPECT_NE(message([&] { resolve(defaults, {first, second}, {}); }, ExitCode::data).find(first), std::string::npos);
  for (const auto& path : {first, second}) std::remove(path.c_str());
}

TEST(Settings, ANumberThatJsonDoesNotKnowIsShownAsItDoes) {
  EXPECT_NE(message([] { resolve(defaults, {}, {"lr=.5"}); }, ExitCode::usage).find("Give it a number, as in 0.5"),
            std::string::npos);
  EXPECT_TRUE(message([] { resolve(defaults, {}, {"lr=fast"}); }, ExitCode::usage).ends_with("Give it a number"));
}

TEST(Duration, ReadsOursAndSlurms) {
  EXPECT_EQ(parse_duration("90").count(), 90);
  EXPECT_EQ(parse_duration("1h30m").count(), 5400);
  EXPECT_EQ(parse_duration("45s").count(), 45);
  EXPECT_EQ(parse_duration("02:00:01").count(), 7201);
  EXPECT_EQ(parse_duration("1-00:00:00").count(), 86400);
  EXPECT_EQ(parse_duration("02:01").count(), 121);
  EXPECT_EQ(parse_duration("1-02").count(), 26 * 3600);
  EXPECT_EQ(parse_duration("1-02:30").count(), 26 * 3600 + 1800);
  EXPECT_EQ(parse_duration("1h30m5s").count(), 5405);
  for (const char* bad :
       {"", "soon", "1x", "-5", "1:b", "9223372036854775807h", "99999999-00", "1000000000:00:00:00:00", "5s5s", "1m1h",
        "1h1h", "1h30", "1:2:3:4", "1-2:3:4:5", "1:", "1-", "h"})
    EXPECT_NE(message([=] { parse_duration(bad); }, ExitCode::usage).find("\" is not a duration"), std::string::npos);
}

TEST(Threads, AreTheShareOfTheMask) {
  EXPECT_EQ(threads_for({"11"}, 0), 2);
  EXPECT_EQ(threads_for({"11", "11"}, 1), 1);
  EXPECT_EQ(threads_for({"1111", "1111", "1111"}, 0), 1) << "4/3";
  EXPECT_EQ(threads_for({"10", "01"}, 1), 1);
  EXPECT_EQ(threads_for({"11", "11", "11", "11"}, 3), 1) << "never none";
  EXPECT_EQ(threads_for({"111111", "111111"}, 0), 3);
  EXPECT_EQ(threads_for({"11111111", "11111111"}, 0, 4), 2) << "the control group grants 4";
  EXPECT_EQ(threads_for({"11111111", "11111111"}, 0, 7.5), 3);
  EXPECT_EQ(threads_for({"11111111", "11111111"}, 0, 0.5), 1);
  EXPECT_EQ(threads_for({"1", "01"}, 0, 4), 1);
  EXPECT_TRUE(bound_below_share({"1000", "0100"}, 0, 4));
  EXPECT_FALSE(bound_below_share({"1111", "1111"}, 0, 4));
  EXPECT_FALSE(bound_below_share({"10", "01"}, 0, 2));
}

TEST(Launcher, SigtermIsARequestWhereSrunStartedTheRank) {
  std::map<std::string, std::string> variables;
  const auto environment = [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
  EXPECT_FALSE(started_by_srun(environment));
  variables = {{"SLURM_PROCID", "0"}, {"SLURM_JOB_ID", "7"}};
  EXPECT_FALSE(started_by_srun(environment)) << "a batch script's own process";
  variables["SLURM_STEP_ID"] = "0";
  EXPECT_TRUE(started_by_srun(environment));
  variables["OMPI_COMM_WORLD_SIZE"] = "2";
  EXPECT_FALSE(started_by_srun(environment)) << "mpirun has started its daemons with srun";
  variables.erase("OMPI_COMM_WORLD_SIZE");
  variables["PMI_RANK"] = "0";
  EXPECT_TRUE(started_by_srun(environment)) << "srun --mpi=pmi2";
  variables["MPI_LOCALRANKID"] = "0";
  EXPECT_FALSE(started_by_srun(environment)) << "Hydra has started its proxies with srun";
}

using Clock = std::chrono::system_clock;

TEST(JobEnd, AVariableTellsIt) {
  const auto now = Clock::from_time_t(1'700'000'000);
  for (const std::string variable : {"SLURM_JOB_END_TIME", "MUSTER_JOB_END_TIME"}) {
    const auto end = [&](const char* value) {
      return end_of_allocation([=](const char* name) { return name == variable ? value : nullptr; }, now);
    };
    EXPECT_EQ(end("1700000060"), now + std::chrono::seconds(60));
    for (const char* none : {static_cast<const char*>(nullptr), "", "soon", "0", "1699999999", "9223372036854775807",
                             "1700000060s", "2026-11-28T12:00:00"})
      EXPECT_FALSE(end(none));
  }
}

TEST(JobEnd, AVariableThatTellsNoEndIsNotIgnored) {
  const auto now = Clock::from_time_t(1'700'000'000);
  const auto warning = [&](const char* value, const std::string& variable = "MUSTER_JOB_END_TIME") {
    return job_end_warning([=](const char* name) { return name == variable ? value : nullptr; }, now);
  };
  for (const char* good : {static_cast<const char*>(nullptr), "", "1700000060", "9223372036854775807"})
    EXPECT_EQ(warning(good), "");
  for (const char* past : {"1", "3600", "1699999999", "-5"})
    EXPECT_EQ(warning(past), "MUSTER_JOB_END_TIME is in the past; the end of this job is not known");
  for (const char* wrong : {"abc", "2026-11-28T12:00:00", "1700000060s", " 1700000060", "99999999999999999999"}) try {
      warning(wrong);
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::usage);
      EXPECT_EQ(error.what(), "reading the environment: MUSTER_JOB_END_TIME=" + std::string(wrong) +
                                  " is no number of seconds. Set it to the seconds since 1970, as date +%s -d '12 "
                                  "hours' prints them, or unset it");
    }
  EXPECT_EQ(warning("soon", "SLURM_JOB_END_TIME"), "") << "no user sets it";
}

TEST(JobEnd, EachSystemIsAskedForThisJob) {
  std::map<std::string, const char*> variables;
  const Environment environment = [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(job_end_question(environment), Words());
  EXPECT_EQ(ask_for_job_end(environment).note, "");
  variables = {{"LSB_JOBID", "12"}, {"LSB_JOBINDEX", "0"}};
  EXPECT_EQ(job_end_question(environment), (Words{"bjobs", "-noheader", "-o", "time_left", "12"}));
  variables["LSB_JOBINDEX"] = "3";
  EXPECT_EQ(job_end_question(environment).back(), "12[3]");
  variables = {{"PBS_JOBID", "12[3].server"}};
  EXPECT_EQ(job_end_question(environment), (Words{"qstat", "-f", "12[3].server"}));
  variables = {{"SLURM_JOB_ID", "12"}};
  EXPECT_EQ(job_end_question(environment)[5], "12");
  variables = {{"SLURM_JOB_ID", "12"}, {"SLURM_ARRAY_JOB_ID", "12"}, {"SLURM_ARRAY_TASK_ID", "3"}};
  EXPECT_EQ(job_end_question(environment)[5], "12_3") << "12 is the whole array, too";
}

TEST(JobEnd, OfSlurm) {
  std::tm local{};
  local.tm_year = 126, local.tm_mon = 10, local.tm_mday = 7, local.tm_hour = 3, local.tm_min = 5, local.tm_isdst = -1;
  EXPECT_EQ(end_in_squeue("2026-11-07T03:05:00\n"), Clock::from_time_t(std::mktime(&local)));
  for (const char* none : {"", "N/A\n", "NONE\n", "Unknown\n", "2026-11-07T03:05:00\n2026-11-07T03:05:00\n",
                           "slurm_load_jobs error: Invalid job id specified\n", "2026-11-07"})
    EXPECT_FALSE(end_in_squeue(none)) << none;
}

TEST(JobEnd, OfPbs) {
  const auto now = Clock::from_time_t(1'800'000'000);
  std::tm local{};
  local.tm_year = 126, local.tm_mon = 10, local.tm_mday = 5, local.tm_hour = 10, local.tm_min = 7, local.tm_isdst = -1;
  const auto begin = Clock::from_time_t(std::mktime(&local));
  // OpenPBS 22
  const std::string pbs = R"(Job Id: 4711.pbs01
    Job_Name = demo
    Job_Owner = ada@login1
    resources_used.cpupercent = 196
    resources_used.cput = 00:18:42
    resources_used.walltime = 00:10:02
    job_state = R
    ctime = Thu Nov  5 10:06:51 2026
    exec_host = n1/0*2+n2/0*2
    Resource_List.select = 2:ncpus=2:mpiprocs=2
    Resource_List.walltime = 01:30:00
    stime = Thu Nov  5 10:07:00 2026
    Variable_List = PBS_O_HOME=/u/ada,PBS_O_LANG=en_US.UTF-8,
	PBS_O_WORKDIR=/u/ada/demo,PBS_O_QUEUE=workq
    project = _pbs_project_default
)";
  EXPECT_EQ(end_in_qstat(pbs, now), begin + std::chrono::minutes(90));
  // Torque 6
  EXPECT_EQ(end_in_qstat("Job Id: 12.torque\n    Resource_List.walltime = 1:12:00:00\n    start_time = Thu Nov  5 "
                         "10:07:00 2026\n    Walltime.Remaining = 129599\n",
                         now),
            begin + std::chrono::hours(36));
  EXPECT_EQ(end_in_qstat("  resources_used.walltime = 00:10:00\n  Resource_List.walltime = 01:00:00\n", now),
            now + std::chrono::minutes(50));
  for (const char* none : {"", "qstat: Unknown Job Id 4711.pbs01\n", "    stime = Thu Nov  5 10:07:00 2026\n",
                           "    Resource_List.walltime = 01:00:00\n", "    Resource_List.walltime = a while\n"})
    EXPECT_FALSE(end_in_qstat(none, now)) << none;
}

TEST(JobEnd, OfLsf) {
  const auto now = Clock::from_time_t(1'800'000'000);
  EXPECT_EQ(end_in_bjobs("1:05 L\n", now), now + std::chrono::minutes(65));
  EXPECT_EQ(end_in_bjobs("0:13\n", now), now + std::chrono::minutes(13));
  EXPECT_EQ(end_in_bjobs("120:00 L   \n", now), now + std::chrono::hours(120));
  for (const char* none : {"", "-\n", "   -    \n", "0:13 E\n", "0:02 X\n", "Job <12> is not found\n", "13 L\n"})
    EXPECT_FALSE(end_in_bjobs(none, now)) << none;
}

TEST(Launcher, IsKnownByItsVariables) {
  using Variables = std::map<std::string, const char*>;
  const auto launcher = [](const Variables& variables) {
    const auto found = started_by([&](const char* name) {
      const auto variable = variables.find(name);
      return variable == variables.end() ? nullptr : variable->second;
    });
    return !found ? "none"
                  : found->launcher + " " + std::to_string(found->number) + " of " + std::to_string(found->processes);
  };
  EXPECT_EQ(launcher({}), "none");
  EXPECT_EQ(launcher({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}), "none") << "a batch script";
  EXPECT_EQ(launcher({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}}), "none") << "srun --pty bash";
  EXPECT_EQ(launcher({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}, {"PMIX_RANK", "0"}}), "srun 0 of 1");
  EXPECT_EQ(launcher({{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "3"}}), "srun 3 of 4");
  EXPECT_EQ(launcher({{"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "7"}, {"SLURM_STEP_NUM_TASKS", "2"}}),
            "mpirun 7 of 8");
  EXPECT_EQ(launcher({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}}), "mpiexec 1 of 2");
  EXPECT_EQ(launcher({{"JSM_NAMESPACE_SIZE", "2"}, {"JSM_NAMESPACE_RANK", "1"}}), "jsrun 1 of 2");
}

TEST(Launcher, VariablesThatAProcessHasInheritedAreFound) {
  using Variables = std::map<std::string, const char*>;
  // The server of the job that is over has the port 1.
  const auto misleading = [](const Variables& variables, bool server_is_there,
                             const std::string& mpi = "Open MPI v4.1.4") {
    std::vector<std::string> names;
    for (const auto& [name, value] : variables) names.push_back(name);
    const auto environment = [&](const char* name) {
      const auto found = variables.find(name);
      return found == variables.end() ? nullptr : found->second;
    };
    return misleading_variables(names, environment, mpi,
                                [&](const std::string& uri) { return server_is_there && !uri.ends_with(":1"); });
  };
  using Names = std::vector<std::string>;
  const Variables by_mpirun{{"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_MCA_ess_base_jobid", "1"},
                            {"OMPI_MCA_orte_default_hostfile", "/etc/hosts.mpi"},
                            {"OMPI_MCA_orte_ess_num_procs", "2"},
                            {"OMPI_MCA_pml", "ob1"},
                            {"PMIX_MCA_gds", "hash"},
                            {"PMIX_RANK", "0"},
                            {"PMIX_SERVER_URI2", "1.0;tcp4://127.0.0.1:4711"}};
  EXPECT_EQ(misleading(by_mpirun, true), Names()) << "mpirun has started this process";
  EXPECT_EQ(misleading(by_mpirun, false), (Names{"OMPI_COMM_WORLD_SIZE", "OMPI_MCA_ess_base_jobid",
                                                 "OMPI_MCA_orte_ess_num_procs", "PMIX_RANK", "PMIX_SERVER_URI2"}))
      << "of a job that is over; what the user has set stays";
  auto both = by_mpirun;
  both["PMIX_SERVER_URI41"] = "1.0;tcp4://127.0.0.1:1";
  EXPECT_EQ(misleading(both, true), Names{"PMIX_SERVER_URI41"}) << "of a job that is over; mpirun has set the others";
  EXPECT_EQ(misleading(both, false).size(), 6u);
  const Variables in_pty{
      {"SLURM_JOB_ID", "12"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}};
  EXPECT_EQ(misleading(in_pty, true), (Names{"SLURM_PROCID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"}));
  EXPECT_EQ(misleading(in_pty, true, "MPICH Version: 4.0.2"), Names());
  auto step = in_pty;
  step["SLURM_STEP_NUM_TASKS"] = "4";
  EXPECT_EQ(misleading(step, true), Names()) << "an error says what is missing";
  step = in_pty;
  step["PMIX_RANK"] = "0";
  EXPECT_EQ(misleading(step, true), Names()) << "srun --mpi=pmix";
  EXPECT_EQ(misleading({{"SLURM_JOB_ID", "12"}}, true), Names());
}

TEST(StopSignal, OnlyTheRankItselfTellsThatItExits) {
  const auto style = GTEST_FLAG_GET(death_test_style);
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // the program starts anew, and
  ::setenv(supervised_variable, "1", 1);           // finds the variable when the library is loaded
  const auto leave = [](const std::string& rank_process) {
    ::setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    ::setenv(rank_process_variable, rank_process.c_str(), 1);
    std::exit(3);
  };
  EXPECT_EXIT(leave(std::to_string(::getpid())), testing::ExitedWithCode(3), "muster exit 0 3 ");
  EXPECT_EXIT(leave("1"), testing::ExitedWithCode(3), "^.muster loaded \n$")
      << "a fork, or a program that the rank has started";
  ::unsetenv(supervised_variable);
  GTEST_FLAG_SET(death_test_style, style);
}

TEST(Launcher, AServerThatIsGoneDoesNotAnswer) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const int server = ::socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(server, reinterpret_cast<const sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(server, 1), 0);
  ASSERT_EQ(::getsockname(server, reinterpret_cast<sockaddr*>(&address), &size), 0);
  const auto uri = "1234.0;tcp4://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  EXPECT_TRUE(server_answers(uri));
  ::close(server);
  EXPECT_FALSE(server_answers(uri));
  for (const char* other : {"", "1234.0", "1234.0;usock:/tmp/x", "1234.0;tcp4://n1:4711", "tcp4://"})
    EXPECT_TRUE(server_answers(other)) << other;
}

TEST(Launcher, SeparateWorldsAreToldFromAWorldOfOne) {
  std::map<std::string, const char*> variables;
  const Environment environment = [&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second;
  };
  const std::string open_mpi = "Open MPI v4.1.4", mpich = "MPICH Version: 4.0.2";
  EXPECT_FALSE(separate_worlds(environment, 1, open_mpi)) << "no launcher";
  variables = {{"SLURM_NTASKS", "4"}};
  EXPECT_FALSE(separate_worlds(environment, 1, open_mpi)) << "a plain process in a batch script";
  using Variables = std::map<std::string, const char*>;
  for (const auto& of_launcher :
       {Variables{{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "2"}, {"SLURM_STEP_NUM_TASKS", "1"}},
        Variables{{"PMI_SIZE", "4"}, {"PMI_RANK", "2"}},
        Variables{{"MV2_COMM_WORLD_SIZE", "4"}, {"MV2_COMM_WORLD_RANK", "2"}},
        Variables{{"PALS_LOCAL_SIZE", "4"}, {"PALS_RANKID", "2"}},
        Variables{{"JSM_NAMESPACE_SIZE", "4"}, {"JSM_NAMESPACE_RANK", "2"}},
        Variables{{"FLUX_JOB_SIZE", "4"}, {"FLUX_TASK_RANK", "2"}},
        Variables{{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}}}) {
    variables = of_launcher;
    const auto found = separate_worlds(environment, 1, mpich);
    ASSERT_TRUE(found) << of_launcher.begin()->first;
    EXPECT_EQ(found->fact, "the launcher started 4 processes, but each of them is alone in its MPI world");
    const auto variable = started_by(environment)->variable;
    EXPECT_TRUE(of_launcher.contains(variable) && of_launcher.at(variable) == std::string("4")) << variable;
    EXPECT_EQ(found->remedy,
              "This program uses MPICH Version: 4.0.2: start it with the mpirun of that MPI, or with srun --mpi=pmi2. "
              "If nothing was launched, unset " +
                  variable + ", which another job has left");
    EXPECT_FALSE(separate_worlds(environment, 4, mpich));
  }
  EXPECT_TRUE(separate_worlds(environment, 1, open_mpi)->remedy.find(" or with srun --mpi=pmix.") != std::string::npos);
  EXPECT_TRUE(separate_worlds(environment, 1, "MPI VERSION    : CRAY MPICH version 8.1.25.17")
                  ->remedy.find(" or with srun --mpi=cray_shasta.") != std::string::npos);
  variables = {{"FLUX_JOB_SIZE", "1"}, {"FLUX_TASK_RANK", "0"}};
  EXPECT_FALSE(separate_worlds(environment, 1, mpich));
  variables = {{"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "0"}};
  ASSERT_TRUE(srun_without_pmix(environment, open_mpi));
  EXPECT_NE(srun_without_pmix(environment, open_mpi)->remedy.find("--mpi=pmix"), std::string::npos);
  EXPECT_FALSE(srun_without_pmix(environment, mpich)) << "it may find the other tasks by PMI2";
  variables["PMIX_RANK"] = "0";
  EXPECT_FALSE(srun_without_pmix(environment, open_mpi));
}

}  // namespace
}  // namespace muster::detail::launch::launch_test
