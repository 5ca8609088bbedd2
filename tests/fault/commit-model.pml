/* A model of the commit protocol of checkpoints for the model checker spin: store.cpp,
 * tier.cpp and the fast tier. Ranks may be killed at any step, the disk may lose what was not synced, and calls may
 * fail on one rank. Comments name the functions that the steps stand for. `tests/fault/commit-model` runs the model. It
 * verifies for every order of the steps:
 *   1. a restored checkpoint is complete; so is every checkpoint with a published name, except for remains of a removal
 *      that a power loss interrupted
 *   2. once a report has returned, a checkpoint at least as new is restored after any crash
 *   3. a checkpoint is pruned only if a newer one is complete on the disk
 *   4. a save ends the same way on all ranks, and fails only if a fault occurred during it
 *   5. no process waits for ever
 *   6. if a start does not find a fast tier, a later start that finds it restores its checkpoint, unless the run's
 *      folder has a newer one by then
 * -DMUTATION=NAME breaks the protocol at one place; spin must then find an error.
 */
#ifndef RANKS
#define RANKS 2 /* or 3 */
#endif
#ifdef CHOSEN_AT_START
/* The explorer takes these from its environment, so that many searches need one compilation. No step changes them, which
 * "local" tells spin; otherwise it would explore more orders of the steps that read them. */
local byte KEEP = 1, REPORTS = 3, KILLS = 1, POWER_LOSSES = 1, FAULTS = 1, MUTATION;
#else
#ifndef KEEP
#define KEEP 1 /* num_to_keep */
#endif
#ifndef REPORTS
#define REPORTS 3
#endif
#ifndef KILLS
#define KILLS 1 /* how often a first rank is killed; after that the other ranks of the job may be killed at any step */
#endif
#ifndef POWER_LOSSES
#define POWER_LOSSES 1
#endif
#ifndef FAULTS
#define FAULTS 1 /* number of calls that fail */
#endif
#ifndef MUTATION
#define MUTATION 0
#endif
#endif
/* ASYNC: a save continues in the background after its report has returned, and the next report waits for it. With DROP
 * the next report does not wait but saves nothing.
 * FAST: a report returns once its checkpoint is in a fast tier; it is copied to the run's folder in the background. The
 * tier outlives the processes of its job, but a power loss may destroy it. AWAY: the number of starts that do not find
 * the tier and begin another one. */
#ifdef ASYNC
#define BEHIND
#endif
#ifdef FAST
#define BEHIND
#define first_tier 1
#else
#define first_tier 0
#endif

#define rename_before_fsync 1
#define prune_before_durable 2
#define no_agreement 3
#define answer_before_durable 4
#define fsync_again 5
#define no_rename_back 6
#define no_verification 7
#define drop_alone 8
#define remove_before_copied 9
#define trust_what_was_copied 10
#define forget_before_durable 11
#define forget_what_is_away 12

/* --- The disk ----------------------------------------------------------------------------------------------------- */

/* Kinds of names of a checkpoint's folder (tier.hpp). They are bits, because after a power loss the name may be any of
 * several. */
#define nowhere 1
#define saving 2
#define published 4
#define pruning 8
#define damaged 16

/* The content of the folder: names of files, and their bytes. The user's files behave like state.h5. */
#define state_name 1
#define manifest_name 2
#define names (state_name | manifest_name)
#define state_size 4
#define manifest_bytes 8
#define piece_bytes(rank) (16 << (rank))
#define bits (4 + RANKS)
#define whole ((1 << bits) - 1)

#ifdef AWAY
#define folders 8
byte tier[folders]; /* 0: the run's folder; 1: the fast tier; 2: an earlier job's fast tier, still listed in the note */
#else
#ifdef FAST
#define folders 6
#else
#define folders 5
#endif
bit tier[folders]; /* 0: the run's folder; 1: the fast tier */
#endif
byte place[folders] = nowhere;  /* the present kind of name */
byte may_be[folders] = nowhere; /* all kinds of names it has had since the tier's folder was last synced */
byte number[folders];           /* index of the checkpoint */
byte report_of[folders];        /* the report that it holds */
byte content[folders];          /* as processes see it */
byte durable[folders];          /* as the disk has it */
byte sync_failed[folders];      /* bits whose fsync has failed; another fsync succeeds but does nothing */
bit removal_begun[folders];     /* the removal of the folder or of its name has begun */
#define not_there folders

