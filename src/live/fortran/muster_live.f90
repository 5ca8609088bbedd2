! Training from a running simulation: the solver's side, for Fortran. Link muster::live_fortran.
!
!   use mpi_f08
!   use muster_live
!   type(muster_live_stream) :: live
!   code = muster_live_open(solvers%MPI_VAL, "heat", live)      ! with `use mpi`: solvers
!   code = muster_live_field(live, "u", MUSTER_LIVE_FLOAT64, global, offset, local)
!   do step = 0, steps - 1
!     call advance(u)
!     code = muster_live_send(live, step, [c_loc(u)])
!     if (code == MUSTER_LIVE_STOP) exit
!   end do
!   code = muster_live_close(live)
!
! muster_live.h says what the functions do, return and expect. Extents are in the order of Fortran's indices, the first
! of which varies fastest; the trainer sees them in the order of C, so its shape is the reverse. Offsets begin at 0.
module muster_live
  use, intrinsic :: iso_c_binding
  implicit none
  private

  public :: muster_live_stream, muster_live_options, muster_live_counts
  public :: muster_live_world, muster_live_open, muster_live_parameter, muster_live_field, muster_live_halo
  public :: muster_live_send, muster_live_progress, muster_live_next, muster_live_text, muster_live_close
  public :: c_loc, c_ptr, c_int64_t

  ! What a call returns.
  integer, parameter, public :: MUSTER_LIVE_OK = 0, MUSTER_LIVE_DROPPED = 1, MUSTER_LIVE_STOP = 2, &
    MUSTER_LIVE_NO_TRAINER = 3, MUSTER_LIVE_ERROR = 4
  ! The type of a field's values.
  integer, parameter, public :: MUSTER_LIVE_FLOAT32 = 0, MUSTER_LIVE_FLOAT64 = 1, MUSTER_LIVE_INT32 = 2, &
    MUSTER_LIVE_INT64 = 3, MUSTER_LIVE_UINT8 = 4
  ! What a send does when the queue is full.
  integer, parameter, public :: MUSTER_LIVE_WAIT = 0, MUSTER_LIVE_DROP_OLDEST = 1, MUSTER_LIVE_DROP_NEWEST = 2

  !> A solver's end of a stream.
  type :: muster_live_stream
    private
    type(c_ptr) :: live = c_null_ptr
  end type

  !> Zero means the default.
  type, bind(c) :: muster_live_options
    integer(c_int) :: solver = 0
    integer(c_int64_t) :: bytes = 0
    integer(c_int) :: rule = MUSTER_LIVE_WAIT
    real(c_double) :: timeout_s = 0
  end type

  type, bind(c) :: muster_live_counts
    integer(c_int64_t) :: sent = 0, dropped = 0
    real(c_double) :: wait_s = 0
  end type

  interface
    integer(c_int) function c_world(part) bind(c, name="live_fortran_world")
      import
      integer(c_int), intent(out) :: part
    end function
    integer(c_int) function c_open(comm, name, options, live) bind(c, name="live_fortran_open")
      import
      integer(c_int), value :: comm
      character(kind=c_char), intent(in) :: name(*)
      type(muster_live_options), intent(in) :: options
      type(c_ptr), intent(out) :: live
    end function
    integer(c_int) function c_parameter(live, name, number) bind(c, name="muster_live_parameter")
      import
      type(c_ptr), value :: live
      character(kind=c_char), intent(in) :: name(*)
      real(c_double), value :: number
    end function
    integer(c_int) function c_field(live, name, type, dims, global, offset, local) bind(c, name="muster_live_field")
      import
      type(c_ptr), value :: live
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int), value :: type, dims
      integer(c_int64_t), intent(in) :: global(*), offset(*), local(*)
    end function
    integer(c_int) function c_halo(live, name, before, after) bind(c, name="muster_live_halo")
      import
      type(c_ptr), value :: live
      character(kind=c_char), intent(in) :: name(*)
      integer(c_int64_t), intent(in) :: before(*), after(*)
    end function
    integer(c_int) function c_send(live, number, values) bind(c, name="muster_live_send")
      import
      type(c_ptr), value :: live
      integer(c_int64_t), value :: number
      type(c_ptr), intent(in) :: values(*)
    end function
    integer(c_int) function c_progress(live) bind(c, name="muster_live_progress")
      import
      type(c_ptr), value :: live
    end function
    integer(c_int) function c_next(live, number) bind(c, name="muster_live_next")
      import
      type(c_ptr), value :: live
      integer(c_int64_t), intent(out) :: number
    end function
    type(c_ptr) function c_text(live) bind(c, name="muster_live_text")
      import
      type(c_ptr), value :: live
    end function
    integer(c_int) function c_close(live, counts) bind(c, name="muster_live_close")
      import
      type(c_ptr), intent(inout) :: live
      type(muster_live_counts), intent(out) :: counts
    end function
    integer(c_size_t) function c_length(text) bind(c, name="strlen")
      import
      type(c_ptr), value :: text
    end function
  end interface

