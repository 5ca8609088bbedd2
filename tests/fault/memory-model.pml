/* A model of the flags by which the ranks of a node tell each other about shared memory, for the model checker spin:
 * node/operation.hpp with the collectives, with -DBUCKETS node/bucket_reduction.cpp, and with -DSLOTS
 * node/shared_slots.cpp. `tests/fault/memory-model` runs it. Memory is as weak as C++ allows it to be: a rank knows what another one did before a store only if the store was a
 * release, its load was an acquire, and it read that store or a later one. Every rank has a vector clock of what it knows
 * of the others. The model verifies for every order of the steps and every plan of operations:
 *   1. of two accesses to the same memory, one of them a write, the later one's rank knows of the earlier one
 *   2. what is read is what was written for this phase or round
 *   3. no rank waits for ever
 * Steps between two flags are atomic here, since the clocks find a race in any order of them. ChunkCounter is relaxed, so
 * that claiming a chunk tells a rank nothing.
 * -DMUTATION=NAME breaks the protocol at one place; spin must then find an error.
 */
#ifndef RANKS
#define RANKS 2 /* or 3 */
#endif
#ifndef PHASES
#define PHASES 4 /* or rounds */
#endif

#define arrived_stored_relaxed 1
#define arrived_loaded_relaxed 2
#define finished_stored_relaxed 3
#define finished_loaded_relaxed 4
#define one_buffer 5        /* a phase writes to the buffer of the phase before */
#define no_wait_to_arrive 6 /* a rank arrives although others have not arrived in the phase before */
#define no_wait_at_the_end 7
#define ready_stored_relaxed 8
#define ready_loaded_relaxed 9
#define given_back_relaxed 10
#define claimed_relaxed 11
#define claimed_without_looking 12 /* a store in place of a compare-and-swap */
#ifndef MUTATION
#define MUTATION 0
#endif

#if MUTATION == one_buffer
#define half(n) 0
#else
#define half(n) ((n) & 1)
#endif

#define each(x) for (x : 0 .. RANKS - 1)
byte clock[RANKS * RANKS]; /* [rank][other]: the last step of the other that the rank knows of */
#define known(rank, other) clock[(rank) * RANKS + (other)]

/* --- A flag of each rank: a number that only this rank stores, and that only grows --- */

#define BUCKET_COUNT 2
#define NUMBERS (PHASES * BUCKET_COUNT + 1)
typedef Flag {
  byte now;
  bool stored[NUMBERS];           /* the numbers in between may be left out */
  byte what[NUMBERS * RANKS];     /* [number]: the clock of a release store */
}
Flag flags[3 * RANKS];
#define arrived 0
#define finished 1
#define announced 2
#define flag_of(kind, rank) flags[(kind) * RANKS + (rank)]

inline store(kind, number, is_release) {
  flag_of(kind, me).now = number;
  flag_of(kind, me).stored[number] = true;
  if
  :: is_release -> each(x) { flag_of(kind, me).what[(number) * RANKS + x] = known(me, x) }
  :: else
  fi;
  known(me, me)++
}

#define is(kind, rank, least) (flag_of(kind, rank).now >= (least))
#if RANKS == 2
#define all_are(kind, least) (is(kind, 0, least) && is(kind, 1, least))
#else
#define all_are(kind, least) (is(kind, 0, least) && is(kind, 1, least) && is(kind, 2, least))
#endif

/* A load that finds `other`'s flag at `least` or beyond. It is the first such store that it finds: a later one would only
 * tell the rank more. */
inline load(kind, other, least, is_acquire) {
  seen = least;
  do
  :: flag_of(kind, other).stored[seen] -> break
  :: else -> seen++
  od;
  if
  :: is_acquire -> each(x) {
       if
       :: flag_of(kind, other).what[seen * RANKS + x] > known(me, x) ->
            known(me, x) = flag_of(kind, other).what[seen * RANKS + x]
       :: else
       fi
     }
  :: else
  fi;
  seen = 0
}

/* Waits until the flags of all ranks are at `least` or beyond. */
inline await_all(kind, least, is_acquire) {
  all_are(kind, least);
  each(other) { load(kind, other, least, is_acquire) }
}

/* --- Memory that is not atomic, or that need not be: the words of calls --- */

typedef Memory {
  byte value;
  byte writer, written;       /* the last write: its rank, and the time on that rank's clock */
  byte read[RANKS];           /* the last read of each rank */
}

inline read_memory(memory, expected) {
  assert(known(me, memory.writer) >= memory.written); /* knows of the last write */
  assert(memory.value == expected);
  memory.read[me] = known(me, me)
}

inline write_memory(memory, new) {
  assert(known(me, memory.writer) >= memory.written);
  each(x) { assert(known(me, x) >= memory.read[x]) } /* knows of all reads */
  memory.value = new;
  memory.writer = me;
  memory.written = known(me, me)
}

#define begin_rank each(x) { known(me, x) = 0 } known(me, me) = 1