byte faults;

inline forget(x) {
  tier[x] = 0; number[x] = 0; report_of[x] = 0; content[x] = 0; durable[x] = 0; sync_failed[x] = 0;
  removal_begun[x] = 0
}

inline move(x, to) { place[x] = to; may_be[x] = may_be[x] | to }

inline sync_names(t) {
  d_step {
    for (i : 0 .. folders - 1) {
      if :: tier[i] == t -> may_be[i] = place[i] :: else fi;
      if :: may_be[i] == nowhere -> forget(i) :: else fi
    }
    i = 0
  }
}

/* A system call, which may fail. */
inline call() { if :: faults < FAULTS -> faults++; bad = true :: true fi }

/* The steps below do nothing if `bad` is already true: an earlier step has failed. */
inline write(x, what) {
  atomic {
    if :: !bad -> call(); if :: !bad -> content[x] = content[x] | (what) :: else fi :: else fi
  }
}

/* File::sync(), sync_folders(). */
inline fsync(x, what) {
  atomic {
    if
    :: !bad ->
      call();
      if
      :: !bad -> durable[x] = (durable[x] & ~(what)) | (content[x] & (what) & ~sync_failed[x])
      :: else ->
        sync_failed[x] = sync_failed[x] | (content[x] & ~durable[x] & (what));
        bad = (MUTATION != fsync_again)
      fi
    :: else
    fi
  }
}

inline rename_new(x, to) {
  atomic {
    for (i : 0 .. folders - 1) {
      if
      :: tier[i] == tier[x] && place[i] == to && to != damaged && number[i] == number[x] -> bad = true
      :: else
      fi
    }
    i = 0;
    if :: !bad -> call() :: else fi;
    if :: !bad -> move(x, to) :: else fi
  }
}

/* Syncs the tier's folder. */
inline sync_directory(t) {
  atomic { if :: !bad -> call(); if :: !bad -> sync_names(t) :: else fi :: else fi }
}

/* Files are removed in the order in which the folder lists them. A failure is only a warning; the next start removes
 * the rest. */
inline remove_folder(x) {
  removal_begun[x] = true;
  do
  :: content[x] & state_name -> content[x] = content[x] & ~state_name
  :: content[x] & manifest_name -> content[x] = content[x] & ~manifest_name
  :: !(content[x] & names) -> break
  od;
  atomic { move(x, nowhere); x = 0 }
}

/* --- Listing the disk: Tier::list() ------------------------------------------------------------------------------- */

/* Finds the newest folder of the tier with one of these kinds of names. */
inline find(t, places, x) {
  d_step {
    x = not_there;
    for (i : 0 .. folders - 1) {
      if
      :: tier[i] == t && (place[i] & (places)) && x == not_there -> x = i
      :: tier[i] == t && (place[i] & (places)) && x != not_there && number[i] > number[x] -> x = i
      :: else
      fi
    }
    i = 0
  }
}

inline find_saving(t, index, x) {
  d_step {
    x = not_there;
    for (i : 0 .. folders - 1) {
      if :: tier[i] == t && place[i] == saving && number[i] == index -> x = i :: else fi
    }
    i = 0
  }
}

inline find_next_index() {
  d_step {
    next_index = 0;
    for (i : 0 .. folders - 1) {
      if
      :: tier[i] == 0 && place[i] != nowhere && number[i] >= next_index -> next_index = number[i] + 1
      :: else
      fi
    }
    i = 0
  }
}

/* Finds a checkpoint that was set aside, is complete, and is newer than all published ones. */
inline find_whole_again(x) {
  d_step {
    find(0, published, n);
    x = not_there;
    for (i : 0 .. folders - 1) {
      if
      :: tier[i] == 0 && place[i] == damaged && content[i] == whole && (n == not_there || number[i] > number[n]) -> x = i
      :: else
      fi
    }
    i = 0; n = 0
  }
}

#define counts(x) \
  (tier[x] == 0 && place[x] == published && (content[x] & manifest_name) && (content[x] & manifest_bytes))
#define prunable(x) (counts(x) && x != slot)
inline count_prunable(x) {
  d_step {
    x = 0;
    for (i : 0 .. folders - 1) {
      if :: counts(i) -> x++ :: else fi
    }
    i = 0
  }
}

