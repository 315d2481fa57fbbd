/*
 * READY/DONE handshake between the ranks of one communicator, as a Promela model.
 *
 * Contract. Every rank runs N groups. A group is: READY to all and from all; K submissions, each copied into every peer's
 * target; DONE to all and from all; the reader. What has to hold, and where it is asserted:
 *
 *   no overwrite     nobody writes a target between its reader's start and end                        write_peer, write_own
 *   right data       a reader sees, in every region of its target, this group's data                  consume
 *   no lost signal   no slot is written while it holds a value its owner has not consumed             raise
 *   progress         when nothing can move any more, every (living) rank has finished N groups        init, and no
 *                    invalid end state; no cycle exists, so no deadlock means that all runs finish
 *   disagreement     no copy under a wrong READY, no read behind a wrong DONE, and every rank that is  write_peer, consume,
 *                    stuck sees a slot that is neither 0 nor what it waits for                         init
 *   abort            a result read from a target that is not right is void: the reader's own abort     consume, Look
 *                    word is set (or it gave up itself) before that reader has finished
 *   no false alarm   a rank that reports a slot as a mismatch is right                                 Monitor
 *
 * Group numbers appear in targets and assertions only: no decision of the protocol depends on one.
 *
 * Parameters (spin -Dname=value)
 *   P ranks, N groups, K submissions a group (v, q, k)
 *   ALT        two call sites with digests of their own take turns (else: one call site, the same digests in each group)
 *   OWN_EARLY  the own slice of the first submission is written before READY
 *   SPLIT      the waiting stream W is not the caller's stream S
 *   COARSE     fewer interleavings, see "Reductions"
 *   MIS=1|2|3  the last rank disagrees from group MG on: 1 in READY; 2 in DONE; 3 it has left out one group (needs ALT)
 *   LATE       any rank may time out whenever it is stuck: its peers are only late
 *   DIES       the last rank stops at any point (all ranks are alike up to rotation); its peers time out
 *   STOP_AT_RELEASE  runs end at the first release: by then all abort words are set, so every assertion holds from there on
 *   LOOK       the hosts' looks at the abort word are processes of their own
 *   MONITOR    rank 0's host compares the slots with the digest awaited, to report a mismatch at once
 *
 * Mutations, each of which spin has to refuse
 *   NO_READY NO_DONE       that handshake is missing
 *   SHARED_SLOT            READY and DONE use one slot a peer
 *   NO_RESET               consumed slots are not zeroed
 *   RESET_READY_LATE       READY slots are zeroed behind the writing of DONE
 *   READY_UNORDERED        READY does not stand behind this rank's last reader
 *   DONE_BEFORE_LAST_COPY  DONE overtakes the last submission
 *   NO_JOIN_C              SPLIT: READY does not wait for the previous group's waiting stream
 *   NO_JOIN_OWN            SPLIT: the own slice does not wait for the previous group's waiting stream
 *   NO_WAIT_OWN            SPLIT: the waiting stream does not wait for the last own slice
 *   WAIT_NONZERO           waits pass on any non-zero slot
 *   ABORT_LATE, NO_ABORT   abort words are written behind the release; never
 *   LOOK_EARLY             a look reads the abort word before it knows of the completion
 *   MONITOR_ONCE           a mismatch is reported without checking that the handshake is still the same
 *   MONITOR_NO_ABORT       a mismatch is reported without reading the abort word
 * UNCHECKED_SLOTS turns "no lost signal" off, to see what else a mutation breaks.
 *
 * Reductions, and why they lose nothing
 *   - d_step joins one access to shared memory with local bookkeeping. A slot is 64 bits wide: one access, one step.
 *   - COARSE: a copy is one step. Between two steps of C or W any other process may run, so a copy that is not ordered
 *     against a reader falls between its start and end in some run. Without COARSE a copy is two steps, and the region
 *     holds TORN between them (a rank that dies in the middle of a copy leaves it so).
 *   - COARSE: one step tests all own slots. They are tested one by one in hardware; a slot found equal stays so until
 *     its owner zeroes it, or "no lost signal" fails. Never used together with LATE or DIES.
 *   - COARSE: one step zeroes all own slots. Peers never read them; zeroing all as late as the last makes "no lost signal"
 *     harder to satisfy, not easier.
 *   - The host enqueues all N groups at once: a slower host only delays streams, which the scheduler of the model does too.
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

/* ---- shared memory: the pads (two slots a peer), the abort words, the targets ---- */
#define READY 0
#ifdef SHARED_SLOT
#define DONE READY
#else
#define DONE 1
#endif
#define SLOT(kind, owner, writer) (((kind) * P + (owner)) * P + (writer))
#define REGION(tag, owner, writer) (((tag) * P + (owner)) * P + (writer))
byte pad[2 * P * P];
byte target[K * P * P]; /* number of the group whose data the region holds */
#ifdef FAILURES
bool abort_word[P];
bool gave_up[P]; /* this rank timed out: it raises whatever its targets hold */
#endif
#ifdef DIES
bool dead;
#endif

