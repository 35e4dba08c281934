// Fetches the rows that the routes name and adds them up per token.
#pragma once

#include <cstdint>

#include "cpu/routes.h"
#include "cpu/row_loops.h"

namespace moecomm {

// out is [num_tokens, num_columns]; routes and weights (double for fp64 rows, float for others; or nullptr) are
// [num_tokens, num_slots]. Row t of out is the sum over p in ascending order, from zero, in fp32 (fp64 for fp64),
// rounded once; zeros where no route is.
void combine_rows(char* out, int64_t num_tokens, int64_t num_columns, Format format, const int64_t* routes,
                  int64_t num_slots, const Addresses& addresses, const void* weights);

}  // namespace moecomm