contains

  !> `part`: the ranks of this program, a communicator for MPI_Comm_free.
  integer function muster_live_world(part) result(code)
    integer, intent(out) :: part
    code = c_world(part)
  end function

  !> `comm`: of `use mpi`, or comm%MPI_VAL of `use mpi_f08`.
  integer function muster_live_open(comm, name, live, options) result(code)
    integer, intent(in) :: comm
    character(*), intent(in) :: name
    type(muster_live_stream), intent(out) :: live
    type(muster_live_options), intent(in), optional :: options
    if (present(options)) then
      code = c_open(comm, trim(name) // c_null_char, options, live%live)
    else
      code = c_open(comm, trim(name) // c_null_char, muster_live_options(), live%live)
    end if
  end function

  integer function muster_live_parameter(live, name, number) result(code)
    type(muster_live_stream), intent(in) :: live
    character(*), intent(in) :: name
    real(c_double), intent(in) :: number
    code = c_parameter(live%live, trim(name) // c_null_char, number)
  end function

  !> As many extents each as the array has dimensions.
  integer function muster_live_field(live, name, type, global, offset, local) result(code)
    type(muster_live_stream), intent(in) :: live
    character(*), intent(in) :: name
    integer, intent(in) :: type
    integer, intent(in) :: global(:), offset(size(global)), local(size(global))
    code = c_field(live%live, trim(name) // c_null_char, type, size(global), reversed(global), reversed(offset), &
      reversed(local))
  end function

  !> As many extents each as the array has dimensions.
  integer function muster_live_halo(live, name, before, after) result(code)
    type(muster_live_stream), intent(in) :: live
    character(*), intent(in) :: name
    integer, intent(in) :: before(:), after(size(before))
    code = c_halo(live%live, trim(name) // c_null_char, reversed(before), reversed(after))
  end function

  !> `values`: c_loc of each field's array, which is contiguous and a target.
  integer function muster_live_send(live, number, values) result(code)
    type(muster_live_stream), intent(in) :: live
    integer(c_int64_t), intent(in) :: number
    type(c_ptr), intent(in) :: values(:)
    code = c_send(live%live, number, values)
  end function

  integer function muster_live_progress(live) result(code)
    type(muster_live_stream), intent(in) :: live
    code = c_progress(live%live)
  end function

  integer function muster_live_next(live, number) result(code)
    type(muster_live_stream), intent(in) :: live
    integer(c_int64_t), intent(out) :: number
    code = c_next(live%live, number)
  end function

  function muster_live_text(live) result(text)
    type(muster_live_stream), intent(in) :: live
    character(:), allocatable :: text
    type(c_ptr) :: at
    character(kind=c_char), pointer :: letters(:)
    integer :: i
    at = c_text(live%live)
    call c_f_pointer(at, letters, [c_length(at)])
    allocate (character(size(letters)) :: text)
    do i = 1, size(letters)
      text(i:i) = letters(i)
    end do
  end function

  integer function muster_live_close(live, counts) result(code)
    type(muster_live_stream), intent(inout) :: live
    type(muster_live_counts), intent(out), optional :: counts
    type(muster_live_counts) :: all
    code = c_close(live%live, all)
    if (present(counts)) counts = all
  end function

  pure function reversed(extents)
    integer, intent(in) :: extents(:)
    integer(c_int64_t) :: reversed(size(extents))
    reversed = extents(size(extents):1:-1)
  end function

end module