/* Finds another checkpoint in the fast tier than the one being copied: an older one that could not be copied. */
inline find_older(x) {
  d_step {
    x = not_there;
    for (i : 0 .. folders - 1) {
      if :: tier[i] == 1 && place[i] == published && i != source -> x = i :: else fi
    }
    i = 0
  }
}

inline lose(x) { place[x] = nowhere; may_be[x] = nowhere; forget(x) }

/* All fast tiers are gone, also those of earlier jobs: their nodes are lost, or the note no longer lists them. */
inline lose_fast_tier() {
  d_step {
    for (i : 0 .. folders - 1) {
      if :: tier[i] > 0 -> lose(i) :: else fi
    }
    i = 0; source = 0; slot = not_there
  }
}

#ifdef AWAY
/* FastTiers::release() for an earlier job's tier. */
inline lose_earlier_tier() {
  d_step {
    for (i : 0 .. folders - 1) {
      if :: tier[i] == 2 -> lose(i) :: else fi
    }
    i = 0
  }
}

/* The note still lists a tier that this start does not find. A warning says that the run continues from its folder. */
inline keep_fast_tier() {
  d_step {
    for (i : 0 .. folders - 1) {
      if
      :: tier[i] == 1 && place[i] == published && MUTATION != forget_what_is_away -> tier[i] = 2
      :: tier[i] == 1 && (place[i] != published || MUTATION == forget_what_is_away) -> lose(i)
      :: else
      fi
    }
    i = 0; source = 0;
    if :: committed > kept -> kept = committed :: else fi;
    committed = in_run
  }
}
#endif

/* --- The ranks ---------------------------------------------------------------------------------------------------- */

bit dead[RANKS];
bit job;              /* flips at each start */
byte processes_ended; /* of the job */

/* Collectives among the ranks' savers, and among their trainers: how many each process has reached, and its last eight
 * votes. */
#define savers 0
#define trainers 1
byte arrivals[2 * RANKS];
bit votes[2 * RANKS * 8];
#define arrivals_of(group, rank) arrivals[(group) * RANKS + (rank)]
#define vote_of(group, rank) votes[((group) * RANKS + (rank)) * 8 + arrivals_of(group, me) % 8]
#define has_arrived(group, rank) (arrivals_of(group, rank) >= arrivals_of(group, me))

#if RANKS == 2
#define some_dead (dead[0] || dead[1])
#define some_alive !(dead[0] && dead[1])
#define all_arrived(group) (has_arrived(group, 0) && has_arrived(group, 1))
#define any_vote(group) (vote_of(group, 0) || vote_of(group, 1))
#else
#define some_dead (dead[0] || dead[1] || dead[2])
#define some_alive !(dead[0] && dead[1] && dead[2])
#define all_arrived(group) (has_arrived(group, 0) && has_arrived(group, 1) && has_arrived(group, 2))
#define any_vote(group) (vote_of(group, 0) || vote_of(group, 1) || vote_of(group, 2))
#endif

/* run_on_all(): `bad` becomes true if it was true on any rank. If a rank is lost, an alarm ends the others. */
inline run_on_all(group) {
  atomic { arrivals_of(group, me)++; vote_of(group, me) = bad };
  if
  :: atomic { all_arrived(group) -> bad = any_vote(group) }
  :: some_dead -> goto alarmed
  fi
}

/* run_on_root(): `bad` becomes rank 0's value. Rank 0 does not wait. */
inline run_on_root(group) {
  atomic { arrivals_of(group, me)++; if :: me == 0 -> vote_of(group, me) = bad :: else fi };
  if
  :: atomic { has_arrived(group, 0) -> bad = vote_of(group, 0) }
  :: me != 0 && some_dead -> goto alarmed
  fi
}

/* The report that a rank's trainer has asked its saver to save, and the saver's answer. */
#define nothing 0
#define pending 1
#define saved 2
#define failed 3
#define the_end 4
byte asked[RANKS];
byte answer[RANKS];
bit copying[RANKS]; /* from the fast tier */
bit copied[RANKS];

