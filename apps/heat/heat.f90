! The solver of heat.c in Fortran: the heat equation on a square, whose states a network learns to predict.
!
!   mpirun -n 2 heat_fortran : -n 2 heat_train
program heat
  use mpi
  use muster_live
  implicit none
  integer, parameter :: spots = 3, steps_of_sample = 16, size_of_square = 32, halo(2) = [0, 1]
  integer(c_int64_t), parameter :: samples_of_run = 20
  real, parameter :: nu = 0.2
  real, allocatable, target :: before(:, :), now(:, :), next(:, :)  ! a rank's columns, between one of each neighbour
  integer(c_int64_t) :: sample, first, i
  integer :: solvers, rank, ranks, code, ierror, first_column, columns, left, right, extents(2)
  type(c_ptr) :: live
  type(muster_live_counts) :: counts
  logical :: is_alone

  ! 1. The solver's ranks, without those of the trainer.
  call MPI_Init(ierror)
  if (muster_live_world(solvers) /= MUSTER_LIVE_OK) call MPI_Abort(MPI_COMM_WORLD, 1, ierror)
  call MPI_Comm_rank(solvers, rank, ierror)
  call MPI_Comm_size(solvers, ranks, ierror)

  ! 2. Each has some columns of the square.
  first_column = rank * size_of_square / ranks
  columns = (rank + 1) * size_of_square / ranks - first_column
  left = merge(rank - 1, MPI_PROC_NULL, rank > 0)
  right = merge(rank + 1, MPI_PROC_NULL, rank + 1 < ranks)
  allocate (before(size_of_square, 0:columns + 1), now(size_of_square, 0:columns + 1), next(size_of_square, 0:columns + 1))

  ! 3. A sample is the square before and after some steps. The columns of the neighbours are not sent.
  code = muster_live_open(solvers, "heat", live)
  extents = [size_of_square, columns]
  ierror = muster_live_parameter(live, "nu", real(nu, kind(1d0)))
  ierror = muster_live_field(live, "before", MUSTER_LIVE_FLOAT32, [size_of_square, size_of_square], [0, first_column], extents)
  ierror = muster_live_field(live, "after", MUSTER_LIVE_FLOAT32, [size_of_square, size_of_square], [0, first_column], extents)
  ierror = muster_live_halo(live, "before", halo, halo)
  ierror = muster_live_halo(live, "after", halo, halo)

  ! 4. A run that was stopped goes on with the sample after those that the trainer has.
  first = 0
  if (code == MUSTER_LIVE_OK) code = muster_live_next(live, first)
  is_alone = code == MUSTER_LIVE_NO_TRAINER
  sample = first
  do while (merge(sample < 100, code < MUSTER_LIVE_STOP, is_alone))
    if (sample == first .or. mod(sample, samples_of_run) == 0) then
      call begin_run(int(sample / samples_of_run))
      do i = 1, mod(sample, samples_of_run) * steps_of_sample
        call advance()
      end do
    end if
    before = now
    do i = 1, steps_of_sample
      call advance()
    end do
    code = muster_live_send(live, sample, [c_loc(before), c_loc(now)])
    sample = sample + 1
  end do
  if (rank == 0 .and. len(muster_live_text(live)) > 0) print '(2a)', "heat: ", muster_live_text(live)

  ! 5. The simulation is over; samples on their way still arrive.
  code = muster_live_close(live, counts)
  if (rank == 0) print '(a, i0, a, i0, a)', "heat: ", counts%sent, " samples sent, ", counts%dropped, " dropped"
  call MPI_Comm_free(solvers, ierror)
  call MPI_Finalize(ierror)

contains

  !> Begins with some warm squares on a cold plate, the same on all ranks.
  subroutine begin_run(run)
    integer, intent(in) :: run
    integer(c_int64_t) :: state
    integer :: spot, top, corner, column
    real :: heat
    state = 12345 + 97 * run
    now = 0
    next = 0
    do spot = 1, spots
      top = int(drawn(state) * 0.7 * size_of_square)
      corner = int(drawn(state) * 0.7 * size_of_square)
      heat = 0.3 + 0.7 * drawn(state)
      do column = 1, columns
        if (first_column + column > corner .and. first_column + column <= corner + size_of_square / 4) &
          now(top + 1:top + size_of_square / 4, column) = heat
      end do
    end do
  end subroutine

  real function drawn(state)
    integer(c_int64_t), intent(inout) :: state
    state = mod(state * 1664525_c_int64_t + 1013904223_c_int64_t, 4294967296_c_int64_t)
    drawn = real(state) / 4294967296.0
  end function

  !> A step in time. The edge of the square stays cold.
  subroutine advance()
    real, allocatable :: moved(:, :)
    integer :: column
    call MPI_Sendrecv(now(:, 1), size_of_square, MPI_REAL, left, 0, now(:, columns + 1), size_of_square, MPI_REAL, &
      right, 0, solvers, MPI_STATUS_IGNORE, ierror)
    call MPI_Sendrecv(now(:, columns), size_of_square, MPI_REAL, right, 1, now(:, 0), size_of_square, MPI_REAL, &
      left, 1, solvers, MPI_STATUS_IGNORE, ierror)
    associate (n => size_of_square)
      do column = 1, columns
        if (first_column + column == 1 .or. first_column + column == n) cycle
        next(2:n - 1, column) = now(2:n - 1, column) + nu * (now(1:n - 2, column) + now(3:n, column) + &
          now(2:n - 1, column - 1) + now(2:n - 1, column + 1) - 4 * now(2:n - 1, column))
      end do
    end associate
    call move_alloc(now, moved)
    call move_alloc(next, now)
    call move_alloc(moved, next)
  end subroutine

end program
