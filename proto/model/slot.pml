/*
 * One receiver's landing memory under one-sided writes: grant, late write, fence, quarantine, reuse.
 *
 * Between SPEC section 4 (isolate before validate, invalidate before reuse) and the code that README.md names for each transition.
 * The peer is hostile: it writes any half of any row it was ever granted, whenever it likes, as often as it likes, and says at any
 * moment that a row is there. Says nothing about time, ranks or frames: see decision.pml.
 *
 * -DNO_FENCE    the key of a dead generation is not revoked: must fail
 * -DIN_PLACE    rows are validated, and read, where they land: must fail
 */

#define SLOTS 2
#ifndef GENS
#define GENS 3                     /* grants of each slot */
#endif
#define HALVES 2                   /* a row lands in two pieces, so that a write can be cut in the middle */
#define AT(slot, half) ((slot) * HALVES + (half))
#define OF(slot, gen) ((slot) * (GENS + 1) + (gen))

mtype = { FREE, GRANTED, COPYING, READY, QUARANTINE };

mtype state[SLOTS];
byte gen[SLOTS];                   /* slot_generation */
byte key[SLOTS];                   /* the remote key of the slot's landing memory; another number is another key */
byte landing[SLOTS * HALVES];      /* which generation's bytes lie there */
byte copy[SLOTS * HALVES];         /* the slot itself, which a sampler reads */
byte granted_key[SLOTS * (GENS + 1)];   /* what the peer was told, by OF(slot, gen); 0: never granted */
bool begun[SLOTS];                 /* the first half is copied */
byte fenced[SLOTS];                /* ghost: the last generation that was fenced */

#ifdef IN_PLACE
#define SEEN(slot, half) landing[AT(slot, half)]
#else
#define SEEN(slot, half) copy[AT(slot, half)]
#endif

/* What a sampler may look at is whole and of its own generation, at every moment. */
#define SOUND(slot) (state[slot] != READY || (SEEN(slot, 0) == gen[slot] && SEEN(slot, 1) == gen[slot]))

inline one_slot(s) {
    if
    :: s = 0
    :: s = 1
    fi
}

active proctype peer() {
    byte s, g, half;
end:
    do
    :: atomic {                    /* one half of a row, with the key it was granted with */
        one_slot(s);
        g = 1;
        do
        :: g < GENS -> g++
        :: break
        od;
        if
        :: granted_key[OF(s, g)] == 0 -> skip
        :: granted_key[OF(s, g)] != 0 && granted_key[OF(s, g)] != key[s] -> skip   /* the writer gets an error */
        :: granted_key[OF(s, g)] != 0 && granted_key[OF(s, g)] == key[s] ->
            if
            :: half = 0
            :: half = 1
            fi;
            assert(g > fenced[s]); /* a generation that was invalidated and fenced lands nowhere */
            landing[AT(s, half)] = g;
            assert(SOUND(0) && SOUND(1))
        fi;
        s = 0; g = 0; half = 0
       }
    od
}

active proctype receiver() {
    byte s;
    key[0] = 1;
    key[1] = 1;
    state[0] = FREE;
    state[1] = FREE;
end:
    do
    :: atomic {                    /* STEP */
        one_slot(s);
        if
        :: state[s] == FREE && gen[s] < GENS ->
            gen[s]++;
            granted_key[OF(s, gen[s])] = key[s];
            state[s] = GRANTED
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic {                    /* "the row is there": true or not, for the peer may say so whenever it likes */
        one_slot(s);
        if
        :: state[s] == GRANTED -> state[s] = COPYING
        :: else -> skip            /* generation_stale, generation_duplicate: judged before anything is touched */
        fi;
        s = 0
       }
    :: atomic {                    /* the copy begins ... */
        one_slot(s);
        if
        :: state[s] == COPYING && !begun[s] ->
            copy[AT(s, 0)] = landing[AT(s, 0)];
            begun[s] = true
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic {                    /* ... and ends; the digest of what was copied decides */
        one_slot(s);
        if
        :: state[s] == COPYING && begun[s] ->
            begun[s] = false;
            copy[AT(s, 1)] = landing[AT(s, 1)];
            if
            :: SEEN(s, 0) == gen[s] && SEEN(s, 1) == gen[s] -> state[s] = READY
            :: else -> state[s] = QUARANTINE      /* payload_digest */
            fi;
            assert(SOUND(0) && SOUND(1))
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic {                    /* timeout, cancel, loss of the peer */
        one_slot(s);
        if
        :: state[s] == GRANTED || state[s] == COPYING ->
            state[s] = QUARANTINE;
            begun[s] = false
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic {                    /* the fence: the old key is worth nothing before the slot is FREE */
        one_slot(s);
        if
        :: state[s] == QUARANTINE ->
#ifndef NO_FENCE
            key[s]++;
#endif
            fenced[s] = gen[s];
            state[s] = FREE
        :: else -> skip
        fi;
        s = 0
       }
    :: atomic {                    /* the last consumer is done: no key operation in the normal path */
        one_slot(s);
        if
        :: state[s] == READY -> state[s] = FREE
        :: else -> skip
        fi;
        s = 0
       }
    od
}