byte slot = not_there; /* the folder that is being saved */
byte source;           /* the folder in the fast tier that is being copied */
byte next_index;       /* CheckpointStore::next_index_ */
byte found;            /* the report that was restored */
byte committed;        /* the newest report that a training function knows to be saved */
byte in_run;           /* the newest report that it knows to be in the run's folder */
byte kept;             /* the newest committed report in a tier that was not found but is still in the note */
bit away;              /* this start does not find the fast tier */

/* For the last three saves, the report and the first rank's answer; three, because rank 0 may be two saves ahead. And
 * the number of faults before the last save. */
byte answered[3];
byte first_answer[3];
byte faults_before;

/* Tier::abandon(). */
inline abandon(t, index) {
  find_saving(t, index, f);
  if :: f != not_there -> remove_folder(f) :: else -> f = 0 fi
}

/* Tier::begin(). */
inline begin(t, index, report) {
  abandon(t, index);
  atomic {
    call();
    if
    :: !bad ->
      for (i : 0 .. folders - 1) { if :: may_be[i] == nowhere -> slot = i :: else fi }
      i = 0;
      assert(slot != not_there); /* the model has enough folders */
      tier[slot] = t; number[slot] = index; report_of[slot] = report;
      move(slot, saving)
    :: else
    fi
  }
}

/* prune(): KEEP checkpoints stay, the newest among them. A score decides about the others, so any of them may go. */
inline prune() {
  do
  :: atomic {
      count_prunable(f);
      if
      :: f > KEEP && !bad ->
        if
        :: prunable(0) -> f = 0
        :: prunable(1) -> f = 1
        :: prunable(2) -> f = 2
        :: prunable(3) -> f = 3
        :: prunable(4) -> f = 4
#ifdef FAST
        :: prunable(5) -> f = 5
#endif
#ifdef AWAY
        :: prunable(6) -> f = 6
        :: prunable(7) -> f = 7
#endif
        fi
      :: else -> f = 0; bad = false; break /* a failure is only a warning */
      fi;
      /* Tier::remove(): first renamed to a name that readers ignore, then removed file by file. */
      rename_new(f, pruning);
      if
      :: !bad ->
        removal_begun[f] = true;
        assert(place[slot] == published && content[slot] == whole);
        assert(MUTATION || (may_be[slot] == published && durable[slot] == whole))
      :: else -> f = 0
      fi
    };
    if :: !bad -> remove_folder(f) :: else fi
  od
}

/* Tier::publish(). */
inline publish() {
  if :: MUTATION != rename_before_fsync -> fsync(slot, names) :: else fi;
  rename_new(slot, published);
  if
  :: MUTATION == rename_before_fsync -> fsync(slot, names)
  :: MUTATION == prune_before_durable && !bad -> prune()
  :: else
  fi;
  atomic {
    if
    :: !bad && MUTATION != answer_before_durable ->
      sync_directory(tier[slot]);
      if :: bad -> removal_begun[slot] = true :: else fi;
      if :: bad && MUTATION != no_rename_back -> move(slot, saving) :: else fi
    :: else
    fi
  }
}

/* CheckpointStore::commit(). Save::prepare() is left out: it does not touch the disk, and its ranks agree as in Save::write(). */
inline commit() {
  /* Save::write(): Tier::begin() and create_state_file() on rank 0, */
  if
  :: me == 0 ->
    faults_before = faults;
    begin(first_tier, next_index, asked[0]);
    write(slot, state_name | state_size)
  :: else
  fi;
  run_on_root(savers);
  if :: bad -> goto undo :: else fi;
  /* then StateWriter::write() and copy_file() on all ranks. */
  write(slot, piece_bytes(me));
  fsync(slot, state_size | piece_bytes(me));
  bad_here = bad;
  run_on_all(savers);
  if
  :: MUTATION == no_agreement -> bad = bad_here
  :: else -> bad_here = false; if :: bad -> goto undo :: else fi
  fi;
  /* Save::publish() */
  if
  :: me == 0 ->
    write(slot, manifest_name | manifest_bytes);
    fsync(slot, manifest_bytes);
    publish();
#ifndef FAST
    if :: !bad && MUTATION != prune_before_durable -> prune() :: else fi
#endif
  :: else
  fi;
  run_on_root(savers);
  atomic {
    bad = bad || bad_here; bad_here = false;
    if
    :: bad -> goto undo
    :: !bad && me == 0 -> next_index++
    :: else
    fi;
    give_answer(saved);
    goto committed_or_not
  };
undo:
  if :: me == 0 -> assert(faults > faults_before); abandon(first_tier, next_index) :: else fi;
  give_answer(failed);
committed_or_not:
  skip
}

