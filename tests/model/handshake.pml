/*
 * The READY/DONE handshake between the ranks of one communicator.
 *
 * Contract. Every rank runs N groups. A group is: READY to all and from all; K submissions, each copied into every
 * peer's target; DONE to all and from all; the reader. What has to hold, and where it is asserted:
 *
 *   no overwrite    nobody writes a target between its reader's start and end (write_region, write_own)
 *   right data      a reader sees this group's data in every region of its target (consume)
 *   no lost signal  no slot is written while it holds a value that its owner has not consumed (raise_at)
 *   progress        once nothing can move any more, every living rank has finished N groups (init), and nobody is in an
 *                   invalid end state; there is no cycle (pan -l), so every run gets there
 *   disagreement    no copy under a wrong READY (write_region), no read behind a wrong DONE (consume), and in the end
 *                   every rank stands in that handshake and sees a slot that is neither 0 nor what it awaits (init)
 *   abort           where a reader saw wrong data, its rank's next look raises: the rank's abort word is set, or the
 *                   rank gave up itself, before the reader has finished (consume, Look)
 *   no false alarm  a rank that reports a slot as a mismatch is right (Monitor)
 *
 * Group numbers serve targets and assertions only: no step of the protocol depends on one.
 *
 * Parameters (spin -Dname=value)
 *   P ranks (2 to 4), N groups, K submissions a group (1 to 3: v, q, k)
 *   ALT           two call sites with digests of their own take turns (else one call site: equal digests in all groups)
 *   RESET_NEXT    slots are zeroed in front of the writing of the next handshake, as on GPUs (else right behind the
 *                 wait, as on CPUs)
 *   OWN_EARLY     the own slice of the first submission is written before READY (COARSE without SPLIT: all of them)
 *   SPLIT         the waiting stream W is not the caller's stream S
 *   TAGS          SPLIT, ALT: each call site has targets and a waiting stream of its own, and lends its results until
 *                 it comes round again: their reader may be enqueued long after the other call site's group has begun
 *   MIS=1|2|3     the last rank disagrees from group MG on: 1 in READY; 2 in DONE; 3 it left out a group (needs ALT)
 *   LATE          ranks may time out whenever they are stuck, though nobody died; rank 0 is the first (rotation makes
 *                 every rank rank 0)
 *   DIES          the last rank stops at any point; after that, the others may time out whenever they are stuck
 *   IMPATIENT=r   only rank r times out; the others may stay stuck for ever (LATE: r is 0)
 *   LOOK          the last rank's look at its abort word is a process of its own
 *   MONITOR       the last rank's host compares slots with the digest awaited, to report a mismatch before the time-out
 *   COARSE        fewer interleavings: see below
 *
 * Mutations, each of which has to be refused
 *   NO_READY, NO_DONE      that handshake is missing
 *   SHARED_SLOT            READY and DONE use one slot a peer
 *   NO_RESET               consumed slots are not zeroed
 *   RESET_READY_LATE       READY slots are zeroed behind the writing of DONE
 *   RESET_DONE_LATE        RESET_NEXT: DONE slots are zeroed behind the writing of READY
 *   READY_UNORDERED        READY does not stand behind this rank's last reader
 *   DONE_BEFORE_LAST_COPY  DONE overtakes the last submission
 *   NO_JOIN_C              SPLIT: READY does not wait for the previous group's waiting stream
 *   NO_JOIN_OWN            SPLIT: the own slice does not wait for the previous group's waiting stream
 *   JOIN_PREVIOUS          TAGS: READY and own slice wait for what is enqueued on the previous group's waiting stream,
 *                          not for the waiting stream of the last group that had these tags
 *   NO_WAIT_OWN            SPLIT: the waiting stream does not wait for the last own slice
 *   WAIT_NONZERO           waits pass on any non-zero slot
 *   ABORT_LATE, NO_ABORT   abort words are written behind the release; never
 *   LOOK_EARLY             a look reads the abort word before it learns of the completion
 *   MONITOR_ONCE           a mismatch is reported without checking that C still stands in the same handshake
 *   MONITOR_NO_ABORT       a mismatch is reported without reading the abort word behind the slot
 * UNCHECKED_SLOTS turns "no lost signal" off, to see what else a mutation breaks.
 *
 * Reductions
 *   - d_step joins one access to shared memory with local bookkeeping. A slot is 64 bits wide: one access, one step.
 *   - The host enqueues all N groups at once: a slower host only delays streams, which the scheduler here does too.
 *   - COARSE without SPLIT: S writes all own slices and reaches all events of a group in one step. Only S looks at the
 *     own slice, and S does not block between these events: to C, a later event is the same as a slower C.
 *   - COARSE: a copy is one step. Between two steps of a stream any other process may run, so a copy that is not
 *     ordered against a reader falls between its start and end in some run. Without COARSE a copy is two steps, and the
 *     region holds TORN between them (a rank that dies in the middle of a copy leaves it so).
 */

