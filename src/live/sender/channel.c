/* Messages by MPI. */
#define _GNU_SOURCE

#include "live/sender/channel.h"

#include <stddef.h>
#include <stdlib.h>

MPI_Comm live_comm = MPI_COMM_NULL;
MPI_Datatype live_line = MPI_DATATYPE_NULL;

/* Tags: 0 for announcements, odd ones below `solver_tags` for messages to trainers, above it to solvers. */
enum { announcements = 0, solver_tags = 16000, highest_tag = 32000 };

/* A message on its way. */
struct letter {
  struct letter* next;
  MPI_Request request;
  live_message message;
};

struct live_channel {
  int tag;
  MPI_Request receive;
  live_message received;
  struct letter* letters;
};

/* An announcement that has come. */
struct announced {
  struct announced* next;
  int source;
  live_announcement trainer;
};
static struct announced* all_announced;

static int announcement_bytes(int count) { return (int)(sizeof(live_announcement) + (size_t)count * sizeof(int32_t)); }

void live_announce(const live_announcement* announcement) {
  int size = 0, rank = 0;
  MPI_Comm_size(live_comm, &size);
  MPI_Comm_rank(live_comm, &rank);
  for (int to = 0; to < size; ++to) {
    const int bytes = announcement_bytes(announcement->count);
    struct letter* const letter = to == rank ? NULL : malloc(sizeof *letter + (size_t)bytes);
    if (letter == NULL) continue;
    memcpy(letter + 1, announcement, (size_t)bytes);
    MPI_Isend(letter + 1, bytes, MPI_BYTE, to, announcements, live_comm, &letter->request);
    if (live_is_over(&letter->request))
      free(letter);
    else
      MPI_Request_free(&letter->request); /* and its memory stays */
  }
}

const live_announcement* live_find_announced(const char* name) {
  for (;;) {
    int is_there = 0, bytes = 0;
    MPI_Status status;
    if (MPI_Iprobe(MPI_ANY_SOURCE, announcements, live_comm, &is_there, &status) != MPI_SUCCESS || !is_there) break;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    struct announced* const came = malloc(offsetof(struct announced, trainer) + (size_t)bytes);
    if (came == NULL) break;
    MPI_Recv(&came->trainer, bytes, MPI_BYTE, status.MPI_SOURCE, announcements, live_comm, MPI_STATUS_IGNORE);
    came->source = status.MPI_SOURCE;
    for (struct announced** at = &all_announced; *at != NULL;) {
      struct announced* const old = *at;
      if (old->source != came->source || old->trainer.tag != came->trainer.tag) {
        at = &old->next;
        continue;
      }
      *at = old->next;
      free(old);
    }
    came->next = all_announced;
    all_announced = came;
  }
  for (struct announced* at = all_announced; at != NULL; at = at->next)
    if (at->trainer.count > 0 && strcmp(at->trainer.name, name) == 0) return &at->trainer;
  return NULL;
}

static void receive_next(live_channel* channel) {
  MPI_Irecv(&channel->received, sizeof channel->received, MPI_BYTE, MPI_ANY_SOURCE, channel->tag, live_comm,
            &channel->receive);
}

live_channel* live_channel_open(int tag) {
  static int solvers;
  live_channel* const channel = calloc(1, sizeof *channel);
  if (channel == NULL) return NULL;
  channel->tag = tag > 0 ? tag : solver_tags + 1 + 2 * (solvers++ % ((highest_tag - solver_tags) / 2));
  receive_next(channel);
  return channel;
}

void live_channel_close(live_channel* channel) {
  if (channel == NULL) return;
  live_cancel(&channel->receive);
  while (channel->letters != NULL) {
    struct letter* const letter = channel->letters;
    channel->letters = letter->next;
    if (live_is_over(&letter->request))
      free(letter);
    else
      MPI_Request_free(&letter->request);
  }
  free(channel);
}

int live_channel_tag(const live_channel* channel) { return channel->tag; }

int live_channel_send(live_channel* channel, int rank, int tag, live_message message) {
  struct letter* const letter = malloc(sizeof *letter);
  if (letter == NULL) return MUSTER_LIVE_ERROR;
  message.tag = channel->tag;
  letter->message = message;
  if (MPI_Isend(&letter->message, sizeof letter->message, MPI_BYTE, rank, tag, live_comm, &letter->request) !=
      MPI_SUCCESS) {
    free(letter);
    return MUSTER_LIVE_ERROR;
  }
  letter->next = channel->letters;
  channel->letters = letter;
  return MUSTER_LIVE_OK;
}

int live_channel_receive(live_channel* channel, live_message* message, int* source) {
  for (struct letter** at = &channel->letters; *at != NULL;) {
    struct letter* const letter = *at;
    if (!live_is_over(&letter->request)) {
      at = &letter->next;
      continue;
    }
    *at = letter->next;
    free(letter);
  }
  int is_there = 0;
  MPI_Status status;
  if (MPI_Test(&channel->receive, &is_there, &status) != MPI_SUCCESS || !is_there) return 0;
  *message = channel->received;
  *source = status.MPI_SOURCE;
  receive_next(channel);
  return 1;
}

static int lines_of(int64_t bytes) {
  const int64_t line = sizeof(live_sample);
  return (int)((bytes + line - 1) / line);
}

MPI_Request live_send_slot(const void* slot, int64_t bytes, int rank, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Isend(slot, lines_of(bytes), live_line, rank, tag + 1, live_comm, &request);
  return request;
}

MPI_Request live_receive_slot(void* slot, int64_t bytes, int rank, int tag) {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(slot, lines_of(bytes), live_line, rank, tag + 1, live_comm, &request);
  return request;
}

void live_cancel(MPI_Request* receive) {
  MPI_Cancel(receive);
  MPI_Wait(receive, MPI_STATUS_IGNORE);
}

int live_is_over(MPI_Request* request) {
  int is_over = 0;
  if (MPI_Test(request, &is_over, MPI_STATUS_IGNORE) == MPI_SUCCESS) return is_over;
  *request = MPI_REQUEST_NULL;
  return 1;
}
