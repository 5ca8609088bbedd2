/* The solver's side of a stream. */
#define _GNU_SOURCE

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "live/sender/ring.h"

struct muster_live {
  int code; /* what every call returns: OK while the stream is open */
  char name[MUSTER_LIVE_MAX_NAME + 1];
  muster_live_options options;
  MPI_Comm comm;
  int rank, ranks, trainers;
  int* sockets; /* to each rank of the trainer; -1: none */
  live_layout layout;
  int64_t before[MUSTER_LIVE_MAX_FIELDS][MUSTER_LIVE_MAX_DIMS];  /* halos */
  int64_t extents[MUSTER_LIVE_MAX_FIELDS][MUSTER_LIVE_MAX_DIMS]; /* of this rank's arrays, halos included */
  live_ring* ring;                                               /* null before the first sample */
  int64_t seq, last_number, sent, dropped;
  double wait_s;
  char text[LIVE_TEXT];
};

/* Keeps the first error of this rank. Its text: fact, then remedy. */
static int fail(muster_live* live, const char* format, ...) {
  if (live->text[0] == '\0') {
    const int length = snprintf(live->text, LIVE_TEXT, "live stream \"%s\": ", live->name);
    va_list values;
    va_start(values, format);
    vsnprintf(live->text + length, (size_t)(LIVE_TEXT - length), format, values);
    va_end(values);
  }
  return MUSTER_LIVE_ERROR;
}

/* The same where no trainer is there. */
static int no_trainer(muster_live* live, const char* fact) {
  fail(live, "%s. Start it on this node with a muster::Live of this name, as in mpirun -n 6 ./solver : -n 2 ./trainer",
       fact);
  return MUSTER_LIVE_NO_TRAINER;
}
static int gone(muster_live* live) { return no_trainer(live, "the trainer has ended"); }

static void disconnect(muster_live* live) {
  for (int j = 0; j < live->trainers; ++j)
    if (live->sockets[j] >= 0) close(live->sockets[j]);
  free(live->sockets);
  live->sockets = NULL;
  live->trainers = 0;
  if (live->ring != NULL) munmap(live->ring, (size_t)live->ring->file_bytes);
  live->ring = NULL;
}

/* Ends the stream, on all ranks, with the highest code that a rank has. The text is that of the lowest rank that has
 * this code. Collective. */
static int agree(muster_live* live, int code) {
  struct {
    int code, rank;
  } mine = {code, live->rank}, worst = {code, live->rank};
  if (MPI_Allreduce(&mine, &worst, 1, MPI_2INT, MPI_MAXLOC, live->comm) != MPI_SUCCESS)
    worst.code = fail(live, "MPI_Allreduce() has failed. See what MPI says");
  else if (worst.code != MUSTER_LIVE_OK)
    MPI_Bcast(live->text, LIVE_TEXT, MPI_CHAR, worst.rank, live->comm);
  live->code = worst.code;
  if (worst.code != MUSTER_LIVE_OK) disconnect(live);
  return worst.code;
}

/* Connects to a rank of the trainer. Until `end` it tries again where nobody listens. Returns the socket, or -1. */
static int connect_to(muster_live* live, const char* token, int trainer, uint64_t id, double end, int* trainers) {
  struct sockaddr_un address;
  const socklen_t bytes = live_address(&address, token, live->name, trainer);
  for (;;) {
    const int own = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (own < 0) {
      fail(live, "no socket can be made: %s. Raise the limit on open files", strerror(errno));
      return -1;
    }
    const live_hello hello = {LIVE_PROTOCOL, live->options.solver, live->rank, live->ranks, id};
    live_welcome welcome;
    memset(&welcome, 0, sizeof welcome);
    if (connect(own, (const struct sockaddr*)&address, bytes) == 0 && live_is_own_user(own) &&
        send(own, &hello, sizeof hello, MSG_NOSIGNAL) == (ssize_t)sizeof hello) {
      struct pollfd ready = {own, POLLIN, 0};
      const double left = end - live_now_s();
      if (poll(&ready, 1, left > 0 ? (int)(left * 1000) : 0) > 0 &&
          recv(own, &welcome, sizeof welcome, 0) == (ssize_t)sizeof welcome) {
        if (welcome.refusal[0] != '\0' || welcome.protocol != LIVE_PROTOCOL) {
          fail(live, "%s",
               welcome.refusal[0] != '\0' ? welcome.refusal
                                          : "the trainer has another version of muster. Build both with the same");
          close(own);
          return -1;
        }
        *trainers = welcome.ranks;
        return own;
      }
    }
    close(own);
    if (live_now_s() > end) return -1;
    nanosleep(&(struct timespec){0, 5000000}, NULL);
  }
}