/* ---- a rank's events, as counts: "the event is reached" is "the count is at least" ---- */
byte event_s[P]; /* BEGIN(g), INPUT(g, t) on the caller's stream S */
byte event_c[P]; /* groups complete on the copy stream C */
byte event_w[P]; /* groups whose reader is done on the waiting stream W */
#define BEGIN(g) (((g) - 1) * (K + 1) + 1)
#define INPUT(g, t) (BEGIN(g) + 1 + (t))

/* ---- for assertions and for hosts ---- */
bool reading[P];
bool drained[P]; /* C has nothing more to do */
#ifdef LOOK
byte first_bad[P]; /* the first group whose reader saw wrong data; 0: none */
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
#define UNTIL_DEATH(r) unless { DEAD(r) }
#else
#define DEAD(r) false
#define ANY_DEAD false
#define UNTIL_DEATH(r)
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

/* Write v into this rank's slot at every peer, starting at rank + 1 and wrapping. */
inline raise(kind, v) {
  i = 1;
  do
  :: d_step {
       i < P ->
#ifndef UNCHECKED_SLOTS
       assert(pad[SLOT(kind, PEER(r, i), r)] == 0 || ANY_GAVE_UP);
#endif
       pad[SLOT(kind, PEER(r, i), r)] = v;
       i++
     }
  :: else -> break
  od;
  i = 0
}

/* Wait until every own slot equals v. */
inline await(kind, v, handshake) {
#ifdef WATCHED
  awaits[r] = handshake;
#endif
#ifdef COARSE_SLOTS
  d_step {
    ALL_ARRIVED(kind, r, v);
#ifdef WATCHED
    awaits[r] = 0
#endif
  };
#else
  i = 1;
  do
  :: d_step {
       i < P && ARRIVED(kind, r, i, v) ->
       i++;
#ifdef WATCHED
       if
       :: i == P -> awaits[r] = 0
       :: else
       fi
#endif
     }
  :: i == P -> break
  od;
  i = 0
#endif
}

/* Write 0 to every own slot. */
inline reset(kind) {
#ifndef NO_RESET
#ifdef COARSE_SLOTS
  d_step {
    i = 1;
    do
    :: i < P -> pad[SLOT(kind, r, PEER(r, i))] = 0; i++
    :: else -> break
    od;
    i = 0
  }
#else
  i = 1;
  do
  :: d_step { i < P -> pad[SLOT(kind, r, PEER(r, i))] = 0; i++ }
  :: else -> break
  od;
  i = 0
#endif
#else
  skip
#endif
}