#ifndef P
#define P 2
#endif
#ifndef N
#define N 3
#endif
#ifndef K
#define K 3
#endif
#ifndef MIS
#define MIS 0
#endif
#ifndef MG
#define MG 2
#endif

#if defined(LATE) || defined(DIES)
#define FAILURES
#endif
#if defined(FAILURES) || defined(MONITOR) || (MIS > 0)
#define WATCHED
#endif

#define TORN 255
#define ODD 9 /* a digest of no call site */

/* ---- sets of tags: each has its targets and its waiting stream ---- */
#ifdef TAGS
#define SETS 2
#define SET(g) ((g) % 2)
#else
#define SETS 1
#define SET(g) 0
#endif
#define BY_SET(g, r) (SET(g) * P + (r))

/* ---- shared memory: the pads (two slots a peer), the abort words, the targets ---- */
#define READY 0
#ifdef SHARED_SLOT
#define DONE READY
#else
#define DONE 1
#endif
#define SLOT(kind, owner, writer) (((kind) * P + (owner)) * P + (writer))
#define REGION(tag, owner, writer) (((SET(g) * K + (tag)) * P + (owner)) * P + (writer))
byte pad[2 * P * P];
byte target[SETS * K * P * P]; /* number of the group whose data the region holds */
#ifdef FAILURES
bool abort_word[P];
bool gave_up[P]; /* this rank timed out: it raises whatever its targets hold */
#endif
#ifdef DIES
bool dead;
#endif

/* ---- a rank's events, as counts: "the event is reached" is "the count is at least" ---- */
byte event_s[P]; /* caller's stream S: BEGIN(g), INPUT(g, t) of each submission, OWN(g) behind all own slices */
byte event_c[P]; /* copy stream C: groups complete */
byte event_w[SETS * P]; /* waiting stream W: the last group whose reader is done */
#define BEGIN(g) (((g) - 1) * (K + 2) + 1)
#define INPUT(g, t) (BEGIN(g) + 1 + (t))
#define OWN(g) INPUT(g, K)

/* The readers that a group has to wait for before it may write their targets again. */
#ifndef TAGS
#define READERS_DONE(r, g) (event_w[r] >= (g) - 1)
#elif defined(JOIN_PREVIOUS)
#define READERS_DONE(r, g) (event_w[BY_SET((g) + 1, r)] >= (g) - 3)
#else
#define READERS_DONE(r, g) (event_w[BY_SET(g, r)] >= (g) - 2)
#endif
#define FINISHED(r) (drained[r] && event_w[BY_SET(N, r)] == N && event_w[BY_SET(N + 1, r)] >= N - 1)

/* ---- for assertions and for hosts ---- */
bool reading[SETS * P];
bool drained[P]; /* C has nothing more to do */
#ifdef LOOK
bool wrong_result[P]; /* a complete group's reader saw wrong data */
#endif
#ifdef WATCHED
byte awaits[P]; /* the handshake C stands in: 0 none, 2g-1 READY of group g, 2g DONE of group g */
#endif