static int connect_to_all(muster_live* live, const char* token, uint64_t id) {
  const double end = live_now_s() + live->options.timeout_s;
  int trainers = 0;
  const int first = connect_to(live, token, 0, id, end, &trainers);
  if (first < 0) return live->text[0] != '\0' ? MUSTER_LIVE_ERROR : no_trainer(live, "no trainer has come in time");
  live->sockets = malloc((size_t)trainers * sizeof *live->sockets);
  if (live->sockets == NULL) {
    close(first);
    return fail(live, "there is not enough memory. Free some");
  }
  live->sockets[0] = first;
  for (live->trainers = 1; live->trainers < trainers; ++live->trainers) {
    const int other = connect_to(live, token, live->trainers, id, end, &trainers);
    if (other < 0)
      return fail(live, "the trainer's rank %d does not answer on this node. Start solver and trainer on one node",
                  live->trainers);
    live->sockets[live->trainers] = other;
  }
  return MUSTER_LIVE_OK;
}

static int check_options(muster_live* live, const muster_live_options* options) {
  if (options != NULL) live->options = *options;
  if (live->options.bytes == 0) live->options.bytes = (int64_t)64 << 20;
  if (live->options.timeout_s == 0) live->options.timeout_s = LIVE_TIMEOUT_S;
  if (live->options.solver < 0 || live->options.bytes < 0 || !(live->options.timeout_s > 0))
    return fail(live, "an option is negative. Give numbers from 0 on");
  if (live->options.rule < MUSTER_LIVE_WAIT || live->options.rule > MUSTER_LIVE_DROP_NEWEST)
    return fail(live, "there is no rule %d. Give MUSTER_LIVE_WAIT, DROP_OLDEST or DROP_NEWEST", live->options.rule);
  return MUSTER_LIVE_OK;
}

/* A launcher passes the request to save and stop on to all ranks. The solver must outlive the trainer's last save. */
static void outlive_stop_requests(void) {
  static const int requests[] = {SIGUSR1, SIGUSR2};
  for (size_t i = 0; i < sizeof requests / sizeof *requests; ++i) {
    struct sigaction action;
    if (sigaction(requests[i], NULL, &action) != 0 || action.sa_handler != SIG_DFL) continue;
    action.sa_handler = SIG_IGN;
    sigaction(requests[i], &action, NULL);
  }
}

