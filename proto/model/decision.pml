/*
 * The one decision of a rank group of two: rank 0 (the coordinator) and rank 1 (the member), a link that can be cut, and the crash
 * of any party: either daemon, either target process.
 *
 * Between SPEC section 4 (one decision, epochs) and the code that README.md names for each transition. Rows are a nondeterministic
 * vote; committed states are equal or not by choice. Says nothing about liveness: tests/session/group_model.py does, on the code.
 *
 * -DALONE       each rank decides by its own vote alone: must fail
 * -DNO_EPOCH    a rank commits whatever became ready, whatever happened since: must fail
 */

#define SLOTS 2
#ifndef GENS
#define GENS 2                     /* grants of each slot */
#endif
#ifndef EPOCHS
#define EPOCHS 3                   /* epochs that may open */
#endif
#ifndef CUTS
#define CUTS 1
#endif
#ifndef CRASHES0
#define CRASHES0 1                 /* of rank 0's daemon */
#endif
#ifndef CRASHES1
#define CRASHES1 1                 /* of rank 1's */
#endif
#ifndef LEAVES
#define LEAVES 1                   /* deaths of target processes, both together */
#endif
#ifndef QUARRELS
#define QUARRELS 0                 /* agreements in which the committed states differ */
#endif

#define DEPTH 7
#define AT(ord, s, g) (((ord) * SLOTS + (s)) * (GENS + 1) + (g))

mtype = { GATHERING, ASKING, OPEN, AGREE, GRANT, VOTE_READY, VOTE_NO, DECIDE_READY, DECIDE_VOID, RELEASED, LEAVE };
mtype = { NONE, VOTING, DECIDED, DISCARDED, VOID, CLOSED };            /* group.Fate; DECIDED is Fate.READY */
mtype = { OUT, ASKED, AGREED, OPENED, LEFT };                          /* group_member.Standing */
mtype = { NO_PAPER, GRANTED, WAITING, REFUSED, READY, DEAD, LOST };    /* group_member.Ballot; DEAD is Ballot.DISCARDED */

chan down = [DEPTH] of { mtype, byte, byte, byte, byte };  /* rank 0 -> rank 1: kind, epoch, slot, generation, ghost ordinal */
chan up = [DEPTH] of { mtype, byte, byte, byte, byte };

bool cut;                          /* the link is lost, and not formed anew yet */
bool c_up, m_up;                   /* each end's own idea */
byte c_life = 1;                   /* rank 0's boot nonce */
byte cuts, c_crashes, m_crashes, leaves, quarrels;

/* ghosts: what was ever held, by (ordinal of the open epoch, slot, generation) */
byte opens;                        /* epochs that opened, by ordinal: the epoch's identity in all lives of rank 0 */
byte held0[(EPOCHS + 1) * SLOTS * (GENS + 1)];   /* 0 nothing, 1 ready, 2 void */
byte held1[(EPOCHS + 1) * SLOTS * (GENS + 1)];

#define SAME(a, b) ((a) == 0 || (b) == 0 || (a) == (b))

inline hold0(ord, s, g, what) {
    assert(SAME(what, held1[AT(ord, s, g)]));
    assert(SAME(what, held0[AT(ord, s, g)]));
    held0[AT(ord, s, g)] = what
}

inline hold1(ord, s, g, what) {
    assert(SAME(what, held0[AT(ord, s, g)]));
    assert(SAME(what, held1[AT(ord, s, g)]));
    held1[AT(ord, s, g)] = what
}

/* A link that is cut takes frames and loses them. */
inline tell(channel, kind, epoch, s, g, ord) {
    if
    :: cut -> skip
    :: else ->
        assert(nfull(channel));
        channel ! kind, epoch, s, g, ord
    fi
}

inline flush(channel) {
    do
    :: nempty(channel) -> channel ? _, _, _, _, _
    :: empty(channel) -> break
    od
}

inline lose_link() {
    cut = true
}

/* ---- rank 0 -------------------------------------------------------------------------------------------------------- */

