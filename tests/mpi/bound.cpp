// Says on which CPUs the threads of a rank may run, for tests/mpi/binding and several-programs:
//   rank 0: 0-1, 1 thread
// With --stay it then waits for the file FILE. With --own-mpi, the program has initialised MPI and gives the launch its
// part of the ranks. With --solver, it is another program, which belongs to no part and makes no launch. With --late,
// it has initialised MPI, and makes a launch of all ranks when there is the file FILE.
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

void wait_for(const std::filesystem::path& file) {
  while (!std::filesystem::exists(file)) std::this_thread::sleep_for(std::chrono::milliseconds(20));
}

int run(muster::Launch& launch) {
  std::string stay, late;
  launch.app().add_option("--stay", stay);
  launch.app().add_option("--late", late);
  launch.app().add_flag("--own-mpi");
  return launch.run([&] {
    std::string later;
    std::thread([&] { later = cpus_of_threads(); }).join();
    std::ostringstream line;
    line << "rank " << launch.rank() << ": " << later << ", " << launch.threads_per_rank() << " thread\n";
    std::cout << line.str() << std::flush;
    if (!stay.empty()) wait_for(stay);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc < 2 ? "" : argv[1];
  if (mode != "--own-mpi" && mode != "--solver" && mode != "--late") {
    muster::Launch launch(argc, argv);
    return run(launch);
  }
  int provided = 0, code = 0, left = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  if (mode == "--late") {
    wait_for(argv[2]);
    muster::Launch launch(argc, argv);
    code = run(launch);
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &left, MPI_STATUS_IGNORE);
    if (left) std::cerr << "a message is left that the program would receive\n";
  } else {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, mode == "--solver" ? MPI_UNDEFINED : 0, 0, &part);
    if (mode == "--own-mpi") {
      muster::Launch launch(argc, argv, muster::from_mpi(part));
      code = run(launch);
    }
  }
  MPI_Finalize();
  return left ? 1 : code;
}