inline give_answer(with) {
  atomic {
    f = asked[me] % 3;
    if
    :: answered[f] == asked[me] -> assert(first_answer[f] == with)
    :: else -> answered[f] = asked[me]; first_answer[f] = with
    fi;
    f = 0; bad = false;
#ifdef FAST
    copying[me] = (with == saved);
    if :: me == 0 && with == saved -> source = slot :: else fi;
#endif
    if :: me == 0 -> slot = not_there :: else fi;
    answer[me] = with
  }
}

#ifdef FAST
/* Tier::remove() of the fast tier, in FastTiers::clear(). */
inline remove_fast(x) {
  rename_new(x, pruning);
  if :: !bad -> remove_folder(x) :: else fi;
  bad = false
}

/* copy_to_run_folder(), and the steps after it in FastTiers::settle() and CheckpointStore::settle(). */
inline copy_to_run_folder() {
  if
  :: me == 0 ->
    find_older(f);
    if :: f != not_there -> remove_fast(f) :: else fi;
    f = 0;
    begin(0, number[source], report_of[source]);
    write(slot, state_name | state_size)
  :: else
  fi;
  run_on_root(savers);
  if :: bad -> goto give_up :: else fi;
  write(slot, piece_bytes(me));
  fsync(slot, state_size | piece_bytes(me));
  run_on_all(savers);
  if :: bad -> goto give_up :: else fi;
  if
  :: me == 0 ->
    if :: MUTATION == remove_before_copied -> remove_fast(source) :: else fi;
    write(slot, manifest_name | manifest_bytes);
    fsync(slot, manifest_bytes);
    publish();
    if
    :: !bad ->
#ifdef AWAY
      lose_earlier_tier(); kept = 0;
#endif
      if :: MUTATION != remove_before_copied -> remove_fast(source) :: else fi;
      prune()
    :: else
    fi
  :: else
  fi;
  run_on_root(savers);
  if :: bad -> goto give_up :: else fi;
  copied[me] = true;
  goto copied_or_not;
give_up:
  if :: me == 0 -> abandon(0, number[source]) :: else fi;
copied_or_not:
  atomic { bad = false; if :: me == 0 -> slot = not_there; source = 0 :: else fi; copying[me] = false }
}

/* copy_newest() of this tier; one process does the steps of all ranks. A checkpoint need not be copied if the run's
 * folder has it intact, or has a newer one. */
inline copy_newest(t) {
  atomic {
    find(t, published, source);
    find(0, published, f);
    if
    :: source == not_there || content[source] != whole -> f = not_there; source = 0
    :: source != not_there && content[source] == whole && f != not_there && number[f] >= number[source] &&
         (content[f] == whole || number[f] > number[source] || MUTATION == trust_what_was_copied) ->
      f = not_there; source = 0
    :: else ->
      if :: f != not_there && number[f] < number[source] -> f = not_there :: else fi;
      needed = true
    fi
  };
  if
  :: f != not_there ->
    /* Tier::quarantine() */
    rename_new(f, damaged);
    sync_directory(0);
    if :: bad -> goto lost :: else fi
  :: else
  fi;
  f = 0;
  if
  :: needed ->
    needed = false;
    begin(0, number[source], report_of[source]);
    if :: bad -> goto lost :: else fi;
    write(slot, whole & ~(manifest_name | manifest_bytes));
    fsync(slot, whole & ~(names | manifest_bytes));
    write(slot, manifest_name | manifest_bytes);
    fsync(slot, manifest_bytes);
    publish();
    if :: bad -> abandon(0, number[source]); goto lost :: else fi;
    slot = not_there
  :: else
  fi
}

inline finish_copying() {
  copy_newest(1);
#ifdef AWAY
  copy_newest(2);
#endif
  /* Once the note no longer lists the tier, it is not found again. So everything in the run's folder must be durable
     before, also a name that a killed job has given. */
  if :: MUTATION != forget_before_durable -> sync_directory(0) :: else fi;
  if :: bad -> goto lost :: else fi;
  lose_fast_tier()
}
#endif