int muster_live_open(MPI_Comm comm, const char* name, const muster_live_options* options, muster_live** opened) {
  muster_live* const live = calloc(1, sizeof *live);
  *opened = live;
  if (live == NULL) return MUSTER_LIVE_ERROR;
  live->comm = MPI_COMM_NULL;
  outlive_stop_requests();
  live->last_number = -1;
  int code = check_options(live, options), world = 0;
  if (!live_is_name(name))
    code = fail(live, "the name is not one. Give up to %d letters, digits, '-', '_' and '.'", MUSTER_LIVE_MAX_NAME);
  else
    memcpy(live->name, name, strlen(name) + 1);
  char token[33], text[LIVE_TEXT];
  const int joined = live_join(live->options.timeout_s, token, text);
  if (joined != MUSTER_LIVE_OK) {
    live->code = fail(live, "%s", text); /* the others time out, too */
    return live->code;
  }
  if (MPI_Comm_dup(comm, &live->comm) != MPI_SUCCESS) {
    live->code = fail(live, "its communicator cannot be duplicated. Give one of the solver's ranks");
    return live->code;
  }
  MPI_Comm_set_errhandler(live->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(live->comm, &live->rank);
  MPI_Comm_size(live->comm, &live->ranks);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;
  if (live->ranks == world) return live->code = no_trainer(live, "no rank of the job is left for a trainer");

  /* Rank 0 waits for the trainer, and the others connect when it is there. */
  uint64_t id = 0;
  if (live->rank == 0 && getrandom(&id, sizeof id, 0) < 0) id = (uint64_t)getpid();
  MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, live->comm);
  if (live->rank == 0) code = connect_to_all(live, token, id);
  MPI_Bcast(&code, 1, MPI_INT, 0, live->comm);
  if (live->rank != 0 && code == MUSTER_LIVE_OK) code = connect_to_all(live, token, id);
  return agree(live, code);
}

/* Finds what is wrong with a name that is declared. */
static int check_name(muster_live* live, const char* name) {
  if (live->ring != NULL) return fail(live, "\"%s\" is declared after the first sample. Declare it before", name);
  if (!live_is_name(name) || strcmp(name, "sample") == 0)
    return fail(live, "a column cannot have the name \"%.60s\". Give up to %d letters, digits, '-', '_' and '.'", name,
                MUSTER_LIVE_MAX_NAME);
  const live_layout* const all = &live->layout;
  for (int f = 0; f < all->field_count; ++f)
    if (strcmp(all->fields[f].name, name) == 0) return fail(live, "\"%s\" is declared twice. Declare it once", name);
  for (int p = 0; p < all->parameter_count; ++p)
    if (strcmp(all->parameters[p].name, name) == 0)
      return fail(live, "\"%s\" is declared twice. Declare it once", name);
  if (all->field_count == MUSTER_LIVE_MAX_FIELDS || all->parameter_count == MUSTER_LIVE_MAX_FIELDS)
    return fail(live, "there are more than %d fields or parameters. Put values together", MUSTER_LIVE_MAX_FIELDS);
  return MUSTER_LIVE_OK;
}

int muster_live_parameter(muster_live* live, const char* name, double value) {
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (check_name(live, name) != MUSTER_LIVE_OK) return MUSTER_LIVE_ERROR;
  live_parameter* const parameter = &live->layout.parameters[live->layout.parameter_count++];
  memcpy(parameter->name, name, strlen(name) + 1);
  parameter->value = value;
  return MUSTER_LIVE_OK;
}

int muster_live_field(muster_live* live, const char* name, int type, int dims, const int64_t* global,
                      const int64_t* offset, const int64_t* local) {
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (check_name(live, name) != MUSTER_LIVE_OK) return MUSTER_LIVE_ERROR;
  if (type < MUSTER_LIVE_FLOAT32 || type > MUSTER_LIVE_UINT8)
    return fail(live, "field \"%s\" has no type. Give MUSTER_LIVE_FLOAT32 or another", name);
  if (dims < 1 || dims > MUSTER_LIVE_MAX_DIMS)
    return fail(live, "field \"%s\" has %d dimensions. Give 1 to %d", name, dims, MUSTER_LIVE_MAX_DIMS);
  live_field field;
  memset(&field, 0, sizeof field);
  memcpy(field.name, name, strlen(name) + 1);
  field.type = type;
  field.dims = dims;
  int64_t volume = 1;
  for (int d = 0; d < dims; ++d) {
    field.global[d] = global[d];
    field.offset[d] = offset[d];
    field.local[d] = local[d];
    if (global[d] < 1 || __builtin_mul_overflow(volume, global[d], &volume) || volume > ((int64_t)1 << 48))
      return fail(live, "field \"%s\" has no values, or too many. Give extents from 1 on", name);
    if (offset[d] < 0 || local[d] < 0 || offset[d] > global[d] - local[d])
      return fail(live,
                  "the block of field \"%s\" on rank %d ends outside of the array. Compare offset and local with "
                  "global",
                  name, live->rank);
    live->extents[live->layout.field_count][d] = local[d];
  }
  live->layout.fields[live->layout.field_count++] = field;
  return MUSTER_LIVE_OK;
}

