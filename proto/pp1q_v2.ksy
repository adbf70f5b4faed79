# The authoritative layout of PP1Q data-plane frames, wire version 2. Prose and rules that Kaitai Struct cannot state
# (digests, which kind may carry which common field, what is refused and at what cost) are in spec.md beside this file.
meta:
  id: pp1q_v2
  title: PP1Q transport v2, data plane
  license: Apache-2.0
  ks-version: "0.9"
  endian: le
doc: |
  One direction of a PP1Q link: frames back to back, each a 128-byte header and `payload_length` bytes. The first frame of
  each direction is a PROOF. Integers are little-endian and unsigned unless said otherwise.
doc-ref: spec.md
seq:
  - id: frames
    type: frame
    repeat: eos

types:
  frame:
    seq:
      - id: header
        type: header
      - id: payload
        size: header.payload_length
        type:
          switch-on: header.kind
          cases:
            'kind::reply': reply_payload
            'kind::open': tokens_payload
            'kind::commit': tokens_payload
            'kind::proof': proof_payload
            'kind::vote': claim_payload
            'kind::decide': tokens_payload
            'kind::exchange': exchange_payload
        doc: Empty for every other kind, which must state payload_length 0.

  header:
    doc: 128 bytes. A field that a kind does not carry is zero (spec.md, "Common fields by kind").
    seq:
      - id: magic
        contents: PP1Q
      - id: version
        type: u1
        valid: 2
      - id: kind
        type: u1
        enum: kind
      - id: flags
        type: u2
        valid: 0
        doc: Version 2 has no flags.
      - id: boot_nonce
        type: u8
        doc: The sender's, from its HELLO.
      - id: session
        type: u8
      - id: request
        type: u8
      - id: slot_generation
        type: u4
        doc: Per slot and session, from 1, strictly rising. Fences; nothing else.
      - id: request_generation
        type: u4
        doc: The receiver's count of discards of this request; a word of the RNG counter.
      - id: round
        type: u4
      - id: position
        type: u4
        doc: Absolute; what it names depends on the kind.
      - id: slot
        type: u2
      - id: shard
        type: u2
        doc: Vocabulary shard (0 when there is one), the sender's rank in a PROOF, the rank whose part an EXCHANGE is.
      - id: depth
        type: u1
      - id: representation
        type: u1
        enum: representation
      - id: reserved
        type: u2
        valid: 0
      - id: payload_length
        type: u4
        doc: Bytes after this header.
      - id: entry_count
        type: u4
        doc: Values of a REPLY's row, elements of an EXCHANGE.
      - id: arguments
        size: 48
        type:
          switch-on: kind
          cases:
            'kind::open': open_arguments
            'kind::close': notice_arguments
            'kind::step': step_arguments
            'kind::reply': reply_arguments
            'kind::completion': completion_arguments
            'kind::commit': commit_arguments
            'kind::reset': notice_arguments
            'kind::cancel': notice_arguments
            'kind::token': token_arguments
            'kind::status': notice_arguments
            'kind::proof': notice_arguments
            'kind::grant': grant_arguments
            'kind::vote': ballot_arguments
            'kind::decide': ballot_arguments
            'kind::released': ballot_arguments
            'kind::epoch': epoch_arguments
            'kind::agree': agree_arguments
            'kind::leave': ballot_arguments
            'kind::exchange': exchange_arguments
      - id: payload_digest
        type: u8
        doc: XXH3-64 of the payload, seeded with the frame's identity; 0 for a kind without payload.
      - id: header_digest
        type: u8
        doc: XXH3-64, seed 0, of the 120 bytes before it.

  open_arguments:
    seq:
      - id: prefix_low
        type: u8
      - id: prefix_high
        type: u8
        doc: Together the 128-bit digest of the committed tokens.
      - id: seed
        type: u8
        doc: The request seed, the key of its Philox.
      - id: token_count
        type: u4
      - id: max_position
        type: u4
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  step_arguments:
    seq:
      - id: prefix_low
        type: u8
      - id: prefix_high
        type: u8
      - id: target_context
        type: u8
        doc: Version of the target's processors, grammar and stop rules.
      - id: trace_id
        type: u8
      - id: temperature
        type: f4
        doc: Of the proposal; 0..1e6.
      - id: support_policy
        type: u4
        doc: 0 for the whole vocabulary (dense), or the k of a global top-k.
      - id: budget_us
        type: u4
        doc: From the enqueueing of this STEP, by the receiver's clock; at least 1.
      - id: reserved_arguments
        contents: [0, 0, 0, 0]

  reply_arguments:
    seq:
      - id: token
        type: s4
        doc: Global ID of the drawn token.
      - id: draw_counter
        type: u4
        doc: 0 in this RNG ABI.
      - id: context
        type: u8
        doc: Digest of what the row is conditioned on.
      - id: first_id
        type: u4
      - id: end_id
        type: u4
        doc: The shard's IDs are first_id up to, not including, end_id.
      - id: shard_mass
        type: u4
      - id: mass_before
        type: u4
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  completion_arguments:
    seq:
      - id: reply_size
        type: u8
        doc: Payload bytes of all rows together.
      - id: context
        type: u8
      - id: reply_digest
        type: u8
        doc: XXH3-64, seed 0, of 16 bytes a row (position u4, payload_length u4, payload_digest u8) in order.
      - id: positions
        type: u4
        doc: Rows sent.
      - id: status
        type: u2
        enum: reason
        doc: 0, or why the draft gave up.
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  commit_arguments:
    seq:
      - id: prefix_low
        type: u8
      - id: prefix_high
        type: u8
        doc: Digest of the prefix with the new tokens.
      - id: token_count
        type: u4
      - id: accepted
        type: u4
        doc: How many of the tokens are accepted drafts.
      - id: source
        type: u4
        enum: source
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  token_arguments:
    seq:
      - id: token
        type: s4
      - id: draw_counter
        type: u4
      - id: context
        type: u8
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  notice_arguments:
    doc: CLOSE, RESET, CANCEL, STATUS and PROOF.
    seq:
      - id: reserved_first
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: subject
        type: u4
        doc: The kind a notice is about (0 for the link); in a PROOF the role, 1 leader, 2 receiver, 3 coordinator, 4 member; 0 in a CLOSE.
      - id: status
        type: u2
        enum: reason
        doc: The reason a notice gives; 0 in CLOSE and PROOF.
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  grant_arguments:
    doc: Of a group link. What a member needs to judge the rows of one proposal by itself.
    seq:
      - id: seed
        type: u8
        doc: The request seed, for the draw proof.
      - id: context
        type: u8
        doc: Context digest of the STEP.
      - id: target_context
        type: u8
      - id: trace_id
        type: u8
      - id: support_policy
        type: u4
      - id: budget_us
        type: u4
        doc: The STEP's whole budget; rank 0's clock decides, no member's.
      - id: epoch
        type: u4
      - id: owner
        type: u4
        doc: The rank that the rows go to; 0xffffffff for every rank.

  ballot_arguments:
    doc: VOTE, DECIDE, RELEASED and LEAVE.
    seq:
      - id: reserved_first
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: epoch
        type: u4
      - id: reserved_middle
        contents: [0, 0, 0, 0, 0, 0, 0, 0]
      - id: status
        type: u2
        enum: reason
        doc: 0 is ready in a VOTE and a DECIDE; 0 in a RELEASED; a reason in a LEAVE.
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  epoch_arguments:
    seq:
      - id: reserved_first
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
      - id: epoch
        type: u4
      - id: reserved_middle
        contents: [0, 0, 0, 0]
      - id: phase
        type: u4
        enum: phase
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  agree_arguments:
    seq:
      - id: state_low
        type: u8
      - id: state_high
        type: u8
        doc: Together the 128-bit digest of the rank's committed state.
      - id: epoch
        type: u4
      - id: floor
        type: u4
        doc: The highest slot_generation that the rank has seen.
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  exchange_arguments:
    doc: One rank's part of one exchange of a computation over vocabulary shards.
    seq:
      - id: sequence
        type: u4
        doc: Of the exchange in its epoch, from 0; every rank counts alike.
      - id: purpose
        type: u4
        doc: What is exchanged; decides the type of the elements (spec.md, "Exchanges").
      - id: first_id
        type: u4
      - id: end_id
        type: u4
        doc: The tokens of this rank are first_id up to, not including, end_id.
      - id: epoch
        type: u4
      - id: reserved_arguments
        contents: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]

  reply_payload:
    doc: Dense, q of every token and zero padding up to a multiple of 64 bytes; sparse, q of every entry, then their IDs.
    seq:
      - id: q
        type: f4
        repeat: expr
        repeat-expr: _parent.header.entry_count
        doc: count / 2^24, exact.
      - id: ids
        type: s4
        repeat: expr
        repeat-expr: _parent.header.entry_count
        if: _parent.header.representation == representation::sparse
        doc: Global IDs, strictly ascending.
      - id: padding
        size-eos: true
        doc: Zeros.

  tokens_payload:
    seq:
      - id: tokens
        type: s4
        repeat: eos

  claim_payload:
    doc: What a ready vote says of the rank's rows; empty in mode "replicate" and in a vote that gives a reason.
    seq:
      - id: claim
        type: claim
        if: _parent.header.payload_length != 0

  claim:
    seq:
      - id: first_id
        type: u4
      - id: end_id
        type: u4
      - id: rows
        type: claimed_row
        repeat: eos

  claimed_row:
    seq:
      - id: token
        type: s4
      - id: shard_mass
        type: u4
      - id: mass_before
        type: u4

  exchange_payload:
    doc: The elements of one part. Their purpose says whether a word is an f8, an s8 or a u8.
    seq:
      - id: entries
        type: exchange_entry
        repeat: expr
        repeat-expr: _parent.header.entry_count
        if: _parent.header.payload_length == 12 * _parent.header.entry_count
      - id: words
        type: u8
        repeat: expr
        repeat-expr: _parent.header.entry_count
        if: _parent.header.payload_length != 12 * _parent.header.entry_count

  exchange_entry:
    seq:
      - id: value
        type: u8
        doc: The bits of an f8, a logit or a weight.
      - id: token
        type: s4
        doc: Its global ID, or -1 for none.

  proof_payload:
    seq:
      - id: hmac
        size: 32
        doc: HMAC-SHA256 under the session's secret.

