/* Messages between a job's solvers and trainers by MPI, point to point. Nothing here is collective, and nothing waits.
 * C99 and C++.
 *
 * A trainer announces its stream to all other ranks of the job. A message of fixed size says who has sent it; answers
 * go to that tag. A slot goes to the tag after that of its sender, and finds a receive that was started before the
 * trainer said that it has room. So the sends of a solver end when its trainer has ended, too. */
#ifndef MUSTER_LIVE_CHANNEL_H
#define MUSTER_LIVE_CHANNEL_H

#include "live/sender/ring.h"

/* A trainer's stream. */
typedef struct live_announcement {
  char name[MUSTER_LIVE_MAX_NAME + 1];
  int32_t tag, count; /* count 0: the stream has ended */
  int32_t ranks[];    /* [count], of MPI_COMM_WORLD */
} live_announcement;

enum {
  LIVE_HELLO,     /* solver: who it is */
  LIVE_FIELD,     /* solver: one of its fields */
  LIVE_PARAMETER, /* solver: one of its parameters */
  LIVE_BEGIN,     /* solver: the bytes of its slots; all fields and parameters have been sent */
  LIVE_END,       /* solver: its counts, and the sample before which all were answered */
  LIVE_WANT,      /* solver: its rank 0 asks for weights */
  LIVE_WEIGHTS,   /* trainer: which weights follow, in the way of a slot */
  LIVE_WELCOME,   /* trainer: the answer to LIVE_HELLO; told.refusal is empty if the solver is accepted */
  LIVE_TOLD       /* trainer: what it tells, and before which sample it has room */
};

typedef struct live_message {
  int32_t kind, tag; /* tag: of the sender */
  int64_t seq;       /* LIVE_TOLD, LIVE_END: a sample; LIVE_BEGIN: bytes */
  union {
    live_hello hello;
    live_field field;
    live_parameter parameter;
    live_sample end; /* its counts */
    live_told told;
    live_weights weights;
  } of;
} live_message;

/* One end: a tag, its receive, and the messages on their way from it. */
typedef struct live_channel live_channel;

#ifdef __cplusplus
extern "C" {
#endif

/* Announces a stream to all ranks of the job but its own. */
MUSTER_LIVE_API void live_announce(const live_announcement* announcement);
/* Returns the announcement with this name, or null. It stays until the next call. */
const live_announcement* live_find_announced(const char* name);

/* `tag`: that of a trainer's announcement, 1 + 2k; 0: a new one for a solver. Null if memory is short. */
MUSTER_LIVE_API live_channel* live_channel_open(int tag);
/* Memory that MPI still uses stays. */
MUSTER_LIVE_API void live_channel_close(live_channel* channel);
MUSTER_LIVE_API int live_channel_tag(const live_channel* channel);
/* Starts a message. Returns a code. */
MUSTER_LIVE_API int live_channel_send(live_channel* channel, int rank, int tag, live_message message);
/* True if a message has come, from the rank `source`. */
MUSTER_LIVE_API int live_channel_receive(live_channel* channel, live_message* message, int* source);

/* Start to send or to receive a slot, its beginning, or weights: `bytes`, rounded up to a multiple of 64. `tag`: of the
 * sender. */
MUSTER_LIVE_API MPI_Request live_send_slot(const void* slot, int64_t bytes, int rank, int tag);
MUSTER_LIVE_API MPI_Request live_receive_slot(void* slot, int64_t bytes, int rank, int tag);
MUSTER_LIVE_API void live_cancel(MPI_Request* receive);
/* True if it is over, or has failed; then the request is null. */
MUSTER_LIVE_API int live_is_over(MPI_Request* request);

/* For world.c, which makes them: the communicator of all channels, and 64 bytes, since a slot may have more bytes than
 * an int can count. */
extern MPI_Comm live_comm;
extern MPI_Datatype live_line;

#ifdef __cplusplus
}
#endif

#endif