/* ---- digests: non-zero constants of the call site ---- */
#if defined(ALT)
#define SITE(g) ((g) % 2)
#else
#define SITE(g) 0
#endif
#define ODD_RANK(r, g) ((r) == P - 1 && (g) >= MG)
#if MIS == 1
#define R(r, g) (ODD_RANK(r, g) -> ODD : 1 + 2 * SITE(g))
#define D(r, g) (2 + 2 * SITE(g))
#elif MIS == 2
#define R(r, g) (1 + 2 * SITE(g))
#define D(r, g) (ODD_RANK(r, g) -> ODD : 2 + 2 * SITE(g))
#elif MIS == 3
#define R(r, g) (1 + 2 * SITE((g) + ODD_RANK(r, g)))
#define D(r, g) (2 + 2 * SITE((g) + ODD_RANK(r, g)))
#else
#define R(r, g) (1 + 2 * SITE(g))
#define D(r, g) (2 + 2 * SITE(g))
#endif

#define PEER(r, i) (((r) + (i)) % P)

#ifdef WAIT_NONZERO
#define ARRIVED(kind, r, i, v) (pad[SLOT(kind, r, PEER(r, i))] != 0)
#else
#define ARRIVED(kind, r, i, v) (pad[SLOT(kind, r, PEER(r, i))] == (v))
#endif
#define ALL_ARRIVED(kind, r, v) \
  (ARRIVED(kind, r, 1, v) && (P < 3 || ARRIVED(kind, r, 2, v)) && (P < 4 || ARRIVED(kind, r, 3, v)))
#define DIFFERS(kind, r, i, v) (pad[SLOT(kind, r, PEER(r, i))] != 0 && pad[SLOT(kind, r, PEER(r, i))] != (v))
#define ANY_DIFFERS(kind, r, v) \
  (DIFFERS(kind, r, 1, v) || (P >= 3 && DIFFERS(kind, r, 2, v)) || (P >= 4 && DIFFERS(kind, r, 3, v)))

/* The handshake that C stands in, seen from the host. */
#define IS_READY(r) (awaits[r] % 2 == 1)
#define GROUP(r) ((awaits[r] + 1) / 2)
#define STUCK(r) \
  (awaits[r] != 0 && ((IS_READY(r) && !ALL_ARRIVED(READY, r, R(r, GROUP(r)))) || \
                      (!IS_READY(r) && !ALL_ARRIVED(DONE, r, D(r, GROUP(r))))))
#define SEES_MISMATCH(r) \
  (awaits[r] != 0 && ((IS_READY(r) && ANY_DIFFERS(READY, r, R(r, GROUP(r)))) || \
                      (!IS_READY(r) && ANY_DIFFERS(DONE, r, D(r, GROUP(r))))))

#ifdef DIES
#define DEAD(r) (dead && (r) == P - 1)
#define ANY_DEAD dead
#define UNTIL_DEATH(r, cleanup) unless { d_step { DEAD(r) -> cleanup } }
#else
#define DEAD(r) false
#define ANY_DEAD false
#define UNTIL_DEATH(r, cleanup)
#endif

/* VOID(r): the next look of rank r raises. */
#ifdef FAILURES
#define VOID(r) (abort_word[r] || gave_up[r])
#define ANY_GAVE_UP (gave_up[0] || gave_up[1] || (P >= 3 && gave_up[2 % P]) || (P >= 4 && gave_up[3 % P]))
#define ALL_VOID (OUT(0) && OUT(1) && (P < 3 || OUT(2 % P)) && (P < 4 || OUT(3 % P)))
#define OUT(r) (VOID(r) || DEAD(r))
#else
#define VOID(r) false
#define ANY_GAVE_UP false
#endif

/* ======================================= copy stream C ======================================= */

/* Write v into this rank's slot at every peer, starting at rank + 1 and wrapping. Memory of a dead rank is not kept. */
inline raise_at(kind, v, i) {
  d_step {
#ifndef UNCHECKED_SLOTS
    assert(pad[SLOT(kind, PEER(r, i), r)] == 0 || ANY_GAVE_UP);
#endif
    pad[SLOT(kind, PEER(r, i), r)] = (DEAD(PEER(r, i)) -> 0 : v)
  }
}
inline raise(kind, v) {
  raise_at(kind, v, 1);
#if P >= 3
  raise_at(kind, v, 2);
#endif
#if P >= 4
  raise_at(kind, v, 3);
#endif
}