int muster_live_halo(muster_live* live, const char* name, const int64_t* before, const int64_t* after) {
  if (live->code != MUSTER_LIVE_OK) return live->code;
  for (int f = 0; f < live->layout.field_count && live->ring == NULL; ++f) {
    const live_field* const field = &live->layout.fields[f];
    if (strcmp(field->name, name) != 0) continue;
    for (int d = 0; d < field->dims; ++d) {
      if (before[d] < 0 || after[d] < 0) return fail(live, "the halo of \"%s\" is negative. Give 0 or more", name);
      live->before[f][d] = before[d];
      live->extents[f][d] = before[d] + field->local[d] + after[d];
    }
    return MUSTER_LIVE_OK;
  }
  return fail(live, "a halo is given for \"%.60s\", which is no field declared before. Call muster_live_field() first",
              name);
}

static int blocks_overlap(const live_field* a, const live_field* b) {
  for (int d = 0; d < a->dims; ++d)
    if (a->offset[d] + a->local[d] <= b->offset[d] || b->offset[d] + b->local[d] <= a->offset[d]) return 0;
  return live_volume(a->dims, a->local) > 0 && live_volume(b->dims, b->local) > 0;
}

/* Compares the declarations of all ranks. */
static int check_layouts(muster_live* live, const live_layout* all) {
  for (int r = 0; r < live->ranks; ++r) {
    int differs = all[r].field_count != all[0].field_count || all[r].parameter_count != all[0].parameter_count;
    for (int p = 0; p < all[0].parameter_count && !differs; ++p)
      differs = memcmp(&all[r].parameters[p], &all[0].parameters[p], sizeof all[0].parameters[p]) != 0;
    for (int f = 0; f < all[0].field_count && !differs; ++f) {
      const live_field *const a = &all[r].fields[f], *const b = &all[0].fields[f];
      differs = strcmp(a->name, b->name) != 0 || a->type != b->type || a->dims != b->dims ||
                memcmp(a->global, b->global, sizeof a->global) != 0;
    }
    if (differs)
      return fail(live,
                  "ranks 0 and %d declare different fields or parameters. Declare the same names, types and "
                  "global extents in the same order",
                  r);
  }
  for (int f = 0; f < all[0].field_count; ++f) {
    const live_field* const first = &all[0].fields[f];
    int64_t volume = 0;
    for (int r = 0; r < live->ranks; ++r) {
      volume += live_volume(first->dims, all[r].fields[f].local);
      for (int q = 0; q < r; ++q)
        if (blocks_overlap(&all[q].fields[f], &all[r].fields[f]))
          return fail(live, "the blocks of field \"%s\" on ranks %d and %d overlap. Give blocks that tile the array",
                      first->name, q, r);
    }
    if (volume != live_volume(first->dims, first->global))
      return fail(live, "the blocks of field \"%s\" have %lld values, and the array has %lld. Give blocks that tile it",
                  first->name, (long long)volume, (long long)live_volume(first->dims, first->global));
  }
  if (all[0].field_count == 0) return fail(live, "no field is declared. Call muster_live_field() before");
  return MUSTER_LIVE_OK;
}

/* Lays out this rank's blocks in a slot. Returns the bytes of a slot. */
static int64_t lay_out(live_layout* layout) {
  int64_t at = 0;
  for (int f = 0; f < layout->field_count; ++f) {
    live_field* const field = &layout->fields[f];
    field->at = at;
    at += (live_volume(field->dims, field->local) * live_type_bytes(field->type) + 63) / 64 * 64;
  }
  return at;
}

