// Runs the tests on every rank. Rank 0 prints as usual, the others only what failed, with their number.
#include "support/world.hpp"

#include "base/page_size.hpp"
#include "comm/mpi_scope.hpp"
#include "muster/mpi.hpp"
#include "support/folder.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace muster::test {
namespace {

const detail::comm::MpiScope* environment = nullptr;
std::vector<std::unique_ptr<Folder>> folders;

class FailuresOnly : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed())
      std::fprintf(stderr, "rank %d: %s:%d: %s\n", world().rank(), result.file_name(), result.line_number(),
                   result.message());
  }
};

/// Initialises MPI for one thread, as a program with its own MPI may do.
struct OwnMpi {
  OwnMpi() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
  }
  ~OwnMpi() { MPI_Finalize(); }
};

}  // namespace

const Communicator& world() { return environment->world(); }

std::filesystem::path shared_folder() {
  if (world().rank() == 0) folders.push_back(std::make_unique<Folder>());
  return world().broadcast(world().rank() == 0 ? folders.back()->path().string() : "");
}

}  // namespace muster::test

int main(int argc, char** argv) {
  std::optional<muster::test::OwnMpi> own;
  if (std::getenv("MUSTER_TEST_MPI_FUNNELED") != nullptr) own.emplace();
  if (const char* const kib = std::getenv("MUSTER_TEST_PAGE_KIB"))
    muster::detail::set_page_size(static_cast<std::size_t>(std::atoi(kib)) << 10);
  const muster::detail::comm::MpiScope environment;
  muster::test::environment = &environment;
  testing::InitGoogleTest(&argc, argv);
  if (environment.world().rank() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new muster::test::FailuresOnly);
  }
  const int status = RUN_ALL_TESTS();
  environment.world().barrier();
  muster::test::folders.clear();
  return status;
}
