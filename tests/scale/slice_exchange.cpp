// The transport between nodes on simulated nodes, a leader on each, beside MPI_Allreduce; see run in this folder.
//   slice_exchange BYTES
#include "comm/slice_exchange.hpp"
#include "comm/mpi_communicator.hpp"

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <numeric>
#include <vector>

using namespace muster::detail;

namespace {

/// As many pieces under way as gradients/between_nodes.cpp has.
constexpr std::size_t most_under_way = 8;

void all_reduce(const comm::Leaders& leaders, std::byte* data, std::size_t bytes) {
  constexpr std::size_t element = sizeof(float);
  const auto most = comm::slice_bytes(leaders.nodes(), 1);
  std::deque<std::unique_ptr<comm::SliceExchange>> under_way;
  std::size_t begin = 0;
  for (unsigned number = 0; begin < bytes || !under_way.empty();) {
    while (begin < bytes && under_way.size() < most_under_way) {
      const auto n = std::min(most, bytes - begin);
      const comm::SliceExchange::Slice slice{data + begin, data + begin, n / element, node::Dtype::f32};
      under_way.push_back(std::make_unique<comm::SliceExchange>(leaders, number++ % comm::SliceExchange::numbers, slice,
                                                                comm::SliceExchange::sum_of(slice, {}), nullptr));
      begin += n;
    }
    bool any = false;
    for (auto& exchange : under_way)
      if (exchange && exchange->advance(1)) exchange.reset(), any = true;
    while (!under_way.empty() && !under_way.front()) under_way.pop_front();
    if (!any && !under_way.empty()) under_way.front()->wait();
  }
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const auto bytes = static_cast<std::size_t>(std::atoll(argv[1]));
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  {
    comm::MpiCommunicator communicator(MPI_COMM_WORLD, ranks, 1);
    const comm::Leaders leaders{&communicator, ranks, rank};
    auto* const data = static_cast<float*>(SMPI_SHARED_MALLOC(bytes));
    double times[2] = {};
    const bool ours = argc < 3;
    for (int way = ours ? 0 : 1; way < 2; ++way) {
      MPI_Barrier(MPI_COMM_WORLD);
      const double begin = MPI_Wtime();
      if (way == 0)
        all_reduce(leaders, reinterpret_cast<std::byte*>(data), bytes);
      else
        MPI_Allreduce(MPI_IN_PLACE, data, static_cast<int>(bytes / sizeof(float)), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      times[way] = MPI_Wtime() - begin;
    }
    double slowest[2] = {};
    MPI_Reduce(times, slowest, 2, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) std::printf("%d %zu %.6f %.6f\n", size, bytes, slowest[0] * 1e3, slowest[1] * 1e3);
    SMPI_SHARED_FREE(data);
  }
  MPI_Finalize();
  return 0;
}