/* One pitched copy a peer. A dead rank's reader reads no more. */
#define UNREAD(p) (!reading[p] || VOID(p) || DEAD(p))
inline write_peer(t) {
  i = 1;
  do
  :: i < P ->
#ifndef COARSE
     d_step {
       assert(UNREAD(PEER(r, i)));
       target[REGION(t, PEER(r, i), r)] = TORN
     };
#endif
     d_step {
       assert(UNREAD(PEER(r, i)));
#if MIS == 1 || MIS == 3
       assert(g < MG || ANY_GAVE_UP); /* no copy under a wrong READY */
#endif
       target[REGION(t, PEER(r, i), r)] = g;
       i++
     }
  :: else -> break
  od;
  i = 0
}

inline submit(t) {
  event_s[r] >= INPUT(g, t);
  write_peer(t)
}

proctype Copy(byte r) {
  byte g = 1, t, i;
  {
    do
    :: g <= N ->
       /* first submit: behind everything on S so far and behind the previous group's waiting stream */
#ifndef READY_UNORDERED
       event_s[r] >= BEGIN(g);
#ifndef NO_JOIN_C
       event_w[r] >= g - 1;
#endif
#endif
#ifndef NO_READY
       raise(READY, R(r, g));
       await(READY, R(r, g), 2 * g - 1);
#ifndef RESET_READY_LATE
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
       raise(DONE, D(r, g));
#ifdef RESET_READY_LATE
       reset(READY);
#endif
#ifdef DONE_BEFORE_LAST_COPY
       submit(t);
#endif
       await(DONE, D(r, g), 2 * g);
       reset(DONE);
#endif
       t = 0;
       event_c[r] = g;
       g++
    :: else -> break
    od;
    drained[r] = true
  } UNTIL_DEATH(r)
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
  event_s[r] >= INPUT(g, K - 1); /* behind the last own-slice write */
#endif
  event_c[r] >= g;
  d_step {
#if MIS > 0
    assert(g < MG || ANY_GAVE_UP); /* no read behind a wrong DONE */
#endif
    reading[r] = true;
    check_target();
#ifndef FAILURES
    assert(!bad)
#endif
  };
  d_step {
    check_target();
    assert(!bad || VOID(r));
#ifdef LOOK
    if
    :: bad && first_bad[r] == 0 -> first_bad[r] = g
    :: else
    fi;
#endif
    bad = false;
    reading[r] = false;
    event_w[r] = g
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
#if defined(SPLIT) && !defined(NO_JOIN_OWN)
       event_w[r] >= g - 1;
#endif
#if defined(COARSE) && !defined(SPLIT)
       d_step {
         do
         :: t < K -> write_own(t); t++
         :: else -> break
         od;
         t = 0;
         event_s[r] = INPUT(g, K - 1)
       };
#else
#ifdef OWN_EARLY
       d_step { write_own(0) };
#endif
       event_s[r] = BEGIN(g);
       do
       :: d_step {
            t < K ->
#ifdef OWN_EARLY
            if
            :: t > 0 -> write_own(t)
            :: else
            fi;
#else
            write_own(t);
#endif
            event_s[r] = INPUT(g, t);
            t++
          }
       :: else -> break
       od;
       t = 0;
#endif
#ifndef SPLIT
       consume();
#endif
       g++
    :: else -> break
    od
  } UNTIL_DEATH(r)
}

#ifdef SPLIT
proctype Wait(byte r) {
  byte g = 1;
  bool bad;
  {
    do
    :: g <= N -> consume(); g++
    :: else -> break
    od
  } UNTIL_DEATH(r)
}
#endif

/* ======================================= hosts ======================================= */

#ifdef FAILURES
#ifdef LATE
#define TIME_OUT(r) true
#else
#define TIME_OUT(r) (ANY_DEAD || abort_word[r])
#endif

inline write_abort_words() {
#ifndef NO_ABORT
  i = 1;
  do
  :: d_step { i < P -> abort_word[PEER(r, i)] = true; i++ }
  :: i == P -> break
  od;
  i = 0
#else
  skip
#endif
}

