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

#include "live/sender/channel.h"

/* A rank of the trainer. */
typedef struct live_trainer {
  int socket; /* -1: none */
  int rank;   /* of MPI_COMM_WORLD */
  /* On another node: */
  int is_remote, has_answered;
  int64_t allowed, next;           /* it has room for samples before `allowed`; `next` is the first that was not sent */
  MPI_Request sends[LIVE_AHEAD];   /* of slots */
  int64_t sent[LIVE_AHEAD];        /* the samples of these slots; -1: revoked */
  live_sample revoked[LIVE_AHEAD]; /* is sent in place of such a slot */
} live_trainer;

struct muster_live {
  int code; /* what every call returns: OK while the stream is open */
  char name[MUSTER_LIVE_MAX_NAME + 1];
  char* contact;           /* the file of a trainer in another job; null if it is in this one */
  char tried[33];          /* the secret of the last trainer that was found there */
  muster_live_counts past; /* with trainers before this one */
  muster_live_options options;
  MPI_Comm comm;
  int rank, ranks, trainers;
  live_trainer* trainer; /* [trainers] */
  live_channel* channel; /* null if all of them are on this node */
  int trainer_tag;       /* of the channels of the trainer */
  live_told told;        /* over the channel, while there is no ring */
  live_layout layout;
  int64_t before[MUSTER_LIVE_MAX_FIELDS][MUSTER_LIVE_MAX_DIMS];  /* halos */
  int64_t extents[MUSTER_LIVE_MAX_FIELDS][MUSTER_LIVE_MAX_DIMS]; /* of this rank's arrays, halos included */
  live_ring* ring;                                               /* null before the first sample */
  int file;                                                      /* the ring's, until the trainer has it; or -1 */
  /* Of rank 0: */
  void *weights, *coming;    /* the newest that it has, and those that are on their way from another node */
  live_weights has, to_come; /* which they are */
  int64_t held;              /* the version that it had at the beginning of the last call */
  int is_asking;             /* the trainer has not answered yet */
  MPI_Request receives;
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
  if (live->contact != NULL)
    fail(live, "%s. Start it with a muster::Live of this name whose connect_file is \"%.200s\"", fact, live->contact);
  else
    fail(live, "%s. Start it in this job with a muster::Live of this name, as in mpirun -n 6 ./solver : -n 2 ./trainer",
         fact);
  return MUSTER_LIVE_NO_TRAINER;
}
static int gone(muster_live* live) { return no_trainer(live, "the trainer has ended"); }

/* True if MPI still uses a slot of the ring. */
static int is_sending(muster_live* live) {
  int sending = 0;
  for (int j = 0; j < live->trainers; ++j)
    for (int i = 0; i < LIVE_AHEAD; ++i) {
      live_trainer* const trainer = &live->trainer[j];
      if (trainer->sends[i] == MPI_REQUEST_NULL) continue;
      if (!live_is_over(&trainer->sends[i])) {
        sending = 1;
      } else if (trainer->sent[i] >= 0) {
        const int64_t seq = trainer->sent[i];
        __atomic_store_n(live_word_of(live->ring, seq), live_word(seq, LIVE_EMPTY), __ATOMIC_SEQ_CST);
      }
    }
  return sending;
}

/* Sends what the trainer has room for: each of its samples before `allowed`, or that it was revoked. */
static void send_allowed(muster_live* live, live_trainer* trainer) {
  for (; trainer->next < trainer->allowed && trainer->next < live->seq; trainer->next += live->trainers) {
    const int64_t seq = trainer->next;
    const int i = (int)(seq / live->trainers % LIVE_AHEAD);
    if (trainer->sends[i] != MPI_REQUEST_NULL && is_sending(live) && trainer->sends[i] != MPI_REQUEST_NULL) return;
    uint64_t* const word = live_word_of(live->ring, seq);
    const int is_there = *word == live_word(seq, LIVE_FULL);
    const live_sample* slot = &trainer->revoked[i];
    if (is_there) {
      __atomic_store_n(word, live_word(seq, LIVE_TAKEN), __ATOMIC_SEQ_CST);
      slot = live_slot(live->ring, seq);
    }
    trainer->sent[i] = is_there ? seq : -1;
    trainer->sends[i] = live_send_slot(slot, is_there ? live->ring->slot_bytes : (int64_t)sizeof *slot, trainer->rank,
                                       live_channel_tag(live->channel));
  }
}