mtype c_phase = GATHERING;
byte c_epoch = 1;
bool c_agreed0, c_agreed1;
byte c_floor, c_floor1;            /* generations that some rank has seen; what the member states */
mtype c_fate[SLOTS];
byte c_gen[SLOTS], c_ord[SLOTS], c_in[SLOTS];   /* generation, ghost ordinal, epoch of the grant */
bool c_holds1[SLOTS];              /* the member holds the slot */
bool c_own[SLOTS];                 /* rank 0's own slot is not FREE */
byte c_vote0[SLOTS], c_vote1[SLOTS];            /* 0 none, 1 ready, 2 a reason */

inline c_close(s) {
    if
    :: c_fate[s] != VOTING && c_fate[s] != NONE && c_fate[s] != CLOSED && !c_holds1[s] ->
        if
        :: c_fate[s] == DECIDED -> c_fate[s] = CLOSED
        :: else -> c_fate[s] = CLOSED; c_vote1[s] = 2   /* what is closed and was not ready can't be committed */
        fi
    :: else -> skip
    fi
}

inline c_decide_ready(s) {
    if
    :: c_fate[s] == VOTING && c_vote0[s] == 1 && c_vote1[s] == 1 ->
        c_fate[s] = DECIDED;
        hold0(c_ord[s], s, c_gen[s], 1);
        tell(down, DECIDE_READY, c_epoch, s, c_gen[s], c_ord[s])
    :: else -> skip
    fi
}

inline c_fail(s) {
    if
    :: c_fate[s] == VOTING ->
        c_fate[s] = DISCARDED;
        hold0(c_ord[s], s, c_gen[s], 2);
        tell(down, DECIDE_VOID, c_epoch, s, c_gen[s], c_ord[s])
    :: else -> skip
    fi
}

inline c_death_of_slot(s) {
    if
    :: c_fate[s] == VOTING -> c_fate[s] = DISCARDED
    :: c_fate[s] == DECIDED -> c_fate[s] = VOID
    :: else -> skip
    fi
}

inline c_drop1() {
    c_holds1[0] = false;
    c_holds1[1] = false;
    c_close(0);
    c_close(1)
}

inline c_gather() {
    if
    :: c_phase == GATHERING && c_up -> c_phase = ASKING; tell(down, ASKING, c_epoch, 0, 0, 0)
    :: else -> skip
    fi
}

/* The end of an epoch. `lost`: the member's link is gone, so it holds nothing here any more. */
inline c_death(lost) {
    if
    :: c_phase != GATHERING -> c_epoch++; c_phase = GATHERING
    :: else -> skip
    fi;
    c_agreed0 = false;
    c_agreed1 = false;
    c_death_of_slot(0);
    c_death_of_slot(1);
    if
    :: lost -> c_drop1()
    :: else -> skip
    fi
}

inline c_agree() {
    if
    :: c_agreed0 && c_agreed1 ->
        if
        :: opens < EPOCHS ->       /* equal states */
            opens++;
            c_phase = OPEN;
            if
            :: c_floor1 > c_floor -> c_floor = c_floor1
            :: else -> skip
            fi;
            if
            :: c_gen[0] > c_floor -> c_floor = c_gen[0]
            :: else -> skip
            fi;
            if
            :: c_gen[1] > c_floor -> c_floor = c_gen[1]
            :: else -> skip
            fi;
            tell(down, OPEN, c_epoch, 0, 0, opens)
        :: quarrels < QUARRELS ->  /* rank_disagree: the next epoch asks anew */
            quarrels++;
            c_epoch++;
            c_agreed0 = false;
            c_agreed1 = false;
            tell(down, ASKING, c_epoch, 0, 0, 0)
        fi
    :: else -> skip
    fi
}

