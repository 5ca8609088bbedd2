// mpirun -n 3 ./simulation
#include <muster/mpi.hpp>

#include <iostream>

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm half;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  {
    const auto ranks = muster::from_mpi(half);
    const auto sum = ranks.all_reduce(std::int64_t{rank}, muster::ReduceOp::sum);
    if (rank == 0) std::cout << "the even ones of 3 add up to " << sum << std::endl;
  }
  MPI_Comm_free(&half);
  MPI_Finalize();
}
