/* Training from a running simulation: the solver's side. C99 and MPI only; link libmuster_live (muster::live_sender).
 *
 *   muster_live *live = NULL;
 *   muster_live_open(solvers, "heat", NULL, &live);
 *   muster_live_parameter(live, "nu", nu);
 *   muster_live_field(live, "u", MUSTER_LIVE_FLOAT64, 2, global, offset, local);
 *   for (long step = 0; step < steps; ++step) {
 *     advance(u);
 *     const void *values[] = {u};
 *     if (muster_live_send(live, step, values) == MUSTER_LIVE_STOP) break;
 *   }
 *   muster_live_close(&live, NULL);
 *
 * A solver is a group of ranks: those of one communicator. A stream is identified by its name, which the solver and a
 * trainer's muster::Live (muster/live.hpp) both give. A sample has a number and all fields; each rank sends its own
 * block of each field. The trainer is a program of the same job, or other ranks of this program. Samples go through
 * shared memory to ranks of the trainer on the same node, and by MPI to others. muster_live_connect() finds a trainer
 * in another job on the node instead. Without it, the first call of muster_live_open(), muster_live_world() or
 * muster::Live in a process is collective over MPI_COMM_WORLD, and every rank makes one: ranks that neither simulate
 * nor train call muster_live_world(NULL).
 *
 * Functions marked collective are called by all ranks of the solver in the same order, and return the same code on all
 * of them. MPI is called inside of these functions only, by the calling thread: MPI_THREAD_SINGLE is enough. No
 * function prints, ends the process, or waits for a trainer longer than timeout_s. */
#ifndef MUSTER_LIVE_H
#define MUSTER_LIVE_H

#include <mpi.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MUSTER_LIVE_API __attribute__((visibility("default")))
#else
#define MUSTER_LIVE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* A solver's end of a stream. */
typedef struct muster_live muster_live;

/* What a call returns. */
enum {
  MUSTER_LIVE_OK = 0,         /* done; the sample was sent */
  MUSTER_LIVE_DROPPED = 1,    /* the rule has dropped this sample */
  MUSTER_LIVE_STOP = 2,       /* the trainer asks the solver to stop; it takes no more samples */
  MUSTER_LIVE_NO_TRAINER = 3, /* no trainer has come, or it has ended; later sends return this, too */
  MUSTER_LIVE_ERROR = 4       /* muster_live_text() says what was wrong; later sends return this, too */
};

/* The type of a field's values. */
enum {
  MUSTER_LIVE_FLOAT32 = 0,
  MUSTER_LIVE_FLOAT64 = 1,
  MUSTER_LIVE_INT32 = 2,
  MUSTER_LIVE_INT64 = 3,
  MUSTER_LIVE_UINT8 = 4
};

/* A solver's rule: what a send does when the queue to the trainer is full. */
enum {
  MUSTER_LIVE_WAIT = 0,        /* waits, at most timeout_s; then the sample is dropped */
  MUSTER_LIVE_DROP_OLDEST = 1, /* drops the oldest sample; waits as above if the trainer is taking that one */
  MUSTER_LIVE_DROP_NEWEST = 2  /* drops the sample that is being sent */
};

enum { MUSTER_LIVE_MAX_DIMS = 8, MUSTER_LIVE_MAX_FIELDS = 32, MUSTER_LIVE_MAX_NAME = 40 };

/* A zero in any field means the default. The same on all ranks of a solver. */
typedef struct muster_live_options {
  int solver;       /* this solver's number among those of the stream, from 0 on */
  int64_t bytes;    /* bytes of memory of each rank for samples on their way to the trainer; default: 64 MiB */
  int rule;         /* MUSTER_LIVE_WAIT or another rule */
  double timeout_s; /* how long to wait for the trainer; default: 300 s */
} muster_live_options;

/* Counts of a solver's samples; those not dropped have reached the trainer or are on their way. */
typedef struct muster_live_counts {
  int64_t sent;    /* samples given to muster_live_send(), those dropped included */
  int64_t dropped; /* by the rule */
  double wait_s;   /* seconds for which this rank has waited for room in the queue */
} muster_live_counts;