/* The report waits for the result of the last save. */
inline await_answer() {
  atomic {
    answer[me] != pending;
    if :: answer[me] == saved && asked[me] > committed -> committed = asked[me] :: else fi;
    if :: first_tier == 0 -> in_run = committed :: else fi;
    answer[me] = nothing
  }
}

/* The report waits for the result of the last copying. */
inline await_copy() {
  atomic {
    !copying[me];
    if :: copied[me] && asked[me] > in_run -> in_run = asked[me] :: else fi;
    copied[me] = false
  }
}

/* CheckpointStore::CheckpointStore() and CheckpointStore::newest(), on rank 0. A failure ends the job. */
inline restore() {
#ifdef AWAY
  if
  :: away -> keep_fast_tier()
  :: else -> finish_copying()
  fi;
#else
#ifdef FAST
  finish_copying();
#endif
#endif
  atomic { find_next_index() };
  do
  :: atomic { find(0, saving | pruning, f); if :: f == not_there -> f = 0; break :: else fi };
    remove_folder(f)
  od;
  /* CheckpointStore::restore_repaired() */
  do
  :: atomic { find_whole_again(f); if :: f == not_there -> f = 0; break :: else fi };
    rename_new(f, published);
    sync_directory(0);
    if :: bad -> goto lost :: else fi
  od;
  do
  :: atomic {
      find(0, published, f);
      if
      :: f == not_there -> f = 0; found = 0; break /* the code refuses to start here if all are damaged */
      :: f != not_there && (content[f] == whole || MUTATION == no_verification) ->
        assert(content[f] == whole);
        found = report_of[f]; f = 0;
        break
      :: else
      fi
    };
    /* Tier::quarantine() */
    rename_new(f, damaged);
    sync_directory(0);
    if :: bad -> goto lost :: else fi
  od;
  assert(found >= committed);
  if :: !away -> assert(found >= kept); kept = 0 :: else fi
}

/* train/resume.cpp, followed by a training function that reports after each step. */
proctype trainer(byte me) {
  byte i, f, n, step;
  bit bad, bad_here, needed, start;
again:
  {
    if :: me == 0 -> restore() :: else fi;
    run_on_root(trainers);
    step = found;
    do
    :: step < REPORTS ->
      step++;
#ifdef ASYNC
#ifdef DROP
      bad = (answer[me] == pending || copying[me]);
      if :: MUTATION != drop_alone -> run_on_all(trainers) :: else fi;
      if :: bad -> bad = false; goto dropped :: else fi;
#endif
      await_answer();
      await_copy();
      atomic { asked[me] = step; answer[me] = pending };
    dropped:
      skip
#else
#ifdef FAST
      await_copy();
      atomic { asked[me] = step; answer[me] = pending };
#else
      asked[me] = step;
      commit();
#endif
      await_answer()
#endif
    :: else -> break
    od;
#ifdef BEHIND
#ifdef ASYNC
    await_answer();
#endif
    await_copy();
    answer[me] = the_end;
#endif
    goto ended;
  alarmed:
#ifndef BEHIND
    /* The catch block of CheckpointStore::commit(), then the end of the job. */
    if :: me == 0 && arrivals_of(savers, 0) > 0 -> abandon(0, next_index) :: else fi;
#endif
  lost:
    dead[me] = true;
    false;
  ended:
    skip
  } unless { dead[me] };
  atomic {
    i = 0; f = 0; n = 0; step = 0; bad = false; bad_here = false; needed = false; start = job; processes_ended++
  };
end_of_job:
  atomic { job != start -> start = 0; goto again }
}

#ifdef BEHIND
proctype saver(byte me) {
  byte i, f;
  bit bad, bad_here, start;
again:
  {
    do
    :: answer[me] == the_end -> goto ended
    :: answer[me] == pending ->
      commit();
#ifdef FAST
      if :: copying[me] -> copy_to_run_folder() :: else fi
#endif
    od;
  alarmed:
    if
    :: me == 0 && copying[me] -> abandon(0, number[source])
    :: me == 0 && !copying[me] -> abandon(first_tier, next_index)
    :: else
    fi;
    dead[me] = true;
    false;
  ended:
    skip
  } unless { dead[me] };
  atomic { i = 0; f = 0; bad = false; bad_here = false; start = job; processes_ended++ };
end_of_job:
  atomic { job != start -> start = 0; goto again }
}
#define processes (2 * RANKS)
#else
#define processes RANKS
#endif

