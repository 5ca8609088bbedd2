! Training from a running simulation: the solver's side, for Fortran. Link muster::live_fortran.
!
!   use mpi_f08
!   use muster_live
!   type(c_ptr) :: live
!   code = muster_live_open(solvers%MPI_VAL, "heat", live)      ! with `use mpi`: solvers
!   code = muster_live_field(live, "u", MUSTER_LIVE_FLOAT64, global, offset, local)
!   do step = 0, steps - 1
!     call advance(u)
!     code = muster_live_send(live, step, [c_loc(u)])
!     if (code >= MUSTER_LIVE_STOP) exit
!   end do
!   code = muster_live_close(live)
!
! muster_live.h says what the functions do, return and expect. Arrays are contiguous and targets. Extents are in the order
! of Fortran's indices, the first of which varies fastest; the trainer's shape is the reverse. Offsets begin at 0.
module muster_live
  use, intrinsic :: iso_c_binding
  implicit none
  private
  public :: muster_live_options, muster_live_counts, muster_live_world, muster_live_open, muster_live_connect, &
    muster_live_parameter, &
    muster_live_field, muster_live_halo, muster_live_send, muster_live_progress, muster_live_weights, &
    muster_live_next, muster_live_text, muster_live_close, c_int64_t, c_loc, c_null_ptr, c_ptr

  ! What a call returns; the types of values; the rules of a full queue.
  integer, parameter, public :: MUSTER_LIVE_OK = 0, MUSTER_LIVE_DROPPED = 1, MUSTER_LIVE_STOP = 2, &
    MUSTER_LIVE_NO_TRAINER = 3, MUSTER_LIVE_ERROR = 4
  integer, parameter, public :: MUSTER_LIVE_FLOAT32 = 0, MUSTER_LIVE_FLOAT64 = 1, MUSTER_LIVE_INT32 = 2, &
    MUSTER_LIVE_INT64 = 3, MUSTER_LIVE_UINT8 = 4
  integer, parameter, public :: MUSTER_LIVE_WAIT = 0, MUSTER_LIVE_DROP_OLDEST = 1, MUSTER_LIVE_DROP_NEWEST = 2

  !> Zero means the default.
  type, bind(c) :: muster_live_options
    integer(c_int) :: solver = 0
    integer(c_int64_t) :: bytes = 0
    integer(c_int) :: rule = MUSTER_LIVE_WAIT
    real(c_double) :: timeout_s = 0
  end type

  type, bind(c) :: muster_live_counts
    integer(c_int64_t) :: sent, dropped
    real(c_double) :: wait_s
  end type

  interface
    !> `part`: the communicator of this program's ranks, for MPI_Comm_free.
    integer(c_int) function muster_live_world(part) bind(c, name="live_fortran_world")
      import
      integer(c_int), intent(out) :: part
    end function
    !> `values`: c_loc of each field's array.
    integer(c_int) function muster_live_send(live, number, values) bind(c)
      import
      type(c_ptr), value :: live
      integer(c_int64_t), value :: number
      type(c_ptr), intent(in) :: values(*)
    end function
    !> `buffer`: c_loc of an array of `bytes` bytes; c_null_ptr with 0 bytes only asks.
    integer(c_int) function muster_live_weights(live, version, buffer, bytes) bind(c)
      import
      type(c_ptr), value :: live, buffer
      integer(c_int64_t), intent(out) :: version
      integer(c_int64_t), intent(inout) :: bytes
    end function
    integer(c_int) function muster_live_progress(live) bind(c)
      import
      type(c_ptr), value :: live
    end function
    integer(c_int) function muster_live_next(live, number) bind(c)
      import
      type(c_ptr), value :: live
      integer(c_int64_t), intent(out) :: number
    end function
    integer(c_int) function muster_live_close(live, counts) bind(c)
      import
      type(c_ptr), intent(inout) :: live
      type(muster_live_counts), intent(out), optional :: counts
    end function

    integer(c_int) function c_open(comm, name, options, live) bind(c, name="live_fortran_open")
      import
      integer(c_int), value :: comm
      character(kind=c_char), intent(in) :: name(*)
      type(muster_live_options), intent(in), optional :: options
      type(c_ptr), intent(out) :: live
    end function
    integer(c_int) function c_connect(comm, file, name, options, live) bind(c, name="live_fortran_connect")
      import
      integer(c_int), value :: comm
      character(kind=c_char), intent(in) :: file(*), name(*)
      type(muster_live_options), intent(in), optional :: options
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
    type(c_ptr) function c_text(live) bind(c, name="muster_live_text")
      import
      type(c_ptr), value :: live
    end function
    integer(c_size_t) function c_length(text) bind(c, name="strlen")
      import
      type(c_ptr), value :: text
    end function
  end interface

contains

  !> `comm`: of `use mpi`, or comm%MPI_VAL of `use mpi_f08`.
  integer function muster_live_open(comm, name, live, options) result(code)
    integer, intent(in) :: comm
    character(*), intent(in) :: name
    type(c_ptr), intent(out) :: live
    type(muster_live_options), intent(in), optional :: options
    code = c_open(comm, trim(name) // c_null_char, options, live)
  end function

  !> `file`: the connect_file of a trainer in another job.
  integer function muster_live_connect(comm, file, name, live, options) result(code)
    integer, intent(in) :: comm
    character(*), intent(in) :: file, name
    type(c_ptr), intent(out) :: live
    type(muster_live_options), intent(in), optional :: options
    code = c_connect(comm, trim(file) // c_null_char, trim(name) // c_null_char, options, live)
  end function

  integer function muster_live_parameter(live, name, number) result(code)
    type(c_ptr), intent(in) :: live
    character(*), intent(in) :: name
    real(c_double), intent(in) :: number
    code = c_parameter(live, trim(name) // c_null_char, number)
  end function

  !> An extent for each dimension of the array.
  integer function muster_live_field(live, name, type, global, offset, local) result(code)
    type(c_ptr), intent(in) :: live
    character(*), intent(in) :: name
    integer, intent(in) :: type, global(:), offset(size(global)), local(size(global))
    code = c_field(live, trim(name) // c_null_char, type, size(global), reversed(global), reversed(offset), reversed(local))
  end function

  integer function muster_live_halo(live, name, before, after) result(code)
    type(c_ptr), intent(in) :: live
    character(*), intent(in) :: name
    integer, intent(in) :: before(:), after(size(before))
    code = c_halo(live, trim(name) // c_null_char, reversed(before), reversed(after))
  end function

  function muster_live_text(live) result(text)
    type(c_ptr), intent(in) :: live
    character(:), allocatable :: text
    character(kind=c_char), pointer :: letters(:)
    call c_f_pointer(c_text(live), letters, [c_length(c_text(live))])
    allocate (character(size(letters)) :: text)
    text = transfer(letters, text)
  end function

  pure function reversed(extents)
    integer, intent(in) :: extents(:)
    integer(c_int64_t) :: reversed(size(extents))
    reversed = extents(size(extents):1:-1)
  end function

end module