/* Makes this rank's ring and passes it to the trainer. */
static int make_ring(muster_live* live, int64_t slots, int64_t slot_bytes) {
  live_ring head;
  memset(&head, 0, sizeof head);
  const int64_t line = 64, page = 4096;
  head.slots = slots;
  head.slot_bytes = slot_bytes;
  head.words_at = ((int64_t)sizeof head + line - 1) / line * line;
  head.numbers_at = head.words_at + slots * 8;
  head.trainers_at = head.numbers_at + slots * 8;
  head.data_at = (head.trainers_at + 4 * live->trainers + page - 1) / page * page;
  head.file_bytes = head.data_at + slots * slot_bytes;
  head.layout = live->layout;
  head.next = -1;

  const int file = memfd_create("muster-live", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, (off_t)head.file_bytes) != 0) {
    if (file >= 0) close(file);
    return fail(live, "no shared memory can be made: %s. Lower bytes in its options", strerror(errno));
  }
  void* const memory = mmap(NULL, (size_t)head.file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    close(file);
    return fail(live, "its memory cannot be mapped: %s. Lower bytes in its options", strerror(errno));
  }
  live->ring = memory;
  memcpy(live->ring, &head, sizeof head);
  int code = MUSTER_LIVE_OK;
  for (int j = 0; j < live->trainers && code == MUSTER_LIVE_OK; ++j) {
    char byte = 0;
    union {
      struct cmsghdr align;
      char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec data = {&byte, 1};
    struct msghdr message;
    memset(&message, 0, sizeof message);
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.bytes;
    message.msg_controllen = sizeof control.bytes;
    struct cmsghdr* const part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof file);
    memcpy(CMSG_DATA(part), &file, sizeof file);
    if (sendmsg(live->sockets[j], &message, MSG_NOSIGNAL) != 1) code = gone(live);
  }
  close(file);
  return code;
}

/* Checks what all ranks have declared, and makes the rings. Collective. */
static int begin(muster_live* live) {
  live_layout* all = NULL;
  int code = live->text[0] == '\0' ? MUSTER_LIVE_OK : MUSTER_LIVE_ERROR; /* an error of a declaration */
  if (live->rank == 0) all = malloc((size_t)live->ranks * sizeof *all);
  if (live->rank == 0 && all == NULL) code = fail(live, "there is not enough memory. Free some");
  if (agree(live, code) != MUSTER_LIVE_OK) {
    free(all);
    return live->code;
  }
  MPI_Gather(&live->layout, sizeof live->layout, MPI_BYTE, all, sizeof live->layout, MPI_BYTE, 0, live->comm);
  if (live->rank == 0) code = check_layouts(live, all);
  free(all);
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;

  const int64_t block = lay_out(&live->layout), most = (int64_t)1 << 16;
  int64_t slots = live->options.bytes / (block + 16);
  if (slots == 0)
    code = fail(live, "its memory of %lld bytes does not hold one block of %lld. Raise bytes in its options",
                (long long)live->options.bytes, (long long)block);
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;
  if (slots > most) slots = most;
  MPI_Allreduce(MPI_IN_PLACE, &slots, 1, MPI_INT64_T, MPI_MIN, live->comm); /* a sample has one slot on all ranks */
  return agree(live, make_ring(live, slots, block));
}

static uint64_t* word_of(muster_live* live, int64_t seq) { return &live_words(live->ring)[seq % live->ring->slots]; }

static int is_empty(muster_live* live) {
  return live_state(__atomic_load_n(word_of(live, live->seq), __ATOMIC_SEQ_CST)) == LIVE_EMPTY;
}

/* What the trainer asks for. */
static int asked(muster_live* live) {
  if (__atomic_load_n(&live->ring->refused, __ATOMIC_SEQ_CST)) return fail(live, "%s", live->ring->refusal);
  if (__atomic_load_n(&live->ring->gone, __ATOMIC_SEQ_CST)) return gone(live);
  return __atomic_load_n(&live->ring->stop, __ATOMIC_SEQ_CST) ? MUSTER_LIVE_STOP : MUSTER_LIVE_OK;
}