/*
 * A rank whose C is stuck gives up: abort word of every peer first, then its own slots, with the values C waited for when the
 * host looked. C goes on, with all that is enqueued on it, and may get stuck and be released again. Signals that arrive
 * meanwhile race with the release.
 */
proctype Watchdog(byte r) {
  byte i, handshake;
  {
    do
    :: drained[r] -> break
    :: d_step {
         !drained[r] && STUCK(r) && TIME_OUT(r) ->
         handshake = awaits[r];
         gave_up[r] = true
       };
#ifndef ABORT_LATE
       write_abort_words();
#endif
#ifdef STOP_AT_RELEASE
       assert(ALL_VOID);
       break;
#endif
#ifdef COARSE_SLOTS
       d_step {
         i = 1;
         do
         :: i < P ->
            if
            :: handshake % 2 == 1 -> pad[SLOT(READY, r, PEER(r, i))] = R(r, (handshake + 1) / 2)
            :: else -> pad[SLOT(DONE, r, PEER(r, i))] = D(r, handshake / 2)
            fi;
            i++
         :: else -> break
         od;
         i = 0;
         handshake = 0
       };
#else
       i = 1;
       do
       :: d_step {
            i < P ->
            if
            :: handshake % 2 == 1 -> pad[SLOT(READY, r, PEER(r, i))] = R(r, (handshake + 1) / 2)
            :: else -> pad[SLOT(DONE, r, PEER(r, i))] = D(r, handshake / 2)
            fi;
            i++
          }
       :: else -> break
       od;
       i = 0;
       handshake = 0;
#endif
#ifdef ABORT_LATE
       write_abort_words()
#endif
    od
  } UNTIL_DEATH(r)
}
#endif

#ifdef LOOK
/*
 * A look: how many groups are complete, then the own abort word; only if that is not set are the results valid. A look changes
 * nothing, so one look, of any rank at any time, stands for all.
 */
proctype Look() {
  byte r, complete;
  bool aborted;
  do
  :: r < P - 1 -> r++
  :: break
  od;
#ifdef LOOK_EARLY
  aborted = VOID(r);
  complete = event_w[r];
#else
  complete = event_w[r];
  aborted = VOID(r);
#endif
  assert(aborted || first_bad[r] == 0 || first_bad[r] > complete || DEAD(r))
}
#endif

#ifdef MONITOR
/*
 * Reports a mismatch: which handshake C stands in (all events before it reached), one slot, then the event behind that
 * handshake (not reached: the slot was read during it), then the abort word.
 */
proctype Monitor(byte r) {
  byte handshake, slot, i;
  {
    do
    :: drained[r] -> break
    :: d_step { !drained[r] && awaits[r] != 0 -> handshake = awaits[r]; i = 1 };
       do
       :: i < P - 1 -> i++
       :: break
       od;
       d_step {
         if
         :: handshake % 2 == 1 && DIFFERS(READY, r, i, R(r, (handshake + 1) / 2)) -> slot = pad[SLOT(READY, r, PEER(r, i))]
         :: handshake % 2 == 0 && DIFFERS(DONE, r, i, D(r, handshake / 2)) -> slot = pad[SLOT(DONE, r, PEER(r, i))]
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
       assert(slot == 0); /* MIS is 0 wherever there is a monitor: a report is a false alarm */
    od
  } UNTIL_DEATH(r)
}
#endif

#ifdef DIES
proctype Kill() { dead = true }
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
       run Wait(r);
#endif
#ifdef FAILURES
       run Watchdog(r);
#endif
       r++
    :: else -> break
    od;
#ifdef LOOK
    run Look();
#endif
#ifdef MONITOR
    run Monitor(0);
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
#elif defined(STOP_AT_RELEASE)
       assert((drained[r] && event_w[r] == N) || DEAD(r) || ANY_GAVE_UP);
#else
       assert((drained[r] && event_w[r] == N) || DEAD(r));
#endif
       r++
    :: else -> break
    od
  }
}