/* Splits MPI_COMM_WORLD by program: `part` gets the ranks of this program, as on one side of the colon in
 * `mpirun -n 6 ./heat : -n 2 ./train`. The caller frees it. NULL: this rank takes part and gets no communicator.
 * Collective over MPI_COMM_WORLD. */
MUSTER_LIVE_API int muster_live_world(MPI_Comm* part);

/* Opens the stream `name`: letters, digits, '-', '_' and '.', at most MUSTER_LIVE_MAX_NAME of them. `comm` remains the
 * caller's. `options` may be NULL. Waits for the trainer, at most timeout_s. Sets `*live` whatever it returns, unless
 * memory is short; without a trainer all later calls on it return MUSTER_LIVE_NO_TRAINER. From now on the process
 * ignores SIGUSR1 and SIGUSR2 unless it handles them: they ask a trainer to save and stop, and launchers send them to
 * all ranks. Collective over `comm`. */
MUSTER_LIVE_API int muster_live_open(MPI_Comm comm, const char* name, const muster_live_options* options,
                                     muster_live** live);

/* Opens the stream of a trainer in another job of this user on this node, which writes `file`
 * (LiveOptions::connect_file of muster/live.hpp). Otherwise like muster_live_open(), but does not use MPI_COMM_WORLD.
 * When the trainer has ended, each muster_live_send() looks whether one has come back with this file, and sends its
 * sample to that one: then numbers may begin anew, and muster_live_next() says where. Collective over `comm`. */
MUSTER_LIVE_API int muster_live_connect(MPI_Comm comm, const char* file, const char* name,
                                        const muster_live_options* options, muster_live** live);

/* Declares a number that all samples of this solver have as a column, such as a coefficient. The same on all ranks.
 * Local; before the first sample. */
MUSTER_LIVE_API int muster_live_parameter(muster_live* live, const char* name, double value);

/* Declares a field: an array of `dims` dimensions, 1 to MUSTER_LIVE_MAX_DIMS, of the extents `global`, in C order. This
 * rank has the block of the extents `local` that begins at `offset`. The blocks of all ranks tile the array; a block
 * may be empty. The same names, types and `global` on all ranks, in the same order. Local; before the first sample. */
MUSTER_LIVE_API int muster_live_field(muster_live* live, const char* name, int type, int dims, const int64_t* global,
                                      const int64_t* offset, const int64_t* local);

/* Says that this rank's array of a declared field is larger than its block, by `before` and `after` values in each
 * dimension, which are not sent: halos, or ghost cells. Local; before the first sample. */
MUSTER_LIVE_API int muster_live_halo(muster_live* live, const char* name, const int64_t* before, const int64_t* after);

/* Sends a sample. `number` is larger than that of the sample before, and the same on all ranks. `values` has a pointer
 * for each field, in the order in which they were declared, to the field's whole array, halos included. The values are
 * copied before it returns. The first call checks the declarations of all ranks. Collective. */
MUSTER_LIVE_API int muster_live_send(muster_live* live, int64_t number, const void* const* values);

/* Lets samples that go to another node move on, as every call with the stream does. Between the samples of a slow
 * solver it keeps the trainer from waiting. Local. */
MUSTER_LIVE_API int muster_live_progress(muster_live* live);

/* Sets `number` to the sample to go on with: 0 in a fresh run. If the trainer goes on from a checkpoint, it is the one
 * after the last sample that the checkpoint has of this solver. Waits until the trainer knows it, at most
 * timeout_s. Declare everything before. Collective. */
MUSTER_LIVE_API int muster_live_next(muster_live* live, int64_t* number);

/* Sets `version` and `bytes` to those of the newest weights that the trainer has sent, such as the bytes of a
 * .safetensors file, and copies them to `buffer` if it has room: the former value of `bytes`, which may be 0. Version
 * 0: there are none yet. The same on all ranks. Waits for weights on their way, at most timeout_s. Collective. */