#ifdef NO_EPOCH
#define C_MAY_COMMIT(s) (held0[AT(c_ord[s], s, c_gen[s])] == 1 && c_gen[s] > 0)
#else
#define C_MAY_COMMIT(s) (c_phase == OPEN && c_in[s] == c_epoch && c_gen[s] > 0 && \
                         (c_fate[s] == DECIDED || (c_fate[s] == CLOSED && c_vote1[s] == 1 && c_vote0[s] == 1)))
#endif

inline c_commit(s) {
    if
    :: C_MAY_COMMIT(s) ->
        assert(held0[AT(c_ord[s], s, c_gen[s])] == 1);
        assert(c_ord[s] == opens)  /* no later epoch has opened anywhere */
    :: else -> skip
    fi
}

inline c_grant(s) {
    if
    :: c_phase == OPEN && (c_fate[s] == NONE || c_fate[s] == CLOSED) && !c_own[s] && c_gen[s] < GENS && c_floor < GENS ->
        if
        :: c_gen[s] < c_floor -> c_gen[s] = c_floor
        :: else -> skip
        fi;
        c_gen[s]++;
        c_ord[s] = opens;
        c_in[s] = c_epoch;
        c_fate[s] = VOTING;
        c_vote0[s] = 0;
        c_vote1[s] = 0;
        c_holds1[s] = true;
        c_own[s] = true;
        tell(down, GRANT, c_epoch, s, c_gen[s], opens)
    :: else -> skip
    fi
}

inline c_reset() {
    c_life++;
    c_phase = GATHERING;
    c_epoch = 1;
    c_agreed0 = false;
    c_agreed1 = false;
    c_floor = 0;
    c_floor1 = 0;
    c_up = false;
    s = 0;
    do
    :: s < SLOTS ->
        c_fate[s] = NONE;
        c_gen[s] = 0;
        c_ord[s] = 0;
        c_in[s] = 0;
        c_holds1[s] = false;
        c_own[s] = false;
        c_vote0[s] = 0;
        c_vote1[s] = 0;
        s++
    :: else -> break
    od;
    s = 0;
    flush(up)
}

inline one_slot(s) {
    if
    :: s = 0
    :: s = 1
    fi
}