#ifdef SLOTS

/* --- SharedSlots: one slot, which a rank may fill, give back, or be killed in --- */

#define is_empty 0
#define is_claimed 1
#define is_filled 2
Memory slot;
byte state;
byte what[RANKS]; /* the clock of the state's last release */
byte killed;

inline set_state(new, is_release) {
  state = new;
  each(x) { what[x] = (is_release -> known(me, x) : 0) }
  known(me, me)++
}
inline acquire_state(is_acquire) {
  if
  :: is_acquire -> each(x) {
       if
       :: what[x] > known(me, x) -> known(me, x) = what[x]
       :: else
       fi
     }
  :: else
  fi
}

/* Each rank looks for the slot PHASES times. A look that finds nothing, or a state that is out of date, is no error: the
 * rank then has the data of its own. The one compare-and-swap always sees the present state. */
proctype Rank(byte me) {
  byte look, x;
  for (look : 1 .. PHASES) {
    if
    :: atomic { /* find() */
         state == is_filled ->
         acquire_state(MUTATION != ready_loaded_relaxed);
         read_memory(slot, 1)
       }
    :: atomic { /* claim() */
         state == is_empty || MUTATION == claimed_without_looking ->
         acquire_state(MUTATION != claimed_relaxed);
         set_state(is_claimed, false)
       }
       atomic { write_memory(slot, 2) } /* begins to decode */
       if
       :: atomic { write_memory(slot, 1); set_state(is_filled, MUTATION != ready_stored_relaxed) }
       :: atomic { set_state(is_empty, MUTATION != given_back_relaxed) } /* an error */
       :: atomic { killed < RANKS - 1 -> killed++; break }
       fi
    :: true
    fi
  }
}

init {
  byte x, me;
  atomic {
    each(me) { begin_rank }
    each(me) { run Rank(me) }
  }
}

#elif !defined(BUCKETS)

/* --- Operation, and the collectives --- */

#define barrier 1
#define broadcast 2       /* from rank 0 */
#define reduce 3          /* to rank 0 */
#define direct 4          /* all_reduce() of little data */
#define sliced 5          /* all_reduce() through the buffers */
#define in_place 6        /* all_reduce() in registered memory */
#define reduce_scatter 7  /* in registered memory, followed by */
#define all_gather 8
byte plan[PHASES + 1];

Memory calls[RANKS * 2];              /* [rank][phase % 2]: the word of the call, and the location of its data */
Memory staging[RANKS * 2 * RANKS];    /* [rank][phase % 2][slice] */
Memory data[RANKS * RANKS];           /* [rank][slice]: registered memory */
byte claimed;                         /* ChunkCounter: the next chunk of */
byte claims_of;                       /* the phase */
#define call_of(rank) calls[(rank) * 2 + half(phase)]
#define buffer(rank, slice) staging[((rank) * 2 + half(phase)) * RANKS + (slice)]
#define own(rank, slice) data[(rank) * RANKS + (slice)]
#define changed (phase + 100) /* what a reduction makes of the values of this phase */

inline all_arrived() {
  await_all(arrived, phase, MUTATION != arrived_loaded_relaxed);
  each(other) { read_memory(call_of(other), phase) }
}
inline finish() { store(finished, phase, MUTATION != finished_stored_relaxed) }
inline all_finished() {
  if
  :: MUTATION == no_wait_at_the_end
  :: else -> await_all(finished, phase, MUTATION != finished_loaded_relaxed)
  fi
}