/* Receives and sends over the channel. */
static void pump(muster_live* live) {
  live_message message;
  int source = 0;
  while (live->channel != NULL && live_channel_receive(live->channel, &message, &source)) {
    live_trainer *trainer = live->trainer, *const end = trainer + live->trainers;
    while (trainer < end && trainer->rank != source) ++trainer;
    if (trainer == end) continue;
    live_told* const told = live->ring != NULL ? &live->ring->told : &live->told;
    if (message.kind == LIVE_WELCOME) {
      trainer->has_answered = 1;
      if (message.of.told.refusal[0] != '\0') fail(live, "%s", message.of.told.refusal);
    } else if (message.kind == LIVE_WEIGHTS) {
      live->to_come = message.of.weights;
      live->coming = malloc((size_t)live->to_come.bytes + sizeof(live_sample));
      if (live->coming == NULL)
        fail(live, "there is not enough memory for weights. Free some");
      else
        live->receives = live_receive_slot(live->coming, live->to_come.bytes, source, live->trainer_tag);
    } else {
      const int64_t version = message.of.told.weights_version;
      if (version > 0) __atomic_store_n(&told->weights_version, version, __ATOMIC_SEQ_CST);
      /* Other ranks of the trainer may be on this node, and write, too. */
      if (message.of.told.next >= 0) __atomic_store_n(&told->next, message.of.told.next, __ATOMIC_SEQ_CST);
      if (message.of.told.refused) memcpy(told->refusal, message.of.told.refusal, LIVE_TEXT);
      if (message.of.told.refused) __atomic_store_n(&told->refused, 1, __ATOMIC_SEQ_CST);
      if (message.of.told.accepted) __atomic_store_n(&told->accepted, 1, __ATOMIC_SEQ_CST);
      if (message.of.told.stop) __atomic_store_n(&told->stop, 1, __ATOMIC_SEQ_CST);
      if (message.of.told.gone) __atomic_store_n(&told->gone, 1, __ATOMIC_SEQ_CST);
      trainer->allowed = message.seq;
    }
  }
  if (live->coming != NULL && live_is_over(&live->receives)) {
    free(live->weights);
    live->weights = live->coming;
    live->has = live->to_come;
    live->coming = NULL;
    live->is_asking = 0;
  }
  if (live->channel == NULL || live->ring == NULL) return;
  is_sending(live);
  for (int j = 0; j < live->trainers; ++j)
    if (live->trainer[j].is_remote) send_allowed(live, &live->trainer[j]);
}

static int all_have_answered(muster_live* live) {
  for (int j = 0; j < live->trainers && live->text[0] == '\0'; ++j)
    if (live->trainer[j].is_remote && !live->trainer[j].has_answered) return 0;
  return 1;
}

/* Pumps until `ready`; false past the end. */
static int pump_until(muster_live* live, int (*ready)(muster_live*), double end) {
  for (;;) {
    pump(live);
    if (ready(live)) return 1;
    if (live_now_s() > end) return 0;
    nanosleep(&(struct timespec){0, 50000}, NULL);
  }
}

/* True if all samples for trainers on other nodes have left this rank, or the trainer has gone. */
static int all_have_left(muster_live* live) {
  if (live->ring->told.gone || live->ring->told.refused) return 1;
  for (int j = 0; j < live->trainers; ++j)
    if (live->trainer[j].is_remote && live->trainer[j].next < live->seq) return 0;
  return !is_sending(live);
}

/* Waits until the samples for trainers on other nodes have left. Those that have not are dropped. */
static void drain(muster_live* live) {
  pump_until(live, all_have_left, live_now_s() + live->options.timeout_s);
  for (int64_t seq = live->seq - live->ring->slots; seq < live->seq; ++seq)
    if (seq >= 0 && live->trainer[live_rank_of(seq, live->options.solver, live->trainers)].is_remote)
      live->dropped += *live_word_of(live->ring, seq) == live_word(seq, LIVE_FULL);
  __atomic_store_n(&live->ring->dropped, live->dropped, __ATOMIC_RELEASE);
}