/* Wait until every own slot equals v. */
inline await(kind, v, handshake) {
#ifdef WATCHED
  awaits[r] = handshake;
#endif
#if P >= 3
  ARRIVED(kind, r, 1, v);
#endif
#if P >= 4
  ARRIVED(kind, r, 2, v);
#endif
  d_step {
    ARRIVED(kind, r, P - 1, v);
#ifdef WATCHED
    awaits[r] = 0
#endif
  }
}

/* Write 0 to every own slot. */
inline reset(kind) {
#ifndef NO_RESET
  pad[SLOT(kind, r, PEER(r, 1))] = 0;
#if P >= 3
  pad[SLOT(kind, r, PEER(r, 2))] = 0;
#endif
#if P >= 4
  pad[SLOT(kind, r, PEER(r, 3))] = 0;
#endif
#else
  skip
#endif
}

/* One pitched copy a peer. A dead rank's reader reads no more. */
#define UNREAD(p) (!reading[BY_SET(g, p)] || VOID(p) || DEAD(p))
inline write_region(t, i) {
#ifndef COARSE
  d_step {
    assert(UNREAD(PEER(r, i)));
    target[REGION(t, PEER(r, i), r)] = (DEAD(PEER(r, i)) -> 0 : TORN)
  };
#endif
  d_step {
    assert(UNREAD(PEER(r, i)));
#if MIS == 1 || MIS == 3
    assert(g < MG || ANY_GAVE_UP); /* no copy under a wrong READY */
#endif
    target[REGION(t, PEER(r, i), r)] = (DEAD(PEER(r, i)) -> 0 : g)
  }
}
inline write_peers(t) {
  write_region(t, 1);
#if P >= 3
  write_region(t, 2);
#endif
#if P >= 4
  write_region(t, 3);
#endif
}

inline submit(t) {
  event_s[r] >= INPUT(g, t);
  write_peers(t)
}

proctype Copy(byte r) {
  byte g = 1, t;
  {
    do
    :: g <= N ->
       /* first submit: behind everything on S so far and behind the previous group's waiting stream */
#ifndef READY_UNORDERED
       event_s[r] >= BEGIN(g);
#ifndef NO_JOIN_C
       READERS_DONE(r, g);
#endif
#endif
#ifndef NO_READY
#if defined(RESET_NEXT) && !defined(RESET_DONE_LATE)
       reset(DONE);
#endif
       raise(READY, R(r, g));
#ifdef RESET_DONE_LATE
       reset(DONE);
#endif
       await(READY, R(r, g), 2 * g - 1);
#if !defined(RESET_READY_LATE) && !defined(RESET_NEXT)
       reset(READY);
#endif
#endif
       /* each submit; the last one is the final submit */
       do
       :: t < K - 1 -> submit(t); t++
       :: else -> break
       od;
#ifndef DONE_BEFORE_LAST_COPY
       submit(t);
#endif
#ifndef NO_DONE
#if defined(RESET_NEXT) && !defined(RESET_READY_LATE)
       reset(READY);
#endif
       raise(DONE, D(r, g));
#ifdef RESET_READY_LATE
       reset(READY);
#endif
#ifdef DONE_BEFORE_LAST_COPY
       submit(t);
#endif
       await(DONE, D(r, g), 2 * g);
#ifndef RESET_NEXT
       reset(DONE);
#endif
#endif
       d_step {
         event_c[r] = g;
         t = 0;
         g++
       }
    :: else -> break
    od;
    drained[r] = true
  } UNTIL_DEATH(r, g = 0; t = 0; awaits[r] = 0; event_c[r] = 0; drained[r] = false)
}

/* ======================================= streams S and W ======================================= */

inline check_region(t, w) {
  if
  :: (w) < P && (t) < K && target[REGION((t) % K, r, (w) % P)] != g -> bad = true
  :: else
  fi
}

inline check_target() {
  check_region(0, 0); check_region(0, 1); check_region(0, 2); check_region(0, 3);
  check_region(1, 0); check_region(1, 1); check_region(1, 2); check_region(1, 3);
  check_region(2, 0); check_region(2, 1); check_region(2, 2); check_region(2, 3)
}

