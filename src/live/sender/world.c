/* The start of a job with solvers and trainers: its secret, its programs, and the addresses of its sockets. */
#define _GNU_SOURCE

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "live/sender/ring.h"

/* What each rank of MPI_COMM_WORLD tells the others at the start. */
struct start {
  char token[33];   /* rank 0's is the job's */
  uint32_t program; /* the same on ranks that the launcher has started with one program */
};
static struct start* starts; /* of all ranks; null before the start */

double live_now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int describe(struct start* mine) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) return MUSTER_LIVE_ERROR;
  for (size_t i = 0; i < sizeof random; ++i) snprintf(mine->token + i * 2, 3, "%02x", random[i]);
  /* The launcher numbers its programs; where it does not, their files differ. */
  int *number = NULL, is_set = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_APPNUM, &number, &is_set);
  char path[4096];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof path);
  mine->program = 2166136261u ^ (is_set ? (uint32_t)*number : 0u);
  for (ssize_t i = 0; i < length; ++i) mine->program = (mine->program ^ (unsigned char)path[i]) * 16777619u;
  return MUSTER_LIVE_OK;
}

int live_join(double timeout_s, char token[33], char text[LIVE_TEXT]) {
  int initialised = 0, finalised = 0, size = 0, done = 0;
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
    MPI_Request request;
    int failed = all == NULL || describe(&mine) != MUSTER_LIVE_OK ||
                 MPI_Iallgather(&mine, sizeof mine, MPI_BYTE, all, sizeof mine, MPI_BYTE, MPI_COMM_WORLD, &request) !=
                     MPI_SUCCESS;
    for (const double end = live_now_s() + timeout_s; !failed && !done;) {
      failed = MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || (!done && live_now_s() > end);
      if (!done) nanosleep(&(struct timespec){0, 200000}, NULL);
    }
    if (failed) {
      snprintf(text, LIVE_TEXT,
               "not all ranks of MPI_COMM_WORLD have come within %.0f s. Ranks that neither simulate nor train call "
               "muster_live_world(NULL)",
               timeout_s);
      return MUSTER_LIVE_ERROR;
    }
    starts = all;
  }
  memcpy(token, starts[0].token, sizeof starts[0].token);
  return MUSTER_LIVE_OK;
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

unsigned live_address(struct sockaddr_un* address, const char* token, const char* stream, int rank) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  const int length =
      snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "muster-live/%s/%s/%d", token, stream, rank);
  return (unsigned)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

int live_is_own_user(int socket) {
  struct ucred peer;
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

int live_is_name(const char* name) {
  const size_t length = name == NULL ? 0 : strlen(name);
  return length > 0 && length <= MUSTER_LIVE_MAX_NAME &&
         strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.") == length;
}