/* --- Kills and power losses --------------------------------------------------------------------------------------- */

/* Two folders cannot have one name: folders before i have theirs already. */
#define taken_by(x, name) (x < i && tier[x] == tier[i] && place[x] == name && number[x] == number[i])
#define taken(name) \
  (taken_by(0, name) || taken_by(1, name) || taken_by(2, name) || taken_by(3, name) || taken_by(4, name) || \
   taken_by_later(name))
#ifdef AWAY
#define taken_by_later(name) (taken_by(5, name) || taken_by(6, name))
#else
#define taken_by_later(name) false
#endif
#define may_have(name) ((may_be[i] & name) && !taken(name))

inline lose_power() {
#ifdef FAST
  if :: lose_fast_tier(); committed = in_run; kept = 0 :: true fi;
#endif
  for (i : 0 .. folders - 1) {
    if
    :: may_be[i] & nowhere -> place[i] = nowhere
    :: may_have(saving) -> place[i] = saving
    :: may_have(published) -> place[i] = published
    :: may_have(pruning) -> place[i] = pruning
    :: may_be[i] & damaged -> place[i] = damaged
    fi;
    may_be[i] = place[i];
    if
    :: place[i] == nowhere -> forget(i)
    :: place[i] & (saving | pruning) -> content[i] = 0 /* the next start removes it, whatever its content */
    :: else ->
      for (b : 0 .. bits - 1) {
        if
        :: (content[i] ^ durable[i]) & (1 << b) -> content[i] = content[i] ^ (1 << b)
        :: true
        fi
      }
      b = 0
    fi;
    durable[i] = content[i]; sync_failed[i] = 0
  }
  i = 0
}

#define is_incomplete(x) (place[x] == published && content[x] != whole && !removal_begun[x])

init {
  byte i, b, kills, power_losses, aways;
  atomic {
#ifdef CHOSEN_AT_START
    c_code {
#define choose(limit) if (getenv(#limit)) now.limit = atoi(getenv(#limit))
      choose(KEEP); choose(REPORTS); choose(KILLS); choose(POWER_LOSSES); choose(FAULTS); choose(MUTATION);
    };
#endif
    for (i : 0 .. RANKS - 1) { run trainer(i) }
#ifdef BEHIND
    for (i : 0 .. RANKS - 1) { run saver(i) }
#endif
    i = 0
  };
  do
  :: atomic {
      some_alive && (kills < KILLS || some_dead);
      if :: !some_dead -> kills++ :: else fi;
      if
      :: !dead[0] -> dead[0] = true
      :: !dead[1] -> dead[1] = true
#if RANKS > 2
      :: !dead[2] -> dead[2] = true
#endif
      fi
    }
  :: atomic {
      power_losses < POWER_LOSSES ->
      power_losses++;
      lose_power();
      for (i : 0 .. RANKS - 1) { dead[i] = true }
      i = 0
    }
  :: atomic {
      processes_ended == processes && some_dead ->
      for (i : 0 .. RANKS - 1) { dead[i] = false; asked[i] = 0; answer[i] = nothing; copying[i] = false; copied[i] = false }
      for (i : 0 .. 2 * RANKS - 1) { arrivals[i] = 0 }
      for (i : 0 .. 16 * RANKS - 1) { votes[i] = 0 }
      i = 0; processes_ended = 0; slot = not_there; source = 0; next_index = 0; found = 0; faults_before = 0;
      for (i : 0 .. 2) { answered[i] = 0; first_answer[i] = 0 }
      i = 0;
#ifdef AWAY
      away = false;
      if :: aways < AWAY -> aways++; away = true :: true fi;
#endif
      job = !job
    }
  :: atomic { processes_ended == processes && !some_dead -> break }
  :: is_incomplete(0) || is_incomplete(1) || is_incomplete(2) || is_incomplete(3) || is_incomplete(4) ->
    assert(false)
#ifdef FAST
  :: is_incomplete(5) -> assert(false)
#endif
#ifdef AWAY
  :: is_incomplete(6) || is_incomplete(7) -> assert(false)
#endif
  od
}