/* Ends the stream on this rank, with the code of all ranks. */
static void disconnect(muster_live* live, int code) {
  int finalised = 0;
  MPI_Finalized(&finalised);
  if (live->channel != NULL && live->ring != NULL && code != MUSTER_LIVE_NO_TRAINER && !finalised) drain(live);
  const int sending = live->channel != NULL && (finalised || is_sending(live)); /* then its memory stays */
  const live_ring* const ring = live->ring;
  for (int j = 0; j < live->trainers; ++j) {
    live_message message = {.kind = LIVE_END, .seq = live->trainer[j].next};
    if (ring != NULL) message.of.end = (live_sample){.sent = ring->sent, .dropped = ring->dropped};
    if (live->trainer[j].is_remote && !finalised)
      live_channel_send(live->channel, live->trainer[j].rank, live->trainer_tag, message);
    const char closed = LIVE_CLOSED;
    if (live->trainer[j].socket < 0) continue;
    (void)!send(live->trainer[j].socket, &closed, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    close(live->trainer[j].socket);
  }
  if (!finalised) live_channel_close(live->channel);
  live->channel = NULL;
  free(live->weights); /* but not what MPI may still receive */
  live->weights = NULL;
  live->has = (live_weights){0, 0};
  if (!sending) free(live->trainer);
  live->trainer = NULL;
  live->trainers = 0;
  if (live->ring != NULL && !sending) munmap(live->ring, (size_t)live->ring->file_bytes);
  live->ring = NULL;
  if (live->file >= 0) close(live->file);
  live->file = -1;
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
  if (worst.code != MUSTER_LIVE_OK) disconnect(live, worst.code);
  return worst.code;
}

/* Connects to a rank of the trainer on this node. Returns a code. */
static int connect_to(muster_live* live, const char* token, int trainer, const live_hello* hello, double end) {
  struct sockaddr_un address;
  const socklen_t bytes = live_address(&address, token, live->name, trainer);
  const int own = live->trainer[trainer].socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (own < 0) return fail(live, "no socket can be made: %s. Raise the limit on open files", strerror(errno));
  live_welcome welcome;
  memset(&welcome, 0, sizeof welcome);
  const double left = end - live_now_s();
  const struct timeval limit = {left > 0 ? (time_t)left : 0, 1000}; /* connect() waits where many connect at once */
  setsockopt(own, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  setsockopt(own, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  if (connect(own, (const struct sockaddr*)&address, bytes) != 0 || !live_is_own_user(own) ||
      send(own, hello, sizeof *hello, MSG_NOSIGNAL) != (ssize_t)sizeof *hello ||
      recv(own, &welcome, sizeof welcome, 0) != (ssize_t)sizeof welcome)
    return gone(live);
  if (welcome.refusal[0] != '\0') return fail(live, "%s", welcome.refusal);
  if (welcome.protocol == LIVE_PROTOCOL) return MUSTER_LIVE_OK;
  return fail(live, "the trainer has another version of muster. Build both with the same");
}

/* Connects to all ranks of the trainer, whose ranks in MPI_COMM_WORLD are `ranks`; null if it is in another job, on
 * this node. Returns a code. */
static int connect_to_all(muster_live* live, const char* token, const int32_t* ranks, uint64_t id, double end) {
  const live_hello hello = {LIVE_PROTOCOL, live->options.solver, live->rank, live->ranks, id};
  int own = 0, code = MUSTER_LIVE_OK;
  if (ranks != NULL) MPI_Comm_rank(MPI_COMM_WORLD, &own);
  live->trainer = calloc((size_t)live->trainers, sizeof *live->trainer);
  if (live->trainer == NULL) live->trainers = 0;
  for (int j = 0; j < live->trainers; ++j) {
    live_trainer* const trainer = &live->trainer[j];
    trainer->socket = -1;
    trainer->rank = ranks == NULL ? -1 : ranks[j];
    for (int i = 0; i < LIVE_AHEAD; ++i) {
      trainer->sends[i] = MPI_REQUEST_NULL;
      trainer->revoked[i].is_revoked = 1;
    }
    while (live_rank_of(trainer->next, live->options.solver, live->trainers) != j) ++trainer->next;
    trainer->is_remote = ranks != NULL && !live_share_node(own, ranks[j]);
    if (trainer->is_remote && live->channel == NULL) live->channel = live_channel_open(0);
    if (trainer->is_remote && live->channel == NULL) live->trainers = 0;
  }
  if (live->trainers == 0) return fail(live, "there is not enough memory. Free some");
  for (int j = 0; j < live->trainers && code == MUSTER_LIVE_OK; ++j)
    code = live->trainer[j].is_remote ? live_channel_send(live->channel, ranks[j], live->trainer_tag,
                                                          (live_message){.kind = LIVE_HELLO, .of.hello = hello})
                                      : connect_to(live, token, j, &hello, end);
  if (code == MUSTER_LIVE_OK && !pump_until(live, all_have_answered, end)) return gone(live);
  return live->text[0] != '\0' && code == MUSTER_LIVE_OK ? MUSTER_LIVE_ERROR : code;
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

/* Makes a stream without a trainer; null if memory is short. `code` gets what its options are worth on this rank. */
static muster_live* make(const char* name, const muster_live_options* options, int* code) {
  muster_live* const live = calloc(1, sizeof *live);
  if (live == NULL) return NULL;
  live->comm = MPI_COMM_NULL;
  live->file = -1;
  outlive_stop_requests();
  live->last_number = live->told.next = -1;
  *code = check_options(live, options);
  if (!live_is_name(name))
    *code = fail(live, "the name is not one. Give up to %d letters, digits, '-', '_' and '.'", MUSTER_LIVE_MAX_NAME);
  else
    memcpy(live->name, name, strlen(name) + 1);
  return live;
}

/* Gives the stream its ranks, which agree on `code`. Collective. */
static int take_ranks(muster_live* live, MPI_Comm comm, int code) {
  if (MPI_Comm_dup(comm, &live->comm) != MPI_SUCCESS) {
    live->code = fail(live, "its communicator cannot be duplicated. Give one of the solver's ranks");
    return live->code;
  }
  MPI_Comm_set_errhandler(live->comm, MPI_ERRORS_RETURN);
  MPI_Comm_rank(live->comm, &live->rank);
  MPI_Comm_size(live->comm, &live->ranks);
  return agree(live, code);
}

/* Identifies an opening of a stream. */
static uint64_t new_id(void) {
  uint64_t id = 0;
  return getrandom(&id, sizeof id, 0) < 0 ? (uint64_t)getpid() : id;
}

/* Connects to the trainer of which the file tells, and waits for one until `end`: the file may be of one that has
 * ended. Returns the code of all ranks. Collective. */
static int connect_by_file(muster_live* live, double end) {
  struct {
    live_contact contact;
    uint64_t id;
    int is_there;
  } found;
  do {
    memset(&found, 0, sizeof found);
    while (live->rank == 0) {
      found.is_there =
          live_read_contact(live->contact, &found.contact) && strcmp(found.contact.token, live->tried) != 0;
      if (found.is_there || live_now_s() > end) break;
      nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    found.id = new_id();
    MPI_Bcast(&found, sizeof found, MPI_BYTE, 0, live->comm);
    if (!found.is_there) return live->code = no_trainer(live, "no trainer has come in time");
    memcpy(live->tried, found.contact.token, sizeof live->tried);
    live->code = MUSTER_LIVE_OK;
    live->text[0] = '\0';
    live->told = (live_told){.next = -1};
    live->seq = 0;
    live->last_number = -1;
    live->is_asking = 0;
    int code = MUSTER_LIVE_OK;
    if (found.contact.protocol != LIVE_PROTOCOL)
      code = fail(live, "the trainer has another version of muster. Build both with the same");
    else if (strcmp(found.contact.name, live->name) != 0)
      code =
          fail(live, "its file is that of the stream \"%s\". Give each stream a file of its own", found.contact.name);
    else if (found.contact.node != live_node())
      code = fail(live,
                  "rank %d is on another node than the trainer. Start both jobs on one node, or both programs in "
                  "one job",
                  live->rank);
    live->trainers = code == MUSTER_LIVE_OK ? found.contact.trainers : 0;
    const double soon = live_now_s() + 1; /* a trainer whose file is there answers */
    if (code == MUSTER_LIVE_OK)
      code = connect_to_all(live, found.contact.token, NULL, found.id, end > soon ? end : soon);
    agree(live, code);
  } while (live->code == MUSTER_LIVE_NO_TRAINER && live_now_s() < end);
  return live->code;
}

int muster_live_connect(MPI_Comm comm, const char* file, const char* name, const muster_live_options* options,
                        muster_live** opened) {
  int code = MUSTER_LIVE_OK;
  muster_live* const live = *opened = make(name, options, &code);
  if (live == NULL) return MUSTER_LIVE_ERROR;
  live->contact = strdup(file);
  if (live->contact == NULL) code = fail(live, "there is not enough memory. Free some");
  if (take_ranks(live, comm, code) != MUSTER_LIVE_OK) return live->code;
  return connect_by_file(live, live_now_s() + live->options.timeout_s);
}

int muster_live_open(MPI_Comm comm, const char* name, const muster_live_options* options, muster_live** opened) {
  int code = MUSTER_LIVE_OK, world = 0;
  muster_live* const live = *opened = make(name, options, &code);
  if (live == NULL) return MUSTER_LIVE_ERROR;
  const double end = live_now_s() + live->options.timeout_s;
  char token[33], text[LIVE_TEXT];
  const int joined = live_join(live->options.timeout_s, token, text);
  if (joined != MUSTER_LIVE_OK) {
    live->code = fail(live, "%s", text); /* the others time out, too */
    return live->code;
  }
  if (take_ranks(live, comm, code) != MUSTER_LIVE_OK) return live->code;
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (live->ranks == world) return live->code = no_trainer(live, "no rank of the job is left for a trainer");

  /* Rank 0 waits for the trainer. */
  struct {
    uint64_t id; /* of this opening */
    int32_t tag, count;
  } found = {0, 0, 0};
  const live_announcement* trainer = NULL;
  if (live->rank == 0) {
    found.id = new_id();
    while ((trainer = live_find_announced(live->name)) == NULL && live_now_s() < end)
      nanosleep(&(struct timespec){0, 1000000}, NULL);
    if (trainer != NULL) found.tag = trainer->tag, found.count = trainer->count;
  }
  MPI_Bcast(&found, sizeof found, MPI_BYTE, 0, live->comm);
  if (found.count == 0) return agree(live, no_trainer(live, "no trainer has come in time"));
  int32_t* const ranks = malloc((size_t)found.count * sizeof *ranks);
  if (ranks == NULL) code = fail(live, "there is not enough memory. Free some");
  if (agree(live, code) != MUSTER_LIVE_OK) {
    free(ranks);
    return live->code;
  }
  if (trainer != NULL) memcpy(ranks, trainer->ranks, (size_t)found.count * sizeof *ranks);
  MPI_Bcast(ranks, found.count, MPI_INT32_T, 0, live->comm);
  live->trainer_tag = found.tag;
  live->trainers = found.count;
  code = connect_to_all(live, token, ranks, found.id, end);
  free(ranks);
  return agree(live, code);
}

/* What a local call returns before it does anything. */
static int local_code(const muster_live* live) {
  return live->code == MUSTER_LIVE_OK && live->text[0] != '\0' ? MUSTER_LIVE_ERROR : live->code;
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
  if (local_code(live) != MUSTER_LIVE_OK) return local_code(live);
  if (check_name(live, name) != MUSTER_LIVE_OK) return MUSTER_LIVE_ERROR;
  live_parameter* const parameter = &live->layout.parameters[live->layout.parameter_count++];
  memcpy(parameter->name, name, strlen(name) + 1);
  parameter->value = value;
  return MUSTER_LIVE_OK;
}

int muster_live_field(muster_live* live, const char* name, int type, int dims, const int64_t* global,
                      const int64_t* offset, const int64_t* local) {
  if (local_code(live) != MUSTER_LIVE_OK) return local_code(live);
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
  if (local_code(live) != MUSTER_LIVE_OK) return local_code(live);
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
  return at + (int64_t)sizeof(live_sample);
}

static int is_empty(muster_live* live) {
  return live_state(__atomic_load_n(live_word_of(live->ring, live->seq), __ATOMIC_SEQ_CST)) == LIVE_EMPTY;
}

/* What the trainer asks for. A trainer that has asked for a stop may end at once. */
static int asked(muster_live* live) {
  const live_told* const told = &live->ring->told;
  if (__atomic_load_n(&told->refused, __ATOMIC_SEQ_CST)) return fail(live, "%s", told->refusal);
  const int is_gone = __atomic_load_n(&told->gone, __ATOMIC_SEQ_CST) != 0;
  if (__atomic_load_n(&told->stop, __ATOMIC_SEQ_CST)) return MUSTER_LIVE_STOP;
  return is_gone ? gone(live) : MUSTER_LIVE_OK;
}

static int has_left(const muster_live* live) {
  const live_told* const told = &live->ring->told;
  return __atomic_load_n(&told->refused, __ATOMIC_SEQ_CST) || __atomic_load_n(&told->gone, __ATOMIC_SEQ_CST);
}

/* Takes weights that a trainer on this node has sent, in a file. */
static void take_weights(muster_live* live, live_weights coming, int file) {
  live->is_asking = 0;
  if (file == LIVE_LOST_FILE) {
    fail(live, "weights cannot be taken: this process is out of file descriptors. Raise its limit (ulimit -n)");
    return;
  }
  char* const weights = malloc((size_t)coming.bytes + 1);
  int64_t at = 0;
  for (ssize_t read = 1; weights != NULL && read > 0; at += read > 0 ? read : 0)
    read = pread(file, weights + at, (size_t)(coming.bytes - at), at);
  close(file);
  if (weights == NULL || at < coming.bytes) {
    free(weights);
    fail(live, "there is not enough memory for weights. Free some");
    return;
  }
  free(live->weights);
  live->weights = weights;
  live->has = coming;
}

/* Reads what a rank of the trainer on this node has sent: weights, or a byte that has only woken this rank. */
static void read_from(muster_live* live, const live_trainer* trainer) {
  live_weights coming;
  int file = LIVE_NO_FILE;
  const int64_t got = live_receive_file(trainer->socket, &coming, sizeof coming, &file);
  if (got == (int64_t)sizeof coming && file != LIVE_NO_FILE)
    take_weights(live, coming, file);
  else if (got <= 0 && got != LIVE_NOTHING)
    __atomic_store_n(&live->ring->told.gone, 1, __ATOMIC_SEQ_CST);
}

/* Waits until `ready`, or the stream has ended, or the time is over. Returns what the trainer asks for. */
static int wait_for(muster_live* live, int (*ready)(muster_live*), double end) {
  for (;;) {
    __atomic_store_n(&live->ring->solver_waits, 1, __ATOMIC_SEQ_CST);
    pump(live);
    if (ready(live) || live->text[0] != '\0' || has_left(live)) break;
    const double left = end - live_now_s();
    struct pollfd sockets[live->trainers];
    for (int j = 0; j < live->trainers; ++j) sockets[j] = (struct pollfd){live->trainer[j].socket, POLLIN, 0};
    const int slice_ms = left <= 0 || live->channel != NULL ? 0 : left < 1 ? (int)(left * 1000) + 1 : 1000;
    poll(sockets, (nfds_t)live->trainers, slice_ms);
    if (live->channel != NULL && left > 0) nanosleep(&(struct timespec){0, 20000}, NULL);
    for (int j = 0; j < live->trainers; ++j)
      if (sockets[j].revents != 0) read_from(live, &live->trainer[j]);
    if (left <= 0) break; /* but it has looked whether the trainer is still there */
  }
  __atomic_store_n(&live->ring->solver_waits, 0, __ATOMIC_RELAXED);
  const int code = asked(live);
  return live->text[0] != '\0' && code <= MUSTER_LIVE_STOP ? MUSTER_LIVE_ERROR : code;
}

/* Tells a rank of the trainer on another node what this rank has declared. */
static int declare_to(muster_live* live, int rank) {
  const live_layout* const all = &live->layout;
  int code = MUSTER_LIVE_OK;
  for (int f = 0; f < all->field_count && code == MUSTER_LIVE_OK; ++f)
    code = live_channel_send(live->channel, rank, live->trainer_tag,
                             (live_message){.kind = LIVE_FIELD, .of.field = all->fields[f]});
  for (int p = 0; p < all->parameter_count && code == MUSTER_LIVE_OK; ++p)
    code = live_channel_send(live->channel, rank, live->trainer_tag,
                             (live_message){.kind = LIVE_PARAMETER, .of.parameter = all->parameters[p]});
  if (code == MUSTER_LIVE_OK)
    code = live_channel_send(live->channel, rank, live->trainer_tag,
                             (live_message){.kind = LIVE_BEGIN, .seq = live->ring->slot_bytes});
  return code == MUSTER_LIVE_OK ? code : fail(live, "a message cannot be sent by MPI. See what MPI says");
}

/* Makes this rank's ring. */
static int make_ring(muster_live* live, int64_t slots, int64_t slot_bytes) {
  live_ring head;
  memset(&head, 0, sizeof head);
  live_place(&head, slots, slot_bytes, live->trainers);
  head.layout = live->layout;
  head.told = live->told;

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
  live->file = file;
  return MUSTER_LIVE_OK;
}

/* Passes this rank's ring to a rank of the trainer. */
static int pass_ring(muster_live* live, const live_trainer* trainer) {
  if (trainer->is_remote) return declare_to(live, trainer->rank);
  return live_send_file(trainer->socket, "", 1, live->file) ? MUSTER_LIVE_OK : gone(live);
}

static int is_accepted(muster_live* live) { return __atomic_load_n(&live->ring->told.accepted, __ATOMIC_SEQ_CST) != 0; }

/* Makes the rings and passes them to the trainer: first to its rank 0, which compares the fields with those of the
 * other solvers. Collective. */
static int connect_rings(muster_live* live, int64_t slots, int64_t slot_bytes) {
  int code = make_ring(live, slots, slot_bytes);
  if (code == MUSTER_LIVE_OK) code = pass_ring(live, &live->trainer[0]);
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;
  if (live->rank == 0) {
    code = wait_for(live, is_accepted, live_now_s() + live->options.timeout_s);
    if (code <= MUSTER_LIVE_STOP)
      code = is_accepted(live) ? MUSTER_LIVE_OK : no_trainer(live, "the trainer has not taken its fields in time");
  }
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;
  for (int j = 1; j < live->trainers && code == MUSTER_LIVE_OK; ++j) code = pass_ring(live, &live->trainer[j]);
  close(live->file);
  live->file = -1;
  return agree(live, code);
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
  int64_t slots = live->options.bytes / (block + 8);
  if (slots == 0)
    code = fail(live, "its memory of %lld bytes does not hold one block of %lld. Raise bytes in its options",
                (long long)live->options.bytes, (long long)block);
  if (agree(live, code) != MUSTER_LIVE_OK) return live->code;
  if (slots > most) slots = most;
  MPI_Allreduce(MPI_IN_PLACE, &slots, 1, MPI_INT64_T, MPI_MIN, live->comm); /* a sample has one slot on all ranks */
  return connect_rings(live, slots, block);
}

/* Copies this rank's block into its slot, and shows the sample to the trainer. */
static void publish(muster_live* live, int64_t number, const void* const* values) {
  char* const block = live_block(live->ring, live->seq);
  for (int f = 0; f < live->layout.field_count; ++f) {
    const live_field* const field = &live->layout.fields[f];
    const int64_t bytes = live_type_bytes(field->type);
    int64_t first = 0;
    for (int d = 0; d < field->dims; ++d) first = first * live->extents[f][d] + live->before[f][d];
    live_copy_box(field->dims, bytes, field->local, (const char*)values[f] + first * bytes, live->extents[f],
                  block + field->at, field->local);
  }
  *live_slot(live->ring, live->seq) =
      (live_sample){.number = number, .sent = live->sent, .dropped = live->dropped, .waited_ms = live->ring->waited_ms};
  __atomic_store_n(live_word_of(live->ring, live->seq), live_word(live->seq, LIVE_FULL), __ATOMIC_SEQ_CST);
  const int j = live_rank_of(live->seq, live->options.solver, live->trainers);
  live_trainer* const trainer = &live->trainer[j];
  ++live->seq;
  if (trainer->is_remote)
    send_allowed(live, trainer);
  else if (__atomic_exchange_n(&live_trainers(live->ring)[j], 0, __ATOMIC_SEQ_CST))
    (void)!send(trainer->socket, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Drops the oldest sample, if the trainer has not begun to take it. The same on all ranks. Collective. */
static int revoke_oldest(muster_live* live) {
  int revoked = 0;
  uint64_t* const word = live_word_of(live->ring, live->seq);
  uint64_t old = __atomic_load_n(word, __ATOMIC_ACQUIRE);
  const uint64_t empty = live_word(live_seq(old), LIVE_EMPTY);
  if (live->rank == 0 && live_state(old) == LIVE_FULL)
    revoked = __atomic_compare_exchange_n(word, &old, empty, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  MPI_Bcast(&revoked, 1, MPI_INT, 0, live->comm);
  /* The trainer reads the other ranks' slots only when it has taken rank 0's. But a channel may be sending one. */
  if (revoked && live->rank != 0 && live_state(old) == LIVE_FULL) __atomic_store_n(word, empty, __ATOMIC_SEQ_CST);
  return revoked;
}

static int has_room_or_stops(muster_live* live) {
  return is_empty(live) || __atomic_load_n(&live->ring->told.stop, __ATOMIC_SEQ_CST);
}

/* Looks whether the trainer is still there, and waits for room in the queue until `end`. */
static int wait_for_room(muster_live* live, double end) {
  const double begun = live_now_s();
  const int code = wait_for(live, has_room_or_stops, end);
  live->wait_s += live_now_s() - begun;
  return code;
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

/* Looks whether a trainer of another job has come back. Collective. */
static void reconnect(muster_live* live) {
  live->past.sent += live->sent;
  live->past.dropped += live->dropped;
  live->sent = live->dropped = 0;
  connect_by_file(live, live_now_s());
}

int muster_live_send(muster_live* live, int64_t number, const void* const* values) {
  if (live->code == MUSTER_LIVE_NO_TRAINER && live->contact != NULL) reconnect(live);
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (live->ring == NULL && begin(live) != MUSTER_LIVE_OK) return live->code;
  const double begun = live_now_s(), end = begun + live->options.timeout_s;
  int is_full = 0;
  int code = live->text[0] != '\0' ? MUSTER_LIVE_ERROR : MUSTER_LIVE_OK; /* an error of a late declaration */
  if (number <= live->last_number)
    code = fail(live, "sample %lld comes after sample %lld. Give numbers from 0 on that rise", (long long)number,
                (long long)live->last_number);
  pump(live);
  if (code == MUSTER_LIVE_OK) code = asked(live);
  if (code == MUSTER_LIVE_OK && !is_empty(live)) /* the other rules only look whether the trainer is still there */
    code = wait_for_room(live, live->options.rule == MUSTER_LIVE_WAIT ? end : begun);
  if ((code = agree_on_sample(live, code, number, &is_full)) != MUSTER_LIVE_OK) return code;
  if (is_full && live->options.rule == MUSTER_LIVE_DROP_OLDEST) {
    live->dropped += revoke_oldest(live);
    code = wait_for_room(live, end); /* the trainer is taking it, or a block of it is on its way */
    if ((code = agree_on_sample(live, code, number, &is_full)) != MUSTER_LIVE_OK) return code;
  }
  live->last_number = number;
  ++live->sent;
  live->dropped += is_full;
  __atomic_store_n(&live->ring->waited_ms, (int64_t)(live->wait_s * 1000), __ATOMIC_RELAXED);
  __atomic_store_n(&live->ring->sent, live->sent, __ATOMIC_RELAXED);
  __atomic_store_n(&live->ring->dropped, live->dropped, __ATOMIC_RELEASE);
  if (is_full) return MUSTER_LIVE_DROPPED;
  publish(live, number, values);
  return MUSTER_LIVE_OK;
}

int muster_live_progress(muster_live* live) {
  if (local_code(live) == MUSTER_LIVE_OK) pump(live);
  return local_code(live);
}

static int next_is_known(muster_live* live) { return __atomic_load_n(&live->ring->told.next, __ATOMIC_ACQUIRE) >= 0; }

int muster_live_next(muster_live* live, int64_t* number) {
  *number = 0;
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (live->ring == NULL && begin(live) != MUSTER_LIVE_OK) return live->code;
  int code = MUSTER_LIVE_OK;
  if (live->rank == 0) {
    code = wait_for(live, next_is_known, live_now_s() + live->options.timeout_s);
    *number = __atomic_load_n(&live->ring->told.next, __ATOMIC_ACQUIRE);
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

static int weights_have_come(muster_live* live) {
  return live->has.version > live->held; /* a newer version may have been offered meanwhile */
}

/* Gets the newest weights to rank 0. Returns a code. */
static int fetch_weights(muster_live* live) {
  pump(live);
  live->held = live->has.version;
  if (__atomic_load_n(&live->ring->told.weights_version, __ATOMIC_SEQ_CST) <= live->has.version) return asked(live);
  const char wanted = LIVE_WANTED;
  live_trainer* const trainer = &live->trainer[0];
  if (!live->is_asking && trainer->is_remote)
    live_channel_send(live->channel, trainer->rank, live->trainer_tag, (live_message){.kind = LIVE_WANT});
  else if (!live->is_asking)
    (void)!send(trainer->socket, &wanted, 1, MSG_NOSIGNAL);
  live->is_asking = 1; /* those of an earlier call may still be on their way */
  return wait_for(live, weights_have_come, live_now_s() + live->options.timeout_s);
}

int muster_live_weights(muster_live* live, int64_t* version, void* buffer, int64_t* bytes) {
  const int64_t room = *bytes;
  *version = *bytes = 0;
  if (live->code != MUSTER_LIVE_OK) return live->code;
  if (live->ring == NULL && begin(live) != MUSTER_LIVE_OK) return live->code;
  const int code = live->rank == 0 ? fetch_weights(live) : MUSTER_LIVE_OK;
  int64_t all[4] = {code, live->has.version, live->has.bytes, -room}; /* rank 0 alone has weights */
  MPI_Allreduce(MPI_IN_PLACE, all, 4, MPI_INT64_T, MPI_MAX, live->comm);
  if (all[0] > MUSTER_LIVE_STOP) return agree(live, code);
  *version = all[1];
  *bytes = all[2];
  if (-all[3] < *bytes) return (int)all[0];
  if (live->rank == 0 && *bytes > 0) memcpy(buffer, live->weights, (size_t)*bytes);
  const int64_t piece = (int64_t)1 << 30;
  for (int64_t at = 0; at < *bytes; at += piece)
    MPI_Bcast((char*)buffer + at, (int)(*bytes - at < piece ? *bytes - at : piece), MPI_BYTE, 0, live->comm);
  return (int)all[0];
}

const char* muster_live_text(const muster_live* live) { return live == NULL ? "" : live->text; }

int muster_live_close(muster_live** closed, muster_live_counts* counts) {
  muster_live* const live = *closed;
  if (live == NULL) return MUSTER_LIVE_OK;
  int finalised = 0;
  MPI_Finalized(&finalised);
  disconnect(live, MUSTER_LIVE_OK); /* which wakes the trainer */
  if (counts != NULL)
    *counts = (muster_live_counts){live->past.sent + live->sent, live->past.dropped + live->dropped, live->wait_s};
  if (live->comm != MPI_COMM_NULL && !finalised) MPI_Comm_free(&live->comm);
  free(live->contact);
  free(live);
  *closed = NULL;
  return MUSTER_LIVE_OK;
}
