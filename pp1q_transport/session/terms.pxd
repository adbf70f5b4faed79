# C types of terms.py in the compiled build.
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef class SessionTerms:
    cdef public uint64_t session, leader_nonce, receiver_nonce
    cdef public uint32_t vocab_size, depth, support, max_slots, max_context_tokens
    cdef public uint32_t shard, first_id, end_id, shard_entries
    cdef public bint dense, sparse, draw_proof, sharded
    cdef public uint64_t dense_row_bytes, max_payload

    cpdef int judge_step(self, uint32_t depth, double temperature, uint32_t support, uint32_t representation,
                         int64_t budget_us) except -1
