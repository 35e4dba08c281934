// Low-latency rows: one message per source and destination, which carries everything; the receiver sorts it out.
//
//   message in a window   ids [T, K] int32 | values [T, K] (none, float or double) | rows [n, H]
//
// T is the source's, each part begins at a multiple of 64 bytes, and n counts the source's tokens that have an expert
// at the destination, in token order: each such row travels once, however many experts want it there. A destination is
// a rank, or a domain whose ranks all read the same message. Every message holds all ids of its source, so every rank
// knows every count and can place its own rows, also those that others receive.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/push.h"
#include "cpu/routing.h"

namespace moecomm {

// Writes my message into my window at every destination; routing says which one an expert belongs to, in place of its
// rank. Checks all ids first and then writes; ids_out [T, K] gets a copy. values is [T, K] of value_bytes each (0 =
// none). Returns the fingerprint that count_routes gives.
int64_t send_eager(const Routing& routing, const Rows& rows, const char* values, int64_t value_bytes,
                   const Addresses& windows, int32_t* ids_out);

struct EagerReceive {
    const Addresses& windows;                // [R] messages, by source
    const std::vector<int64_t>& num_tokens;  // [R] T of each source
    int64_t num_topk;
    const int32_t* expert_rank;   // [E]
    const int32_t* expert_local;  // [E]
    int64_t num_experts;
    int64_t rank;                   // mine
    const uint8_t* domain_experts;  // [E]: 1 = of my domain; only read if a message is my domain's
    const uint8_t* domain_sources;  // [R]: 1 = the source's message is my domain's, 0 = mine; nullptr = all are mine
    int64_t row_bytes;
    int64_t value_bytes;             // 0 = no values
    int64_t capacity;                // rows per expert (slab), or 0: experts follow each other (expert_major)
    int64_t alignment;               // of each expert's rows (expert_major)
    int64_t num_rows;                // rows of the block at every rank (expert_major)
    char* rows;                      // the block: slab [E_local, capacity, H] or expert_major [num_rows, H]
    char* values;                    // the same for values, or nullptr
    int64_t* used;                   // [E_local], see below
    int32_t* counts;                 // [R, E + R], overwritten, as in a handle
    int64_t* routes;                 // [T, K] of my tokens, overwritten
    int32_t* num_tokens_per_expert;  // [E_local], overwritten
    int32_t* offsets;                // [E_local], overwritten: end of each expert's rows (expert_major)
    int64_t* tokens_per_expert;      // [E_local], added to
};

// Where there is not room for all rows: the expert (slab) or rank (expert_major), its rows, and the rows there are.
struct EagerOverflow {
    int64_t index;  // -1 = all fits
    int64_t need;
    int64_t room;
};

// Counts, places and copies. Rows and values of the block that no route fills become zero; to do that without touching
// the whole block, `used` remembers how many rows hold something: slab: of each expert; expert_major: used[0] of all.
// If something does not fit at any rank, nothing is copied.
EagerOverflow receive_eager(const EagerReceive& receive);

// Copies the rows that routes name, and no others, from one block to another of the same form. counts [R, E + R] as in
// a handle; the local experts are [first_expert, first_expert + num_local).
void copy_expert_rows(char* out, const char* in, int64_t row_bytes, const int32_t* counts, int64_t num_ranks,
                      int64_t num_experts, int64_t first_expert, int64_t num_local, int64_t capacity,
                      int64_t alignment);

}  // namespace moecomm
