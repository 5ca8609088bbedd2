/* The heat equation on a square, whose states a network learns to predict while they are computed (train.cpp).
 *
 *   mpirun -n 2 heat : -n 2 heat_train
 *   mpirun -n 4 heat --samples 4000 --size 64 : -n 2 heat_train
 *   mpirun -n 2 heat --connect heat.live              (in a job of its own; the trainer: heat_train --connect
 * heat.live) mpirun -n 2 heat                                  (without a trainer: the simulation alone) mpirun -n 2
 * heat --samples 2000 --to heat.h5      (the same samples in a file, to compare with training from files)
 */
#include <mpi.h>
#include <muster_live.h>
#ifdef HEAT_HAS_HDF5
#include <hdf5.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPOTS = 3, STEPS_OF_SAMPLE = 16, SAMPLES_OF_RUN = 20 };

/* A rank's rows of the square, between a row of each neighbour. */
typedef struct grid {
  int size, first, rows, above, below; /* above, below: the neighbours' ranks */
  float *now, *next;                   /* [rows + 2][size] */
} grid;

/* The same random numbers on all ranks. */
static float draw(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return (float)(*state >> 8) / (float)(1 << 24);
}

/* Begins with some warm squares on a cold plate. */
static void begin_run(grid* g, int run) {
  unsigned state = 12345u + 97u * (unsigned)run;
  memset(g->now, 0, (size_t)(g->rows + 2) * (size_t)g->size * sizeof *g->now);
  memset(g->next, 0, (size_t)(g->rows + 2) * (size_t)g->size * sizeof *g->next);
  for (int spot = 0; spot < SPOTS; ++spot) {
    const int top = (int)(draw(&state) * 0.7f * (float)g->size), left = (int)(draw(&state) * 0.7f * (float)g->size);
    const float heat = 0.3f + 0.7f * draw(&state);
    for (int row = 0; row < g->rows; ++row)
      for (int col = left; col < left + g->size / 4; ++col)
        if (g->first + row >= top && g->first + row < top + g->size / 4) g->now[(row + 1) * g->size + col] = heat;
  }
}

/* A step in time. The edge of the square stays cold. */
static void advance(grid* g, float nu, MPI_Comm solvers) {
  const int n = g->size;
  MPI_Sendrecv(g->now + n, n, MPI_FLOAT, g->above, 0, g->now + (g->rows + 1) * n, n, MPI_FLOAT, g->below, 0, solvers,
               MPI_STATUS_IGNORE);
  MPI_Sendrecv(g->now + g->rows * n, n, MPI_FLOAT, g->below, 1, g->now, n, MPI_FLOAT, g->above, 1, solvers,
               MPI_STATUS_IGNORE);
  for (int row = 1; row <= g->rows; ++row) {
    const int at = g->first + row - 1;
    for (int col = 1; col < n - 1 && at > 0 && at < n - 1; ++col) {
      const float* u = g->now + row * n + col;
      g->next[row * n + col] = u[0] + nu * (u[-n] + u[n] + u[-1] + u[1] - 4 * u[0]);
    }
  }
  float* const before = g->now;
  g->now = g->next;
  g->next = before;
}

#ifdef HEAT_HAS_HDF5
/* Writes a sample's field into its data set on rank 0, which gathers the rows of all ranks. */
static void write_field(hid_t file, const char* name, hsize_t sample, hsize_t samples, const grid* g,
                        const float* values, MPI_Comm solvers) {
  int rank = 0, ranks = 1;
  MPI_Comm_rank(solvers, &rank);
  MPI_Comm_size(solvers, &ranks);
  const hsize_t n = (hsize_t)g->size, all[] = {samples, n, n}, one[] = {1, n, n}, at[] = {sample, 0, 0};
  float* const whole = rank == 0 ? malloc((size_t)(n * n) * sizeof *whole) : NULL;
  int counts[ranks], places[ranks];
  for (int r = 0; r < ranks; ++r) {
    places[r] = r * g->size / ranks * g->size;
    counts[r] = (r + 1) * g->size / ranks * g->size - places[r];
  }
  MPI_Gatherv(values + g->size, counts[rank], MPI_FLOAT, whole, counts, places, MPI_FLOAT, 0, solvers);
  if (rank != 0) return;
  const hid_t space = H5Screate_simple(3, all, NULL), memory = H5Screate_simple(3, one, NULL);
  const hid_t field = sample == 0
                          ? H5Dcreate2(file, name, H5T_NATIVE_FLOAT, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)
                          : H5Dopen2(file, name, H5P_DEFAULT);
  H5Sselect_hyperslab(space, H5S_SELECT_SET, at, NULL, one, NULL);
  if (whole == NULL || H5Dwrite(field, H5T_NATIVE_FLOAT, memory, space, H5P_DEFAULT, whole) < 0)
    MPI_Abort(MPI_COMM_WORLD, 1);
  H5Dclose(field);
  H5Sclose(memory);
  H5Sclose(space);
  free(whole);
}
#endif

