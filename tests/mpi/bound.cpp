// Says on which CPUs the threads of a rank may run, for tests/mpi/binding:
//   rank 0: 0-1, 1 thread
// With --stay it then waits for the file FILE. With --own-mpi, the program has initialised MPI and gives the launch its
// ranks.
#include <muster/launch.hpp>
#include <muster/mpi.hpp>

#include <mpi.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>

namespace {

/// The CPUs of all threads: "0-1"; several lists if they differ.
std::string cpus_of_threads() {
  std::set<std::string> lists;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    const std::string_view name = "Cpus_allowed_list:\t";
    for (std::string line; std::getline(status, line);)
      if (line.starts_with(name)) lists.insert(line.substr(name.size()));
  }
  std::string text;
  for (const auto& list : lists) text += (text.empty() ? "" : " and ") + list;
  return text;
}

int run(muster::Launch& launch) {
  std::string stay;
  launch.app().add_option("--stay", stay);
  launch.app().add_flag("--own-mpi");
  return launch.run([&] {
    std::string later;
    std::thread([&] { later = cpus_of_threads(); }).join();
    std::ostringstream line;
    line << "rank " << launch.rank() << ": " << later << ", " << launch.threads_per_rank() << " thread\n";
    std::cout << line.str() << std::flush;
    while (!stay.empty() && !std::filesystem::exists(stay)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "--own-mpi") {
    muster::Launch launch(argc, argv);
    return run(launch);
  }
  int provided = 0, code = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  {
    muster::Launch launch(argc, argv, muster::from_mpi(MPI_COMM_WORLD));
    code = run(launch);
  }
  MPI_Finalize();
  return code;
}