/* wait, then the reader (attention) of the whole target. */
inline consume() {
#if defined(SPLIT) && !defined(NO_WAIT_OWN)
  event_s[r] >= OWN(g);
#endif
  event_c[r] >= g;
  d_step {
#if MIS > 0
    assert(g < MG || ANY_GAVE_UP); /* no read behind a wrong DONE */
#endif
    reading[BY_SET(g, r)] = true;
    check_target();
#ifndef FAILURES
    assert(!bad)
#endif
  };
  d_step {
    check_target();
    assert(!bad || VOID(r));
#ifdef LOOK
    wrong_result[r] = wrong_result[r] || bad;
#endif
    bad = false;
    reading[BY_SET(g, r)] = false;
    event_w[BY_SET(g, r)] = g
  }
}

/* The own slice is written by the caller's side: by S, behind this rank's last reader, maybe before READY. */
inline write_own(t) {
  assert(UNREAD(r));
  target[REGION(t, r, r)] = g
}

proctype Compute(byte r) {
  byte g = 1, t;
  bool bad;
  {
    do
    :: g <= N ->
#if defined(COARSE) && !defined(SPLIT)
       d_step {
         do
         :: t < K -> write_own(t); t++
         :: else -> break
         od;
         t = 0;
         event_s[r] = OWN(g)
       };
#else
#ifndef OWN_EARLY
       event_s[r] = BEGIN(g);
#endif
#if defined(SPLIT) && !defined(NO_JOIN_OWN)
       READERS_DONE(r, g); /* before its first own slice, S waits for the previous group's waiting stream */
#endif
#ifdef OWN_EARLY
       d_step { write_own(0) };
       event_s[r] = BEGIN(g);
#endif
       do
       :: t < K ->
          event_s[r] = INPUT(g, t);
#ifdef OWN_EARLY
          if
          :: t > 0 -> d_step { write_own(t) }
          :: else
          fi;
#else
          d_step { write_own(t) };
#endif
          t++
       :: else -> break
       od;
       event_s[r] = OWN(g);
       t = 0;
#endif
#ifndef SPLIT
       consume();
#endif
       g++
    :: else -> break
    od
  } UNTIL_DEATH(r, g = 0; t = 0; bad = false; event_s[r] = 0; event_w[r] = 0; reading[r] = false)
}

#ifdef SPLIT
proctype Wait(byte r, g) {
  bool bad;
  do
  :: g <= N -> consume(); g = g + SETS
  :: else -> break
  od
}
#endif

/* ======================================= hosts ======================================= */

#ifdef FAILURES
#ifdef LATE
#define TIME_OUT(r) ((r) == 0 || gave_up[0])
#else
#define TIME_OUT(r) (ANY_DEAD || abort_word[r])
#endif

#if defined(IMPATIENT)
#define GIVES_UP(r) ((r) == IMPATIENT)
#elif defined(DIES)
#define GIVES_UP(r) ((r) < P - 1)
#else
#define GIVES_UP(r) true
#endif

inline write_abort_words() {
#ifndef NO_ABORT
  abort_word[PEER(r, 1)] = true;
#if P >= 3
  abort_word[PEER(r, 2)] = true;
#endif
#if P >= 4
  abort_word[PEER(r, 3)] = true;
#endif
#endif
  told = true
}

inline release_slot(i) {
  if
  :: handshake % 2 == 1 -> pad[SLOT(READY, r, PEER(r, i))] = R(r, (handshake + 1) / 2)
  :: else -> pad[SLOT(DONE, r, PEER(r, i))] = D(r, handshake / 2)
  fi
}

/*
 * A rank whose C is stuck gives up: the abort word of every peer first, then its own slots, with the value that C
 * waited for when the host looked. C goes on with all that is enqueued on it, and may get stuck and be released again.
 * Signals that arrive meanwhile race with the release.
 */
