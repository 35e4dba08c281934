// Sends rows to where their routes say: one read of each source row, one store per destination.
#pragma once

#include <cstdint>

#include "cpu/routes.h"
#include "cpu/row_loops.h"

namespace moecomm {

struct Rows {
    const char* data;
    int64_t stride_bytes;  // from one row to the next
    int64_t num_rows;
    int64_t row_bytes;
};

// Shorter rows are written by ordinary stores in every case: too little of them is whole cache lines.
inline constexpr int64_t kStreamingRowBytes = 256;

// routes is [num_rows, num_slots]. Copies bytes. All stores are ordered before any later store of this thread.
void push_rows(const Rows& rows, const int64_t* routes, int64_t num_slots, const Addresses& addresses);

// The same, storing weights[t, p] * row, rounded once; weights is [num_rows, num_slots] double for fp64 rows and float
// for others, read only where there is a route.
void push_weighted_rows(const Rows& rows, Format format, const int64_t* routes, int64_t num_slots,
                        const Addresses& addresses, const void* weights);

}  // namespace moecomm
