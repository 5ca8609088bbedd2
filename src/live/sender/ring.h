/* What the two sides of a stream share: the memory between a rank of a solver and the ranks of the trainer, and the
 * messages between them. C99 and C++.
 *
 * Each rank of a solver owns a ring of equal slots. Sample number `seq` of those that were sent, counted from 0, is in
 * slot seq % slots on all ranks of the solver, and belongs to the trainer's rank live_rank_of(seq). A slot's word says
 * which sample it has, and its state. The word of the solver's rank 0 decides about the whole sample: the trainer takes
 * a sample, and the solver revokes one, by changing that word from LIVE_FULL in one atomic operation. Only then does
 * the trainer read the slots of the other ranks, and it empties them when it has copied them.
 *
 * On one node the solver passes the memory as a file descriptor without a name. A byte over the socket wakes the other
 * side, which has said that it waits; the end of the connection tells of its death.
 *
 * Between nodes a rank of the trainer has a ring of its own for each rank of the solver, into which it receives slots
 * by MPI (channel.h). It says before which sample it has room. Each of its samples before that one is answered in order
 * by its slot, or by the beginning of a slot if the solver has revoked it. */
#ifndef MUSTER_LIVE_RING_H
#define MUSTER_LIVE_RING_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "muster_live.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { LIVE_PROTOCOL = 3, LIVE_TEXT = 512, LIVE_TIMEOUT_S = 300 };

/* How many samples a rank of the trainer receives from a solver on other nodes before it needs them. */
enum { LIVE_AHEAD = 2 };

/* What a byte over a socket says: that the rank ends in order, and that rank 0 asks for weights. Others only wake. */
enum { LIVE_CLOSED = 1, LIVE_WANTED = 2 };

/* States of a slot. */
enum { LIVE_EMPTY = 0, LIVE_FULL = 1, LIVE_TAKEN = 2 };

typedef struct live_field {
  char name[MUSTER_LIVE_MAX_NAME + 1];
  int32_t type, dims;
  int64_t global[MUSTER_LIVE_MAX_DIMS], offset[MUSTER_LIVE_MAX_DIMS], local[MUSTER_LIVE_MAX_DIMS];
  int64_t at; /* bytes from the beginning of a slot to this rank's block */
} live_field;

typedef struct live_parameter {
  char name[MUSTER_LIVE_MAX_NAME + 1];
  double value;
} live_parameter;

/* What a solver's ranks must have in common. */
typedef struct live_layout {
  int32_t field_count, parameter_count;
  live_field fields[MUSTER_LIVE_MAX_FIELDS];
  live_parameter parameters[MUSTER_LIVE_MAX_FIELDS];
} live_layout;

/* What the trainer tells a solver. */
typedef struct live_told {
  int64_t next;            /* the sample to go on with; -1: not known yet */
  int64_t weights_version; /* of the newest weights, told to rank 0; 0: none */
  uint32_t stop, gone, refused;
  uint32_t accepted; /* by rank 0 of the trainer, told to rank 0; only then do the others get the ring */
  char refusal[LIVE_TEXT];
} live_told;

/* Over a socket, with a file that has the bytes. */
typedef struct live_weights {
  int64_t version, bytes;
} live_weights;

/* The beginning of the memory. */
typedef struct live_ring {
  int64_t file_bytes, slots, slot_bytes;
  int64_t words_at, trainers_at, data_at; /* bytes from the beginning of the memory */
  live_layout layout;
  /* Written by the solver's rank. */
  int64_t sent, dropped, waited_ms;
  uint32_t solver_waits;
  live_told told; /* written by the trainer */
} live_ring;

/* The beginning of a slot; the rank's block follows. */
typedef struct live_sample {
  int64_t number, sent, dropped; /* sent, dropped: by the solver so far */
  int64_t is_revoked;            /* over MPI: no block follows */
  int64_t waited_ms;             /* by the rank, for room */
  int64_t unused[3];             /* a block begins at a multiple of 64 bytes */
} live_sample;

/* The first message of a solver's rank to each rank of the trainer, and the answer. */
typedef struct live_hello {
  int32_t protocol, solver, rank, ranks;
  uint64_t id; /* of this opening, the same on all ranks */
} live_hello;

/* What solvers of other jobs know of a trainer. */
typedef struct live_contact {
  int32_t protocol, trainers;
  uint64_t node;
  char token[33], name[MUSTER_LIVE_MAX_NAME + 1];
} live_contact;

typedef struct live_welcome {
  int32_t protocol, ranks;
  char refusal[LIVE_TEXT]; /* empty if the solver is accepted */
} live_welcome;

static inline uint64_t live_word(int64_t seq, unsigned state) { return ((uint64_t)(seq + 1) << 2) | state; }
static inline int64_t live_seq(uint64_t word) { return (int64_t)(word >> 2) - 1; }
static inline unsigned live_state(uint64_t word) { return (unsigned)(word & 3); }
static inline int live_rank_of(int64_t seq, int solver, int trainers) { return (int)((seq + solver) % trainers); }

static inline uint64_t* live_word_of(live_ring* ring, int64_t seq) {
  return (uint64_t*)((char*)ring + ring->words_at) + seq % ring->slots;
}
/* For each rank of the trainer, whether it waits. */
static inline uint32_t* live_trainers(live_ring* ring) { return (uint32_t*)((char*)ring + ring->trainers_at); }
static inline live_sample* live_slot(live_ring* ring, int64_t seq) {
  return (live_sample*)((char*)ring + ring->data_at + seq % ring->slots * ring->slot_bytes);
}
static inline char* live_block(live_ring* ring, int64_t seq) { return (char*)(live_slot(ring, seq) + 1); }

