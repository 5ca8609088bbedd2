/* Fortran has communicators as integers, whatever its module of MPI. */
#include <muster_live.h>

MUSTER_LIVE_API int live_fortran_world(MPI_Fint* part) {
  MPI_Comm comm = MPI_COMM_NULL;
  const int code = muster_live_world(&comm);
  *part = MPI_Comm_c2f(comm);
  return code;
}

MUSTER_LIVE_API int live_fortran_connect(MPI_Fint comm, const char* file, const char* name,
                                         const muster_live_options* options, muster_live** live) {
  return muster_live_connect(MPI_Comm_f2c(comm), file, name, options, live);
}

MUSTER_LIVE_API int live_fortran_open(MPI_Fint comm, const char* name, const muster_live_options* options,
                                      muster_live** live) {
  return muster_live_open(MPI_Comm_f2c(comm), name, options, live);
}
