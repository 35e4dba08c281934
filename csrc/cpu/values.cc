#include "cpu/values.h"

#include <cstring>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

// The expert id at (t, k).
inline int64_t expert_at(const Routing& routing, int64_t t, int64_t k) {
    const int64_t i = t * routing.num_topk + k;
    const int64_t expert = routing.is_int64 ? static_cast<const int64_t*>(routing.topk_idx)[i]
                                            : static_cast<const int32_t*>(routing.topk_idx)[i];
    check_expert(expert, t, k, routing.num_experts);
    return expert;
}

template <class Value>
inline void put(char* row, int64_t k, Value value) {
    std::memcpy(row + k * static_cast<int64_t>(sizeof value), &value, sizeof value);
}

template <class Value>
inline Value get(const char* row, int64_t k) {
    Value value;
    std::memcpy(&value, row + k * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
}

}  // namespace

template <class Value>
void push_values(const Value* values, const int64_t* routes, int64_t num_tokens, int64_t num_slots,
                 const Addresses& addresses) {
    for (int64_t i = 0; i < num_tokens * num_slots; ++i)
        if (routes[i] >= 0) put(locate(routes[i], addresses, sizeof(Value)), 0, values[i]);
    fence_streaming();
}

template <class Value>
void pull_values(Value* out, const int64_t* routes, int64_t num_tokens, int64_t num_slots, const Addresses& addresses) {
    for (int64_t i = 0; i < num_tokens * num_slots; ++i)
        out[i] = routes[i] < 0 ? Value(0) : get<Value>(locate(routes[i], addresses, sizeof(Value)), 0);
}

template <class Value>
void push_flat_metadata(const Routing& routing, const int32_t* expert_local, const Value* weights,
                        const int64_t* routes, int64_t num_slots, const Addresses& idx_addresses,
                        const Addresses& weight_addresses) {
    const int64_t num_topk = routing.num_topk;
    for (int64_t t = 0; t < routing.num_tokens; ++t, routes += num_slots) {
        for (int64_t p = 0; p < num_slots; ++p) {
            if (routes[p] < 0) continue;
            char* const ids = locate(routes[p], idx_addresses, num_topk * static_cast<int64_t>(sizeof(int32_t)));
            char* const row = weights == nullptr
                                  ? nullptr
                                  : locate(routes[p], weight_addresses, num_topk * static_cast<int64_t>(sizeof(Value)));
            for (int64_t k = 0; k < num_topk; ++k) {
                const int64_t expert = expert_at(routing, t, k);
                const bool is_there = expert >= 0 && routing.expert_rank[expert] == rank_of(routes[p]);
                put(ids, k, is_there ? expert_local[expert] : int32_t{-1});
                if (weights != nullptr) put(row, k, is_there ? weights[t * num_topk + k] : Value(0));
            }
        }
    }
    fence_streaming();
}

template <class Value>
void pull_flat_values(Value* out, const Routing& routing, const int64_t* routes, int64_t num_slots,
                      const Addresses& addresses) {
    const int64_t row_bytes = routing.num_topk * static_cast<int64_t>(sizeof(Value));
    for (int64_t t = 0; t < routing.num_tokens; ++t, routes += num_slots) {
        for (int64_t k = 0; k < routing.num_topk; ++k, ++out) {
            *out = Value(0);
            const int64_t expert = expert_at(routing, t, k);
            if (expert < 0) continue;
            for (int64_t p = 0; p < num_slots; ++p) {
                if (routes[p] < 0 || rank_of(routes[p]) != routing.expert_rank[expert]) continue;
                *out = get<Value>(locate(routes[p], addresses, row_bytes), k);
                break;
            }
        }
    }
}

#define MOECOMM_VALUES_OF(Value)                                                                            \
    template void push_values(const Value*, const int64_t*, int64_t, int64_t, const Addresses&);            \
    template void pull_values(Value*, const int64_t*, int64_t, int64_t, const Addresses&);                  \
    template void push_flat_metadata(const Routing&, const int32_t*, const Value*, const int64_t*, int64_t, \
                                     const Addresses&, const Addresses&);                                   \
    template void pull_flat_values(Value*, const Routing&, const int64_t*, int64_t, const Addresses&);
MOECOMM_VALUES_OF(float)
MOECOMM_VALUES_OF(double)
#undef MOECOMM_VALUES_OF

}  // namespace moecomm
