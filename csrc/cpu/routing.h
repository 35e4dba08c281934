// From expert ids to routes: how many rows go to each expert and rank, and which row is whose.
//
//   T num_tokens, K num_topk, E num_experts, R num_ranks; topk_idx is [T, K], contiguous, -1 = no expert.
// Every function throws std::invalid_argument naming token, k, value and range if an id is not in [-1, E).
#pragma once

#include <cstdint>
#include <string>

#include "check.h"

namespace moecomm {

struct Routing {
    const void* topk_idx;  // [T, K]
    bool is_int64;         // else int32
    int64_t num_tokens;
    int64_t num_topk;
    const int32_t* expert_rank;  // [E], each in [0, R)
    int64_t num_experts;
    int64_t num_ranks;
};

// Throws unless the id at [token, k] is an expert or -1.
inline void check_expert(int64_t expert, int64_t token, int64_t k, int64_t num_experts) {
    MC_CHECK(static_cast<uint64_t>(expert) + 1 <= static_cast<uint64_t>(num_experts),
             "topk_idx[" + std::to_string(token) + ", " + std::to_string(k) + "] = " + std::to_string(expert) +
                 " is not an expert: valid ids are 0 to " + std::to_string(num_experts - 1) + ", or -1 for no expert");
}

// counts[:E] = routes per expert, counts[E:] = distinct tokens per rank. Returns a 63-bit fingerprint of the ids.
int64_t count_routes(const Routing& routing, int32_t* counts);

// routes[t, k] = rank of the expert and its next row, starting at bases[expert].
void plan_expert_major(const Routing& routing, const int64_t* bases, int64_t* routes);

// routes[t, :] = one entry per distinct rank of the token, ascending, starting at bases[rank]; then -1.
void plan_flat(const Routing& routing, const int64_t* bases, int64_t* routes);

}  // namespace moecomm