static const char* text_option(int argc, char** argv, const char* name) {
  for (int i = 1; i + 1 < argc; ++i)
    if (strcmp(argv[i], name) == 0) return argv[i + 1];
  return NULL;
}

static long option(int argc, char** argv, const char* name, long otherwise) {
  const char* const text = text_option(argc, argv, name);
  return text == NULL ? otherwise : strtol(text, NULL, 10);
}

int main(int argc, char** argv) {
  /* 1. The solver's ranks, without those of the trainer. */
  MPI_Init(&argc, &argv);
  MPI_Comm solvers;
  int rank = 0, ranks = 1;
  if (muster_live_world(&solvers) != MUSTER_LIVE_OK) MPI_Abort(MPI_COMM_WORLD, 1);
  MPI_Comm_rank(solvers, &rank);
  MPI_Comm_size(solvers, &ranks);

  /* 2. Each has some rows of the square. */
  const int size = (int)option(argc, argv, "--size", 32);
  const long samples = option(argc, argv, "--samples", 1000000);
  const float nu = 0.2f;
  grid g = {size, rank * size / ranks, 0, 0, 0, NULL, NULL};
  g.rows = (rank + 1) * size / ranks - g.first;
  g.above = rank > 0 ? rank - 1 : MPI_PROC_NULL;
  g.below = rank + 1 < ranks ? rank + 1 : MPI_PROC_NULL;
  const size_t bytes = (size_t)(g.rows + 2) * (size_t)size * sizeof(float);
  float* const before = malloc(bytes);
  g.now = malloc(bytes);
  g.next = malloc(bytes);
  if (before == NULL || g.now == NULL || g.next == NULL || g.rows == 0) MPI_Abort(MPI_COMM_WORLD, 1);

  /* 3. A sample is the square before and after some steps. The rows of the neighbours are not sent. */
  muster_live* live = NULL;
  const char* const connect_file = text_option(argc, argv, "--connect");
  int code = connect_file == NULL ? muster_live_open(solvers, "heat", NULL, &live)
                                  : muster_live_connect(solvers, connect_file, "heat", NULL, &live);
  const int64_t global[] = {size, size}, offset[] = {g.first, 0}, local[] = {g.rows, size}, halo[] = {1, 0};
  muster_live_parameter(live, "nu", nu);
  muster_live_field(live, "before", MUSTER_LIVE_FLOAT32, 2, global, offset, local);
  muster_live_field(live, "after", MUSTER_LIVE_FLOAT32, 2, global, offset, local);
  muster_live_halo(live, "before", halo, halo);
  muster_live_halo(live, "after", halo, halo);

  /* 4. A run that was stopped goes on with the sample after those that the trainer has. */
  int64_t first = 0;
  if (code == MUSTER_LIVE_OK) code = muster_live_next(live, &first);
  const int needs_no_trainer = code == MUSTER_LIVE_NO_TRAINER || connect_file != NULL; /* or one that comes back */
#ifdef HEAT_HAS_HDF5
  const char* const path = text_option(argc, argv, "--to");
  const hid_t file = rank == 0 && path != NULL ? H5Fcreate(path, H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT) : -1;
  if (rank == 0 && path != NULL && file < 0) MPI_Abort(MPI_COMM_WORLD, 1);
#endif
  for (int64_t sample = first;
       sample < samples && (code < MUSTER_LIVE_STOP || (code == MUSTER_LIVE_NO_TRAINER && needs_no_trainer));
       ++sample) {
    if (sample == first || sample % SAMPLES_OF_RUN == 0) {
      begin_run(&g, (int)(sample / SAMPLES_OF_RUN));
      for (int64_t i = 0; i < sample % SAMPLES_OF_RUN * STEPS_OF_SAMPLE; ++i) advance(&g, nu, solvers);
    }
    memcpy(before, g.now, bytes);
    for (int step = 0; step < STEPS_OF_SAMPLE; ++step) advance(&g, nu, solvers);
    const void* values[] = {before, g.now};
    code = muster_live_send(live, sample, values);
#ifdef HEAT_HAS_HDF5
    if (path != NULL) {
      write_field(file, "before", (hsize_t)sample, (hsize_t)samples, &g, before, solvers);
      write_field(file, "after", (hsize_t)sample, (hsize_t)samples, &g, g.now, solvers);
    }
#endif
  }
#ifdef HEAT_HAS_HDF5
  if (file >= 0) H5Fclose(file);
#endif
  if (rank == 0 && muster_live_text(live)[0] != '\0') fprintf(stderr, "heat: %s\n", muster_live_text(live));

  /* 5. The simulation is over; samples on their way still arrive. */
  muster_live_counts counts;
  muster_live_close(&live, &counts);
  if (rank == 0)
    printf("heat: %lld samples sent, %lld dropped, %.1f s waited\n", (long long)counts.sent, (long long)counts.dropped,
           counts.wait_s);
  free(before);
  free(g.now);
  free(g.next);
  MPI_Comm_free(&solvers);
  MPI_Finalize();
  return code == MUSTER_LIVE_ERROR;
}