enums:
  kind:
    1: open
    2: close
    3: step
    4: reply
    5: completion
    6: commit
    7: reset
    8: cancel
    9: token
    10: status
    11: proof
    12: grant
    13: vote
    14: decide
    15: released
    16: epoch
    17: agree
    18: leave
    19: exchange
  phase:
    1: gathering
    2: asking
    3: open
  representation:
    0: none
    1: dense
    2: sparse
  source:
    1: verified
    2: target_only
  reason:
    0: none
    1: bad_magic
    2: bad_version
    3: unknown_kind
    4: unknown_flag
    5: reserved_bits
    6: header_digest
    7: length_bounds
    8: auth_failed
    9: boot_nonce
    10: session_mismatch
    11: slot_bounds
    12: slot_state
    13: generation_stale
    14: generation_duplicate
    15: round_mismatch
    16: depth_mismatch
    17: position_bounds
    18: position_duplicate
    19: context_mismatch
    20: representation
    21: support_bounds
    22: payload_digest
    23: id_range
    24: id_order
    25: id_duplicate
    26: nonfinite
    27: negative
    28: nondyadic
    29: mass
    30: zero_entry
    31: zero_q_token
    32: padding_nonzero
    33: draw_mismatch
    34: reply_size
    35: incomplete
    36: identity_mismatch
    37: semantic_mismatch
    38: limits_mismatch
    39: timeout
    40: cancelled
    41: peer_lost
    42: link_error
    43: rank_disagree
    44: key_reuse
    45: overload
    46: request_unknown
    47: request_duplicate
    48: generation_exhausted
    49: unexpected_kind
    50: malformed
    51: invalid_weights
    52: request_mismatch
    53: circuit_open
    54: copy_failed