/* Waits until `ready`, or the trainer asks for something, or has gone, or the time is over. */
static int wait_for(muster_live* live, int (*ready)(muster_live*), double end) {
  const double begun = live_now_s();
  int code = MUSTER_LIVE_OK;
  for (;;) {
    __atomic_store_n(&live->ring->solver_waits, 1, __ATOMIC_SEQ_CST);
    if (ready(live)) break;
    if ((code = asked(live)) != MUSTER_LIVE_OK) break;
    const double left = end - live_now_s();
    struct pollfd sockets[live->trainers];
    for (int j = 0; j < live->trainers; ++j) sockets[j] = (struct pollfd){live->sockets[j], POLLIN, 0};
    poll(sockets, (nfds_t)live->trainers, left <= 0 ? 0 : left < 1 ? (int)(left * 1000) + 1 : 1000);
    for (int j = 0; j < live->trainers; ++j) {
      char bytes[64];
      if (sockets[j].revents == 0) continue;
      const ssize_t got = recv(live->sockets[j], bytes, sizeof bytes, MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) code = gone(live);
    }
    if (code != MUSTER_LIVE_OK || left <= 0) break;
  }
  __atomic_store_n(&live->ring->solver_waits, 0, __ATOMIC_RELAXED);
  live->wait_s += live_now_s() - begun;
  return code;
}

