/* The start of a job with solvers and trainers: its secret, its programs and nodes. */
#define _GNU_SOURCE

#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "live/sender/channel.h"

/* What each rank of MPI_COMM_WORLD tells the others at the start. */
struct start {
  char token[33];   /* rank 0's is the job's */
  uint32_t program; /* the same on ranks that the launcher has started with one program */
  uint64_t node;    /* the same on ranks that share memory and sockets */
};
static struct start* starts; /* of all ranks; null before the start */

double live_now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static uint64_t hash_of(uint64_t hash, const void* bytes, ssize_t count) {
  for (ssize_t i = 0; i < count; ++i) hash = (hash ^ ((const unsigned char*)bytes)[i]) * 1099511628211u;
  return hash;
}

static const uint64_t hash_seed = 14695981039346656037u;

int live_make_token(char token[33]) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return 0;
  for (size_t i = 0; i < sizeof random; ++i) snprintf(token + i * 2, 3, "%02x", random[i]);
  return 1;
}

uint64_t live_node(void) {
  uint64_t node = hash_seed;
  char text[256];
  /* Sockets without a file belong to a network namespace of a running kernel. */
  FILE* const boot = fopen("/proc/sys/kernel/random/boot_id", "r");
  if (boot != NULL) node = hash_of(node, text, (ssize_t)fread(text, 1, sizeof text, boot));
  if (boot != NULL) fclose(boot);
  struct stat network;
  if (stat("/proc/self/ns/net", &network) == 0) node = hash_of(node, &network.st_ino, sizeof network.st_ino);
  return node;
}

static int describe(struct start* mine) {
  if (!live_make_token(mine->token)) return MUSTER_LIVE_ERROR;
  mine->node = live_node();
  /* The launcher numbers its programs; where it does not, their files differ. */
  int *number = NULL, is_set = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &number, &is_set);
  char text[4096];
  mine->program = (uint32_t)hash_of(hash_seed ^ (is_set ? (uint32_t)*number : 0u), text,
                                    readlink("/proc/self/exe", text, sizeof text));
  return MUSTER_LIVE_OK;
}

/* Waits for an operation in which all ranks take part. */
static int has_ended(MPI_Request* request, double end) {
  for (;;) {
    if (live_is_over(request)) return 1;
    if (live_now_s() > end) return 0;
    nanosleep(&(struct timespec){0, 200000}, NULL);
  }
}

int live_join(double timeout_s, char token[33], char text[LIVE_TEXT]) {
  static int failed; /* operations of a first try may still be under way */
  int initialised = 0, finalised = 0, size = 0;
  if (starts == NULL) {
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    if (!initialised || finalised) {
      snprintf(text, LIVE_TEXT, "MPI is not initialised. Call MPI_Init() before, and MPI_Finalize() after it");
      return MUSTER_LIVE_ERROR;
    }
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    static struct start mine; /* MPI still uses both when the time is over */
    struct start* const all = malloc((size_t)size * sizeof *all);
    MPI_Request gathered, duplicated;
    /* Who is late in the second operation has come to the first: so all ranks succeed, or none. */
    const double grace_s = 60;
    failed = failed || all == NULL || describe(&mine) != MUSTER_LIVE_OK ||
             MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all, sizeof mine, MPI_BYTE, MPI_COMM_WORLD, &gathered) !=
                 MPI_SUCCESS ||
             !has_ended(&gathered, live_now_s() + timeout_s) ||
             MPI_Comm_idup(MPI_COMM_WORLD, &live_comm, &duplicated) != MPI_SUCCESS ||
             !has_ended(&duplicated, live_now_s() + grace_s);
    if (failed) {
      snprintf(text, LIVE_TEXT,
               "not all ranks of MPI_COMM_WORLD have come within %.0f s. Ranks that neither simulate nor train call "
               "muster_live_world(NULL)",
               timeout_s);
      return MUSTER_LIVE_ERROR;
    }
    MPI_Comm_set_errhandler(live_comm, MPI_ERRORS_RETURN);
    MPI_Type_contiguous((int)sizeof(live_sample), MPI_BYTE, &live_line);
    MPI_Type_commit(&live_line);
    starts = all;
  }
  memcpy(token, starts[0].token, sizeof starts[0].token);
  return MUSTER_LIVE_OK;
}

int live_share_node(int rank, int other) {
  const char* const test = getenv("MUSTER_TEST_LIVE"); /* of a test, the same on all ranks: "mpi" or "mixed" */
  const int is_mixed = test != NULL && strcmp(test, "mixed") == 0;
  if ((test != NULL && strcmp(test, "mpi") == 0) || (is_mixed && (rank + other) % 2 == 0)) return 0;
  return starts[rank].node == starts[other].node;
}

int muster_live_world(MPI_Comm* part) {
  char token[33], text[LIVE_TEXT];
  if (part != NULL) *part = MPI_COMM_NULL;
  const int code = live_join(LIVE_TIMEOUT_S, token, text);
  if (code != MUSTER_LIVE_OK || part == NULL) return code;
  int size = 0, rank = 0, count = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  int* const ranks = malloc((size_t)size * sizeof *ranks);
  if (ranks == NULL) return MUSTER_LIVE_ERROR;
  for (int other = 0; other < size; ++other)
    if (starts[other].program == starts[rank].program) ranks[count++] = other;
  MPI_Group all, own;
  MPI_Comm_group(MPI_COMM_WORLD, &all);
  MPI_Group_incl(all, count, ranks, &own);
  const int made = MPI_Comm_create_group(MPI_COMM_WORLD, own, 0x6d75, part);
  MPI_Group_free(&own);
  MPI_Group_free(&all);
  free(ranks);
  return made == MPI_SUCCESS ? MUSTER_LIVE_OK : MUSTER_LIVE_ERROR;
}

int live_is_name(const char* name) {
  const size_t length = name == NULL ? 0 : strlen(name);
  return length > 0 && length <= MUSTER_LIVE_MAX_NAME &&
         strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == length;
}