MUSTER_LIVE_API int muster_live_weights(muster_live* live, int64_t* version, void* buffer, int64_t* bytes);

/* Why the stream has ended, with the remedy, after MUSTER_LIVE_ERROR or MUSTER_LIVE_NO_TRAINER; otherwise empty. The
 * same on all ranks. Valid until the stream is closed. */
MUSTER_LIVE_API const char* muster_live_text(const muster_live* live);

/* Ends this solver's samples and sets *live to NULL. Samples on their way on this node still reach the trainer, even
 * when this process has ended. Waits until those for other nodes have left, at most timeout_s; then they are dropped.
 * `counts` may be NULL. Collective, but not after an error. */
MUSTER_LIVE_API int muster_live_close(muster_live** live, muster_live_counts* counts);

#ifdef __cplusplus
} /* extern "C" */

#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

namespace muster {

/// The same for C++. What MUSTER_LIVE_ERROR reports is thrown as std::runtime_error; the other codes are returned.
class LiveSender {
 public:
  /// `connect_file`: null if the trainer is in this job; otherwise as for muster_live_connect().
  LiveSender(MPI_Comm comm, const char* name, const muster_live_options& options = {},
             const char* connect_file = nullptr) {
    const int code = connect_file == nullptr ? muster_live_open(comm, name, &options, &live_)
                                             : muster_live_connect(comm, connect_file, name, &options, &live_);
    if (live_ == nullptr) throw std::runtime_error("opening a live stream: there is not enough memory");
    try {
      check(code);
    } catch (...) {
      muster_live_close(&live_, nullptr);
      throw;
    }
  }
  LiveSender(LiveSender&& other) noexcept : live_(std::exchange(other.live_, nullptr)) {}
  LiveSender& operator=(LiveSender&& other) noexcept {
    std::swap(live_, other.live_);
    return *this;
  }
  ~LiveSender() { muster_live_close(&live_, nullptr); }

  void parameter(const char* name, double value) { check(muster_live_parameter(live_, name, value)); }
  void field(const char* name, int type, const std::vector<std::int64_t>& global,
             const std::vector<std::int64_t>& offset, const std::vector<std::int64_t>& local) {
    if (offset.size() != global.size() || local.size() != global.size())
      throw std::runtime_error("declaring a field: global, offset and local have different lengths");
    check(muster_live_field(live_, name, type, static_cast<int>(global.size()), global.data(), offset.data(),
                            local.data()));
  }
  void halo(const char* name, const std::vector<std::int64_t>& before, const std::vector<std::int64_t>& after) {
    check(muster_live_halo(live_, name, before.data(), after.data()));
  }
  int progress() { return check(muster_live_progress(live_)); }
  int send(std::int64_t number, std::initializer_list<const void*> values) {
    return check(muster_live_send(live_, number, values.begin()));
  }
  /// Puts the newest weights into `weights`, unless they are `version`. Returns their version, 0 if there are none yet.
  std::int64_t weights(std::vector<char>& weights, std::int64_t version = 0) {
    std::int64_t newest = 0, bytes = 0;
    check(muster_live_weights(live_, &newest, nullptr, &bytes));
    while (newest != 0 && newest != version) {
      std::vector<char> came(static_cast<std::size_t>(bytes));
      check(muster_live_weights(live_, &newest, came.data(), &bytes));
      if (newest == 0 || bytes != static_cast<std::int64_t>(came.size())) continue; /* gone, or there are newer ones */
      weights.swap(came);
      break;
    }
    return newest;
  }
  std::int64_t next() {
    std::int64_t number = 0;
    check(muster_live_next(live_, &number));
    return number;
  }
  muster_live_counts close() {
    muster_live_counts counts{};
    muster_live_close(&live_, &counts);
    return counts;
  }

 private:
  int check(int code) const {
    if (code == MUSTER_LIVE_ERROR) throw std::runtime_error(muster_live_text(live_));
    return code;
  }

  muster_live* live_ = nullptr;
};

} /* namespace muster */
#endif

#endif