proctype Watchdog(byte r) {
  byte handshake;
  bool told;
  do
  :: drained[r] -> told = false; break
  :: d_step {
       !drained[r] && STUCK(r) && TIME_OUT(r) ->
       handshake = awaits[r];
       gave_up[r] = true
     };
#ifndef ABORT_LATE
     if
     :: told
     :: else -> write_abort_words()
     fi;
#endif
#if P >= 3
     d_step { release_slot(1) };
#endif
#if P >= 4
     d_step { release_slot(2) };
#endif
     d_step {
       release_slot(P - 1);
       handshake = 0
     };
#ifdef ABORT_LATE
     if
     :: told
     :: else -> write_abort_words()
     fi
#endif
  od
}
#endif

#ifdef LOOK
/*
 * A look: which groups are complete, then the own abort word; only if that is not set are their results valid. A look
 * changes nothing, so one look at any time stands for all.
 */
proctype Look(byte r) {
  bool wrong;
#ifdef LOOK_EARLY
  bool aborted = VOID(r);
  assert(aborted || !wrong_result[r])
#else
  wrong = wrong_result[r]; /* with the completion of the groups, of which this is what matters */
  d_step {
    assert(VOID(r) || !wrong);
    wrong = false
  }
#endif
}
#endif

#ifdef MONITOR
/*
 * Reports a mismatch: which handshake C stands in (all events before it reached), one slot, then the event behind that
 * handshake (not reached: the slot was read during it), then the abort word.
 */
proctype Monitor(byte r) {
  byte handshake, slot, i;
  do
  :: drained[r] -> break
  :: d_step { !drained[r] && awaits[r] != 0 -> handshake = awaits[r] };
     if
     :: i = 1
     :: P >= 3 -> i = 2
     :: P >= 4 -> i = 3
     fi;
     d_step {
       if
       :: handshake % 2 == 1 && DIFFERS(READY, r, i, R(r, (handshake + 1) / 2)) ->
          slot = pad[SLOT(READY, r, PEER(r, i))]
       :: handshake % 2 == 0 && DIFFERS(DONE, r, i, D(r, handshake / 2)) ->
          slot = pad[SLOT(DONE, r, PEER(r, i))]
       :: else -> slot = 0
       fi;
       i = 0
     };
#ifndef MONITOR_ONCE
     if
     :: awaits[r] != handshake -> slot = 0
     :: else
     fi;
#endif
     handshake = 0;
#ifndef MONITOR_NO_ABORT
     if
     :: VOID(r) -> slot = 0
     :: else
     fi;
#endif
     assert(slot == 0) /* MIS is 0 wherever there is a monitor: a report is a false alarm */
  od
}
#endif

#ifdef DIES
/* Nobody reads the memory of a dead rank. */
proctype Kill() {
  byte i;
  d_step {
    dead = true;
    do
    :: i < P -> pad[SLOT(READY, P - 1, i)] = 0; pad[SLOT(DONE, P - 1, i)] = 0; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < K * P -> target[(i / P * P + P - 1) * P + i % P] = 0; i++
    :: else -> break
    od;
    i = 0
  }
}
#endif

init {
  byte r;
  atomic {
    r = 0;
    do
    :: r < P ->
       run Copy(r);
       run Compute(r);
#ifdef SPLIT
       run Wait(r, 1);
#ifdef TAGS
       run Wait(r, 2);
#endif
#endif
#ifdef FAILURES
       if
       :: GIVES_UP(r) -> run Watchdog(r)
       :: else
       fi;
#endif
       r++
    :: else -> break
    od;
#ifdef LOOK
    run Look(P - 1);
#endif
#ifdef MONITOR
    run Monitor(P - 1);
#endif
#ifdef DIES
    run Kill();
#endif
    r = 0
  };
  /* Nothing can move any more. */
  timeout;
  d_step {
    do
    :: r < P ->
#if MIS > 0 && !defined(FAILURES)
       assert(awaits[r] == (MIS == 2 -> 2 * MG : 2 * MG - 1));
       assert(SEES_MISMATCH(r));
#elif defined(IMPATIENT)
       assert(FINISHED(r) || r != IMPATIENT);
#else
       assert(FINISHED(r) || DEAD(r));
#endif
       r++
    :: else -> break
    od
  }
}
