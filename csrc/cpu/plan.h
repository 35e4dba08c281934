// Where the rows of an exchange go, from the counts that all ranks know.
//
//   R ranks, E experts; counts is [R, E + R]: per source its routes per expert, then its distinct tokens per rank.
#pragma once

#include <cstdint>
#include <vector>

namespace moecomm {

enum class RowOrder {
    kExpertMajor,  // by local expert, source, token, k
    kFlat,         // by source, token
    kSlab,         // as kExpertMajor, each local expert in a slab of `capacity` rows
};

struct PlanRequest {
    const int32_t* counts;
    int64_t num_ranks;
    int64_t num_experts;
    const int64_t* first_expert;  // [R + 1] id of each rank's first expert; the last entry is E
    int64_t rank;                 // mine
    RowOrder order;
    int64_t alignment;  // each expert's rows are padded to a multiple of it (not kSlab)
    int64_t capacity;   // rows there are: kSlab: of each expert; else of each rank, 0 = as many as arrive
};

struct ExchangePlan {
    // Where my rows begin: [E] row at the expert's rank of my first route to it; kFlat: [R] row there of my first
    // token.
    std::vector<int64_t> bases;
    std::vector<int64_t> rows_per_rank;          // [R] rows that each rank receives, padding included
    int64_t num_rows = 0;                        // mine, without those that only fill up to the capacity (not kSlab)
    std::vector<int32_t> num_tokens_per_expert;  // [E_local] routes that arrive here
    std::vector<int32_t> offsets;                // [E_local] where each expert's rows end, padding included
    // The most rows that a rank receives or (kFlat) its experts have: beyond 2^31 - 1 `offsets` is worthless.
    int64_t most_rows = 0;
    // What has most rows beyond the capacity, expert (kSlab) or rank, and its rows; -1 = all fits.
    int64_t overflow_index = -1;
    int64_t overflow_rows = 0;
};

ExchangePlan plan_exchange(const PlanRequest& request);

}  // namespace moecomm