/* Sets the places of a ring with these slots. */
static inline void live_place(live_ring* ring, int64_t slots, int64_t slot_bytes, int trainers) {
  const int64_t line = 64, page = 4096;
  ring->slots = slots;
  ring->slot_bytes = slot_bytes;
  ring->words_at = ((int64_t)sizeof *ring + line - 1) / line * line;
  ring->trainers_at = ring->words_at + slots * 8;
  ring->data_at = (ring->trainers_at + 4 * trainers + page - 1) / page * page;
  ring->file_bytes = ring->data_at + slots * slot_bytes;
}

static inline int64_t live_type_bytes(int type) {
  return type == MUSTER_LIVE_UINT8 ? 1 : type == MUSTER_LIVE_FLOAT32 || type == MUSTER_LIVE_INT32 ? 4 : 8;
}

static inline int64_t live_volume(int dims, const int64_t* extents) {
  int64_t volume = 1;
  for (int d = 0; d < dims; ++d) volume *= extents[d];
  return volume;
}

/* Copies past the processor's caches if there are many bytes: another core reads them next, or they are read much
 * later. Then the copy is twice as fast. */
static inline void live_copy(char* to, const char* from, size_t bytes) {
#if defined(__SSE2__)
  enum { many = 1 << 19, line = 64, unit = sizeof(__m128i) };
  if (bytes >= many) {
    const size_t head = (line - (uintptr_t)to % line) % line;
    memcpy(to, from, head);
    for (to += head, from += head, bytes -= head; bytes >= line; to += line, from += line, bytes -= line)
      for (int i = 0; i < line; i += unit)
        _mm_stream_si128((__m128i*)(to + i), _mm_loadu_si128((const __m128i*)(from + i)));
    _mm_sfence();
  }
#endif
  memcpy(to, from, bytes);
}

/* Copies a box of the extents `box` between two arrays in C order, whose extents are `from_extents` and `to_extents`.
 * `from` and `to` point to the box's first value. `bytes`: of a value. */
static inline void live_copy_box(int dims, int64_t bytes, const int64_t* box, const char* from,
                                 const int64_t* from_extents, char* to, const int64_t* to_extents) {
  if (live_volume(dims, box) == 0) return;
  while (dims > 1 && box[dims - 1] == from_extents[dims - 1] && box[dims - 1] == to_extents[dims - 1])
    bytes *= box[--dims];
  if (dims == 1) {
    live_copy(to, from, (size_t)(box[0] * bytes));
    return;
  }
  const int64_t from_step = live_volume(dims - 1, from_extents + 1) * bytes;
  const int64_t to_step = live_volume(dims - 1, to_extents + 1) * bytes;
  for (int64_t i = 0; i < box[0]; ++i)
    live_copy_box(dims - 1, bytes, box + 1, from + i * from_step, from_extents + 1, to + i * to_step, to_extents + 1);
}

struct sockaddr_un;

#ifdef __cplusplus
extern "C" {
#endif

/* Seconds since some time. */
double live_now_s(void);

/* For muster::Live, which links this library; not for programs. */

/* Ensures that this process takes part, as muster_live_open() does. `token` gets a secret of the job, 32 digits.
 * Collective over MPI_COMM_WORLD at the first call. Returns a code; `text` gets what was wrong. */
MUSTER_LIVE_API int live_join(double timeout_s, char token[33], char text[LIVE_TEXT]);
/* Makes a secret of 32 digits. False if the system has no random numbers. */
MUSTER_LIVE_API int live_make_token(char token[33]);
/* The same for processes that can share memory and sockets. */
MUSTER_LIVE_API uint64_t live_node(void);
/* Writes the file for solvers of other jobs, which only this user can read. Returns 0, or an errno. */
MUSTER_LIVE_API int live_write_contact(const char* path, const live_contact* contact);
/* Reads it. False if there is none. */
MUSTER_LIVE_API int live_read_contact(const char* path, live_contact* contact);
/* True if two ranks of MPI_COMM_WORLD can share memory and sockets. */
MUSTER_LIVE_API int live_share_node(int rank, int other);
/* The address of the trainer's rank `rank`: an abstract one, which no file system has. Returns its length. */
MUSTER_LIVE_API unsigned live_address(struct sockaddr_un* address, const char* token, const char* stream, int rank);
/* True if the process at the other end of a socket is this user's. */
MUSTER_LIVE_API int live_is_own_user(int socket);
/* What live_receive_file() gives in place of a file and of bytes. */
enum { LIVE_NO_FILE = -1, LIVE_LOST_FILE = -2, LIVE_NOTHING = -2 };
/* Sends a message of `count` bytes that passes a file. False if it cannot be sent now. */
MUSTER_LIVE_API int live_send_file(int socket, const void* bytes, size_t count, int file);
/* Receives a message. `file` gets a file that came with it, LIVE_NO_FILE, or LIVE_LOST_FILE if this process has no
 * descriptor left for it. Returns the bytes; LIVE_NOTHING: none is there now; otherwise as recv(). */
MUSTER_LIVE_API int64_t live_receive_file(int socket, void* bytes, size_t count, int* file);
MUSTER_LIVE_API int live_is_name(const char* name);

#ifdef __cplusplus
}
#endif

#endif