active proctype rank0() {
    mtype kind;
    byte n, s, g, ord;
    c_fate[0] = NONE;
    c_fate[1] = NONE;
end:
    do
    :: atomic { !cut && !c_up -> c_up = true; c_gather() }
    :: atomic { cut && c_up ->     /* the link's end is noticed; what was still to be read may be lost */
        flush(up);
        c_up = false;
        c_death(true)
       }
    :: atomic { cut && !c_up && !m_up -> flush(down); flush(up); cut = false }
    :: atomic { c_phase == ASKING && !c_agreed0 -> c_agreed0 = true; c_agree() }
    :: atomic { c_phase == OPEN -> one_slot(s); c_grant(s); s = 0 }
    :: atomic { one_slot(s);       /* rank 0's own rows */
        if
        :: c_fate[s] == VOTING && c_vote0[s] == 0 ->
            c_vote0[s] = 1;
#ifdef ALONE
            c_fate[s] = DECIDED;
            hold0(c_ord[s], s, c_gen[s], 1)
#else
            c_decide_ready(s)
#endif
        :: c_fate[s] == VOTING -> c_fail(s)       /* a row, the budget, a cancellation */
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic { one_slot(s);       /* the sampler is done, or nothing can land any more */
        if
        :: c_own[s] && c_fate[s] != VOTING -> c_own[s] = false
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic { one_slot(s); c_commit(s); s = 0 }
    :: atomic { leaves < LEAVES && (c_phase == OPEN || (c_phase == ASKING && c_agreed0)) ->
        leaves++;                  /* rank 0's own target process dies */
        c_death(false);
        c_gather()
       }
    :: atomic { c_crashes < CRASHES0 -> c_crashes++; lose_link(); c_reset() }
    :: atomic { cuts < CUTS && !cut && c_up && m_up -> cuts++; lose_link() }
    :: atomic { c_up && nempty(up) ->
        up ? kind, n, s, g, ord;
        if
        :: n < c_epoch -> skip     /* of an epoch that is over: dropped, counted */
        :: else ->
            assert(n == c_epoch);
            if
            :: kind == AGREE ->
                assert(c_phase != GATHERING);
                if
                :: c_agreed1 -> skip
                :: else -> c_agreed1 = true; c_floor1 = g; c_drop1(); c_agree()
                fi
            :: kind == VOTE_READY || kind == VOTE_NO ->
                assert(c_gen[s] == g && c_in[s] == n && c_holds1[s] && c_vote1[s] == 0);
                if
                :: kind == VOTE_READY -> c_vote1[s] = 1; c_decide_ready(s)
                :: else -> c_vote1[s] = 2; c_fail(s)
                fi
            :: kind == RELEASED ->
                assert(c_gen[s] == g && c_in[s] == n && c_fate[s] != VOTING);
                c_holds1[s] = false;
                c_close(s)
            :: kind == LEAVE ->
                assert(c_phase != GATHERING);
                if
                :: c_phase == ASKING && !c_agreed1 -> skip
                :: else -> c_death(false); c_gather()
                fi
            fi
        fi;
        kind = 0; n = 0; s = 0; g = 0; ord = 0
       }
    od
}

/* ---- rank 1 -------------------------------------------------------------------------------------------------------- */

mtype m_standing = OUT;
byte m_epoch, m_least = 1, m_life, m_ordinal;
mtype m_ballot[SLOTS];
byte m_gen[SLOTS], m_ord[SLOTS], m_in[SLOTS];
bool m_returned[SLOTS], m_own[SLOTS];

#define UNDECIDED(s) (m_ballot[s] == GRANTED || m_ballot[s] == WAITING || m_ballot[s] == REFUSED)

inline m_end_of(s) {
    if
    :: UNDECIDED(s) || m_ballot[s] == READY -> m_ballot[s] = LOST
    :: else -> skip
    fi
}

inline m_end_epoch() {
    m_end_of(0);
    m_end_of(1)
}

inline m_reset() {
    m_standing = OUT;
    m_epoch = 0;
    m_least = 1;
    m_life = 0;
    m_ordinal = 0;
    m_up = false;
    s = 0;
    do
    :: s < SLOTS ->
        m_ballot[s] = NO_PAPER;
        m_gen[s] = 0;
        m_ord[s] = 0;
        m_in[s] = 0;
        m_returned[s] = false;
        m_own[s] = false;
        s++
    :: else -> break
    od;
    s = 0;
    flush(down)
}

inline m_seen() {                  /* the highest generation this rank has seen, into g */
    g = m_gen[0];
    if
    :: m_gen[1] > g -> g = m_gen[1]
    :: else -> skip
    fi
}

#ifdef NO_EPOCH
#define M_MAY_COMMIT(s) (held1[AT(m_ord[s], s, m_gen[s])] == 1 && m_gen[s] > 0)
#else
#define M_MAY_COMMIT(s) (m_standing == OPENED && m_in[s] == m_epoch && m_ballot[s] == READY)
#endif

inline m_commit(s) {
    if
    :: M_MAY_COMMIT(s) ->
        assert(held1[AT(m_ord[s], s, m_gen[s])] == 1);
        assert(m_ord[s] == opens)
    :: else -> skip
    fi
}

active proctype rank1() {
    mtype kind;
    byte n, s, g, ord;
    m_ballot[0] = NO_PAPER;
    m_ballot[1] = NO_PAPER;
end:
    do
    :: atomic { !cut && !m_up ->
        m_up = true;
        if
        :: m_life != c_life -> m_life = c_life; m_epoch = 0; m_least = 1
        :: else -> skip
        fi
       }
    :: atomic { cut && m_up ->
        flush(down);
        m_up = false;
        if
        :: m_standing != OUT -> m_least = m_epoch + 1
        :: else -> skip
        fi;
        m_standing = OUT;
        m_end_epoch();
        m_returned[0] = true;
        m_returned[1] = true
       }
    :: atomic { m_standing == ASKED && !m_own[0] && !m_own[1] ->
        m_standing = AGREED;
        m_seen();
        tell(up, AGREE, m_epoch, 0, g, 0);
        g = 0
       }
    :: atomic { one_slot(s);       /* this rank's own rows */
        if
        :: m_ballot[s] == GRANTED ->
#ifdef ALONE
            m_ballot[s] = READY;
            hold1(m_ord[s], s, m_gen[s], 1)
#else
            m_ballot[s] = WAITING;
            tell(up, VOTE_READY, m_in[s], s, m_gen[s], 0)
#endif
        :: m_ballot[s] == GRANTED ->
#ifdef ALONE
            m_ballot[s] = DEAD;
            hold1(m_ord[s], s, m_gen[s], 2)
#else
            m_ballot[s] = REFUSED;
            tell(up, VOTE_NO, m_in[s], s, m_gen[s], 0)
#endif
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic { one_slot(s);       /* the sampler is done, or nothing can land any more */
        if
        :: m_own[s] && !UNDECIDED(s) ->
            m_own[s] = false;
            if
            :: !m_returned[s] -> m_returned[s] = true; tell(up, RELEASED, m_in[s], s, m_gen[s], 0)
            :: else -> skip
            fi
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic { one_slot(s); m_commit(s); s = 0 }
    :: atomic { leaves < LEAVES && (m_standing == OPENED || m_standing == AGREED) ->
        leaves++;                  /* rank 1's own target process dies */
        m_standing = LEFT;
        m_end_epoch();
        tell(up, LEAVE, m_epoch, 0, 0, 0)
       }
    :: atomic { m_crashes < CRASHES1 -> m_crashes++; lose_link(); m_reset() }
    :: atomic { m_up && nempty(down) ->
        down ? kind, n, s, g, ord;
        if
        :: kind == ASKING || kind == OPEN ->
            assert(n >= m_least && n >= m_epoch);
            if
            :: n > m_epoch -> assert(kind == ASKING); m_end_epoch(); m_standing = ASKED
            :: n == m_epoch && kind == OPEN ->
                assert(m_standing == AGREED || m_standing == LEFT);
                if
                :: m_standing == AGREED -> m_standing = OPENED
                :: else -> skip
                fi
            :: else -> assert(m_standing == OUT); m_standing = ASKED
            fi;
            m_epoch = n;
            if
            :: kind == OPEN -> m_ordinal = ord
            :: else -> skip
            fi
        :: kind == GRANT ->
            assert(m_standing == OPENED || m_standing == LEFT);
            assert(n == m_epoch);
            assert(m_ballot[s] == NO_PAPER || (!UNDECIDED(s) && m_returned[s]));
            assert(g > m_gen[s] && !m_own[s]);
            m_gen[s] = g;
            m_ord[s] = ord;
            m_in[s] = n;
            m_returned[s] = false;
            m_own[s] = true;
            if
            :: m_standing == LEFT -> m_ballot[s] = LOST
            :: else -> m_ballot[s] = GRANTED
            fi
        :: kind == DECIDE_READY || kind == DECIDE_VOID ->
            assert(n == m_epoch && m_gen[s] == g && m_in[s] == n);
            if
            :: m_ballot[s] == LOST -> skip
#ifdef ALONE
            :: m_ballot[s] != LOST && !UNDECIDED(s) -> skip
            :: m_ballot[s] != LOST && UNDECIDED(s) -> m_ballot[s] = DEAD; hold1(m_ord[s], s, g, 2)
#else
            :: else ->
                if
                :: kind == DECIDE_READY ->
                    assert(m_ballot[s] == WAITING);
                    m_ballot[s] = READY;
                    hold1(m_ord[s], s, g, 1)
                :: else ->
                    assert(UNDECIDED(s));
                    m_ballot[s] = DEAD;
                    hold1(m_ord[s], s, g, 2)
                fi
#endif
            fi
        fi;
        kind = 0; n = 0; s = 0; g = 0; ord = 0
       }
    od
}