proctype Rank(byte me) {
  byte phase, other, slice, x, seen, op;
  for (phase : 1 .. PHASES) {
    op = plan[phase];
    /* The user's code before the call; between reduce_scatter() and all_gather() it writes to its own slice only. */
    if
    :: op == in_place || op == reduce_scatter -> atomic { each(slice) { write_memory(own(me, slice), phase) } }
    :: op == all_gather -> atomic { write_memory(own(me, me), changed) }
    :: else
    fi;
    atomic { /* Operation::arrive() */
      if
      :: phase > 1 && MUTATION != no_wait_to_arrive ->
           await_all(arrived, phase - 1, MUTATION != arrived_loaded_relaxed)
      :: else
      fi;
      if
      :: op == direct || (op == broadcast && me == 0) || (op == reduce && me != 0) ->
           each(slice) { write_memory(buffer(me, slice), phase) }
      :: op == sliced ->
           each(slice) {
             if
             :: slice != me -> write_memory(buffer(me, slice), phase)
             :: else
             fi
           }
      :: else
      fi;
      write_memory(call_of(me), phase);
      store(arrived, phase, MUTATION != arrived_stored_relaxed)
    }
    if
    :: op == barrier -> atomic { all_arrived() }
    :: op == broadcast && me != 0 ->
         atomic {
           is(arrived, 0, phase);
           load(arrived, 0, phase, MUTATION != arrived_loaded_relaxed);
           read_memory(call_of(0), phase);
           each(slice) { read_memory(buffer(0, slice), phase) }
         }
    :: op == reduce && me == 0 ->
         atomic {
           all_arrived();
           for (other : 1 .. RANKS - 1) { each(slice) { read_memory(buffer(other, slice), phase) } }
         }
    :: op == direct ->
         atomic { all_arrived(); each(other) { each(slice) { read_memory(buffer(other, slice), phase) } } }
    :: op == sliced ->
         atomic {
           all_arrived();
           each(other) {
             if
             :: other != me -> read_memory(buffer(other, me), phase)
             :: else
             fi
           }
           write_memory(buffer(me, me), changed);
           finish()
         }
         atomic { all_finished(); each(other) { read_memory(buffer(other, other), changed) } }
    :: op == in_place ->
         atomic { all_arrived() }
         do
         :: atomic { /* claim(), and one chunk */
              if
              :: claims_of != phase -> claims_of = phase; claimed = 0
              :: else
              fi;
              if
              :: claimed < RANKS ->
                   each(other) {
                     read_memory(own(other, claimed), phase);
                     write_memory(own(other, claimed), changed)
                   }
                   claimed++
              :: else -> break
              fi
            }
         od;
         atomic { finish() }
         atomic { all_finished(); each(slice) { read_memory(own(me, slice), changed) } }
    :: op == reduce_scatter ->
         atomic {
           all_arrived();
           each(other) { read_memory(own(other, me), phase) }
           write_memory(own(me, me), changed)
         }
    :: op == all_gather ->
         atomic {
           all_arrived();
           each(other) {
             if
             :: other != me -> write_memory(own(other, me), changed)
             :: else
             fi
           }
           finish()
         }
         atomic { all_finished(); each(slice) { read_memory(own(me, slice), changed) } }
    :: else
    fi
  }
}

init {
  byte x, phase, me;
  atomic {
    for (phase : 1 .. PHASES) {
      if
      :: phase > 1 && plan[phase - 1] == reduce_scatter -> plan[phase] = all_gather
      :: else ->
           if
           :: plan[phase] = barrier
           :: plan[phase] = broadcast
           :: plan[phase] = reduce
           :: plan[phase] = direct
           :: plan[phase] = sliced
           :: plan[phase] = in_place
           :: phase < PHASES -> plan[phase] = reduce_scatter
           fi
      fi
    }
    each(me) { begin_rank }
    each(me) { run Rank(me) }
  }
}

#else

/* --- BucketReduction, with one chunk in each bucket --- */

Memory written[RANKS * 2 * BUCKET_COUNT]; /* [rank][round % 2][bucket]: the address of the bucket */
Memory words[RANKS * 2];
Memory data[RANKS * BUCKET_COUNT];
byte claimed, claims_of;
#define written_by(rank, bucket) written[((rank) * 2 + half(round)) * BUCKET_COUNT + (bucket)]
#define word_of(rank) words[(rank) * 2 + half(round)]
#define bucket_of(rank, bucket) data[(rank) * BUCKET_COUNT + (bucket)]
#define summed (round + 100)
#define next_of_round (claims_of == round -> claimed : 0)
#define after(count) ((round - 1) * BUCKET_COUNT + (count)) /* what `announced` is then */

proctype Rank(byte me) {
  byte round, mine, other, x, seen, bucket;
  for (round : 1 .. PHASES) {
    atomic { write_memory(word_of(me), round) }
    mine = 0;
    do
    :: atomic { /* announce(), after backward() has written the gradients */
         mine < BUCKET_COUNT ->
         write_memory(bucket_of(me, mine), round);
         write_memory(written_by(me, mine), round);
         mine++;
         store(announced, after(mine), MUTATION != ready_stored_relaxed)
       }
    :: atomic { /* next_chunk() */
         next_of_round < BUCKET_COUNT && all_are(announced, after(next_of_round + 1)) ->
         claimed = next_of_round;
         claims_of = round;
         each(other) { load(announced, other, after(claimed + 1), MUTATION != ready_loaded_relaxed) }
         each(other) {
           read_memory(written_by(other, claimed), round);
           read_memory(bucket_of(other, claimed), round);
           write_memory(bucket_of(other, claimed), summed)
         }
         claimed++
       }
    :: mine == BUCKET_COUNT && claims_of == round && claimed == BUCKET_COUNT -> break
    od;
    atomic { store(finished, round, MUTATION != finished_stored_relaxed) }
    atomic {
      if
      :: MUTATION == no_wait_at_the_end
      :: else -> await_all(finished, round, MUTATION != finished_loaded_relaxed)
      fi;
      for (bucket : 0 .. BUCKET_COUNT - 1) { read_memory(bucket_of(me, bucket), summed) }
      each(other) { read_memory(word_of(other), round) }
    }
  }
}

init {
  byte x, me;
  atomic {
    each(me) { begin_rank }
    each(me) { run Rank(me) }
  }
}
#endif
