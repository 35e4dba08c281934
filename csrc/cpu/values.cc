#include "cpu/values.h"

#include <cstring>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

constexpr int64_t kValueBytes = 4;

// The expert id at (t, k).
inline int64_t expert_at(const Routing& routing, int64_t t, int64_t k) {
    const int64_t i = t * routing.num_topk + k;
    const int64_t expert = routing.is_int64 ? static_cast<const int64_t*>(routing.topk_idx)[i]
                                            : static_cast<const int32_t*>(routing.topk_idx)[i];
    check_expert(expert, t, k, routing.num_experts);
    return expert;
}

inline void put(char* row, int64_t k, const void* value) { std::memcpy(row + k * kValueBytes, value, kValueBytes); }

}  // namespace

void push_values(const float* values, const int64_t* routes, int64_t num_tokens, int64_t num_slots,
                 const Addresses& addresses) {
    for (int64_t i = 0; i < num_tokens * num_slots; ++i)
        if (routes[i] >= 0) put(locate(routes[i], addresses, kValueBytes), 0, values + i);
    fence_streaming();
}

void pull_values(float* out, const int64_t* routes, int64_t num_tokens, int64_t num_slots, const Addresses& addresses) {
    for (int64_t i = 0; i < num_tokens * num_slots; ++i) {
        out[i] = 0.0f;
        if (routes[i] >= 0) std::memcpy(out + i, locate(routes[i], addresses, kValueBytes), kValueBytes);
    }
}

void push_flat_metadata(const Routing& routing, const int32_t* expert_local, const float* weights,
                        const int64_t* routes, int64_t num_slots, const Addresses& idx_addresses,
                        const Addresses& weight_addresses) {
    const int64_t row_bytes = routing.num_topk * kValueBytes;
    for (int64_t t = 0; t < routing.num_tokens; ++t, routes += num_slots) {
        for (int64_t p = 0; p < num_slots; ++p) {
            if (routes[p] < 0) continue;
            char* const ids = locate(routes[p], idx_addresses, row_bytes);
            char* const row = weights == nullptr ? nullptr : locate(routes[p], weight_addresses, row_bytes);
            for (int64_t k = 0; k < routing.num_topk; ++k) {
                const int64_t expert = expert_at(routing, t, k);
                const bool is_there = expert >= 0 && routing.expert_rank[expert] == rank_of(routes[p]);
                const int32_t id = is_there ? expert_local[expert] : -1;
                put(ids, k, &id);
                if (weights == nullptr) continue;
                const float weight = is_there ? weights[t * routing.num_topk + k] : 0.0f;
                put(row, k, &weight);
            }
        }
    }
    fence_streaming();
}

void pull_flat_values(float* out, const Routing& routing, const int64_t* routes, int64_t num_slots,
                      const Addresses& addresses) {
    const int64_t row_bytes = routing.num_topk * kValueBytes;
    for (int64_t t = 0; t < routing.num_tokens; ++t, routes += num_slots) {
        for (int64_t k = 0; k < routing.num_topk; ++k, ++out) {
            *out = 0.0f;
            const int64_t expert = expert_at(routing, t, k);
            if (expert < 0) continue;
            for (int64_t p = 0; p < num_slots; ++p) {
                if (routes[p] < 0 || rank_of(routes[p]) != routing.expert_rank[expert]) continue;
                std::memcpy(out, locate(routes[p], addresses, row_bytes) + k * kValueBytes, kValueBytes);
                break;
            }
        }
    }
}

}  // namespace moecomm
