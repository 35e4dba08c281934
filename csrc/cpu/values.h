// Small things that travel beside the rows: one value per route, and the ids and weights of flat rows. Values and
// weights are float or, beside fp64 rows, double.
//
//   T num_tokens, K num_topk, P num_slots; routes is [T, P].
#pragma once

#include <cstdint>

#include "cpu/routes.h"
#include "cpu/routing.h"

namespace moecomm {

// values [T, P]: each is stored at its route's row of a [N] array.
template <class Value>
void push_values(const Value* values, const int64_t* routes, int64_t num_tokens, int64_t num_slots,
                 const Addresses& addresses);

// out [T, P]: the value at each route's row of a [N] array; 0 where there is no route.
template <class Value>
void pull_values(Value* out, const int64_t* routes, int64_t num_tokens, int64_t num_slots, const Addresses& addresses);

// For each route (one per rank of the token): a row of K int32 local ids, -1 for experts of other ranks, and (unless
// weights, [T, K], is nullptr) a row of K weights, 0 there.
template <class Value>
void push_flat_metadata(const Routing& routing, const int32_t* expert_local, const Value* weights,
                        const int64_t* routes, int64_t num_slots, const Addresses& idx_addresses,
                        const Addresses& weight_addresses);

// out [T, K]: column k of the [N, K] row that the token has at the rank of its expert k; 0 where the id is -1.
template <class Value>
void pull_flat_values(Value* out, const Routing& routing, const int64_t* routes, int64_t num_slots,
                      const Addresses& addresses);

}  // namespace moecomm
