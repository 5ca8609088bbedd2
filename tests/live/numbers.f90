! A solver whose values tell their place, for numbers.cpp: u(i, j) = 100 i + j, with a halo; a rank has some columns.
program numbers
  use mpi_f08
  use muster_live
  implicit none
  integer, parameter :: rows = 3, halo(2) = [1, 2]
  type(MPI_Comm) :: solvers
  type(c_ptr) :: live
  type(muster_live_options) :: options
  type(muster_live_counts) :: counts
  real(8), allocatable, target :: u(:, :)
  integer(8) :: number
  integer :: rank, ranks, i, j, code

  call MPI_Init()
  code = muster_live_world(solvers%MPI_VAL)
  call MPI_Comm_rank(solvers, rank)
  call MPI_Comm_size(solvers, ranks)
  allocate (u(1 - halo(1):rows, 2 * rank + 1 - halo(2):2 * rank + 2))
  u = -1
  do j = 2 * rank + 1, 2 * rank + 2
    do i = 1, rows
      u(i, j) = 100 * i + j
    end do
  end do
  options%timeout_s = 60
  if (muster_live_open(solvers%MPI_VAL, "numbers", live, options) /= MUSTER_LIVE_OK) stop 2
  code = muster_live_parameter(live, "nu", 0.25d0)
  code = muster_live_field(live, "u", MUSTER_LIVE_FLOAT64, [rows, 2 * ranks], [0, 2 * rank], [rows, 2])
  code = muster_live_halo(live, "u", halo, [0, 0])
  code = muster_live_next(live, number)
  do while (code < MUSTER_LIVE_STOP)
    code = muster_live_send(live, number, [c_loc(u)])
    number = number + 1
  end do
  if (code == MUSTER_LIVE_ERROR) stop 3
  code = muster_live_close(live, counts)
  if (counts%sent /= number - 1) stop 6  ! the last one only learned of the end
  ! What is wrong is said, the same on all ranks.
  if (muster_live_open(solvers%MPI_VAL, "no name", live) /= MUSTER_LIVE_ERROR) stop 4
  if (index(muster_live_text(live), "the name is not one") == 0) stop 5
  code = muster_live_close(live)
  call MPI_Comm_free(solvers)
  call MPI_Finalize()
end program