/* Copies this rank's block into its slot, and shows the sample to the trainer. */
static void publish(muster_live* live, int64_t number, const void* const* values) {
  char* const slot = live_slot(live->ring, live->seq % live->ring->slots);
  for (int f = 0; f < live->layout.field_count; ++f) {
    const live_field* const field = &live->layout.fields[f];
    const int64_t bytes = live_type_bytes(field->type);
    int64_t first = 0;
    for (int d = 0; d < field->dims; ++d) first = first * live->extents[f][d] + live->before[f][d];
    live_copy_box(field->dims, bytes, field->local, (const char*)values[f] + first * bytes, live->extents[f],
                  slot + field->at, field->local);
  }
  live_numbers(live->ring)[live->seq % live->ring->slots] = number;
  __atomic_store_n(word_of(live, live->seq), live_word(live->seq, LIVE_FULL), __ATOMIC_SEQ_CST);
  const int trainer = live_rank_of(live->seq, live->options.solver, live->trainers);
  if (__atomic_exchange_n(&live_trainers(live->ring)[trainer], 0, __ATOMIC_SEQ_CST))
    (void)!send(live->sockets[trainer], "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
  ++live->seq;
}

/* Drops the oldest sample, if the trainer has not begun to take it. The same on all ranks. Collective. */
static int revoke_oldest(muster_live* live) {
  int revoked = 0;
  if (live->rank == 0) {
    uint64_t old = __atomic_load_n(word_of(live, live->seq), __ATOMIC_ACQUIRE);
    revoked = live_state(old) == LIVE_FULL &&
              __atomic_compare_exchange_n(word_of(live, live->seq), &old, live_word(live_seq(old), LIVE_EMPTY), 0,
                                          __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  }
  MPI_Bcast(&revoked, 1, MPI_INT, 0, live->comm);
  return revoked;
}

/* What the ranks find before a sample: the highest code, whether a rank has no room, and the number twice. */
static int agree_on_sample(muster_live* live, int code, int64_t number, int* is_full) {
  int64_t all[4] = {code, !is_empty(live), number, -number};
  if (live->ranks > 1 && MPI_Allreduce(MPI_IN_PLACE, all, 4, MPI_INT64_T, MPI_MAX, live->comm) != MPI_SUCCESS)
    all[0] = fail(live, "MPI_Allreduce() has failed. See what MPI says");
  *is_full = (int)all[1];
  if (all[2] != -all[3]) live->text[0] = '\0'; /* this one counts */
  if (all[2] != -all[3])
    all[0] = fail(live, "its ranks send samples %lld and %lld together. Give the same number on all ranks",
                  (long long)-all[3], (long long)all[2]);
  if (all[0] == MUSTER_LIVE_OK || all[0] == MUSTER_LIVE_STOP) return (int)all[0];
  return agree(live, (int)all[0] == code || live->text[0] != '\0' ? (int)all[0] : MUSTER_LIVE_OK);
}

int muster_live_send(muster_live* live, int64_t number, const void* const* values) {
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (live->ring == NULL && begin(live) != MUSTER_LIVE_OK) return live->code;
  const double begun = live_now_s(), end = begun + live->options.timeout_s;
  int is_full = 0;
  int code = live->text[0] != '\0' ? MUSTER_LIVE_ERROR : MUSTER_LIVE_OK; /* an error of a late declaration */
  if (number <= live->last_number)
    code = fail(live, "sample %lld comes after sample %lld. Give numbers from 0 on that rise", (long long)number,
                (long long)live->last_number);
  if (code == MUSTER_LIVE_OK) code = asked(live);
  if (code == MUSTER_LIVE_OK && !is_empty(live)) /* the other rules only look whether the trainer is still there */
    code = wait_for(live, is_empty, live->options.rule == MUSTER_LIVE_WAIT ? end : begun);
  if ((code = agree_on_sample(live, code, number, &is_full)) != MUSTER_LIVE_OK) return code;
  if (is_full && live->options.rule == MUSTER_LIVE_DROP_OLDEST) {
    if (revoke_oldest(live)) {
      is_full = 0;
      ++live->dropped;
    } else { /* the trainer is taking it */
      code = wait_for(live, is_empty, end);
      if ((code = agree_on_sample(live, code, number, &is_full)) != MUSTER_LIVE_OK) return code;
    }
  }
  live->last_number = number;
  ++live->sent;
  live->dropped += is_full;
  __atomic_store_n(&live->ring->sent, live->sent, __ATOMIC_RELAXED);
  __atomic_store_n(&live->ring->dropped, live->dropped, __ATOMIC_RELEASE);
  if (is_full) return MUSTER_LIVE_DROPPED;
  publish(live, number, values);
  return MUSTER_LIVE_OK;
}

static int next_is_known(muster_live* live) { return __atomic_load_n(&live->ring->next, __ATOMIC_ACQUIRE) >= 0; }

int muster_live_next(muster_live* live, int64_t* number) {
  *number = 0;
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (live->ring == NULL && begin(live) != MUSTER_LIVE_OK) return live->code;
  int code = MUSTER_LIVE_OK;
  if (live->rank == 0) {
    code = wait_for(live, next_is_known, live_now_s() + live->options.timeout_s);
    *number = __atomic_load_n(&live->ring->next, __ATOMIC_ACQUIRE);
    if (*number < 0 && code == MUSTER_LIVE_OK)
      code = fail(live, "the trainer has not begun within %.0f s. Raise timeout_s in its options",
                  live->options.timeout_s);
    if (*number < 0) *number = 0;
  }
  MPI_Bcast(&code, 1, MPI_INT, 0, live->comm);
  MPI_Bcast(number, 1, MPI_INT64_T, 0, live->comm);
  if (code == MUSTER_LIVE_OK || code == MUSTER_LIVE_STOP) return code;
  return agree(live, live->rank == 0 ? code : MUSTER_LIVE_OK);
}

const char* muster_live_text(const muster_live* live) { return live == NULL ? "" : live->text; }

int muster_live_close(muster_live** closed, muster_live_counts* counts) {
  muster_live* const live = *closed;
  if (live == NULL) return MUSTER_LIVE_OK;
  if (counts != NULL) *counts = (muster_live_counts){live->sent, live->dropped, live->wait_s};
  if (live->ring != NULL) __atomic_store_n(&live->ring->closed, 1, __ATOMIC_RELEASE);
  disconnect(live); /* which wakes the trainer */
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (live->comm != MPI_COMM_NULL && !finalised) MPI_Comm_free(&live->comm);
  free(live);
  *closed = NULL;
  return MUSTER_LIVE_OK;
}
