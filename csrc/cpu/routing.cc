#include "cpu/routing.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cpu/routes.h"

namespace moecomm {
namespace {

void check_expert_rank(const Routing& routing) {
    for (int64_t e = 0; e < routing.num_experts; ++e) {
        const int64_t rank = routing.expert_rank[e];
        MC_CHECK(rank >= 0 && rank < routing.num_ranks,
                 "expert_rank[" + std::to_string(e) + "] = " + std::to_string(rank) +
                     " is not a rank: valid ranks are 0 to " + std::to_string(routing.num_ranks - 1));
    }
}

// Mixes one value with its position; the sum of these over all positions depends on values and order.
inline uint64_t mix(uint64_t value, uint64_t position) {
    uint64_t x = (value + 0x9e3779b97f4a7c15ull) * (2 * position + 0xbf58476d1ce4e5b9ull);
    x ^= x >> 32;
    x *= 0x94d049bb133111ebull;
    return x ^ (x >> 29);
}

template <class Id>
int64_t count(const Routing& routing, int32_t* counts) {
    const Id* ids = static_cast<const Id*>(routing.topk_idx);
    int32_t* const tokens_per_rank = counts + routing.num_experts;
    std::vector<int64_t> last_token(static_cast<size_t>(routing.num_ranks), -1);
    uint64_t sum = 0;
    uint64_t position = 0;
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
        for (int64_t k = 0; k < routing.num_topk; ++k) {
            const int64_t expert = *ids++;
            check_expert(expert, t, k, routing.num_experts);
            sum += mix(static_cast<uint64_t>(expert), position++);
            if (expert < 0) continue;
            ++counts[expert];
            int64_t& last = last_token[static_cast<size_t>(routing.expert_rank[expert])];
            tokens_per_rank[routing.expert_rank[expert]] += last != t;
            last = t;
        }
    }
    const uint64_t shape = mix(static_cast<uint64_t>(routing.num_tokens), static_cast<uint64_t>(routing.num_topk));
    return static_cast<int64_t>(mix(sum, shape) >> 1);
}

template <class Id>
void plan_by_expert(const Routing& routing, const int64_t* bases, int64_t* routes) {
    const Id* ids = static_cast<const Id*>(routing.topk_idx);
    // The next route of every expert: rank and row in one number, so that the next one is plus one.
    std::vector<int64_t> next(static_cast<size_t>(routing.num_experts));
    for (size_t e = 0; e < next.size(); ++e) next[e] = make_route(routing.expert_rank[e], bases[e]);
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
        for (int64_t k = 0; k < routing.num_topk; ++k) {
            const int64_t expert = *ids++;
            check_expert(expert, t, k, routing.num_experts);
            *routes++ = expert < 0 ? -1 : next[static_cast<size_t>(expert)]++;
        }
    }
}

template <class Id>
void plan_by_rank(const Routing& routing, const int64_t* bases, int64_t* routes) {
    const Id* ids = static_cast<const Id*>(routing.topk_idx);
    std::vector<int64_t> next(static_cast<size_t>(routing.num_ranks));
    for (size_t r = 0; r < next.size(); ++r) next[r] = make_route(static_cast<int64_t>(r), bases[r]);
    std::vector<int64_t> last_token(next.size(), -1);
    for (int64_t t = 0; t < routing.num_tokens; ++t, routes += routing.num_topk) {
        // Distinct ranks of the token, kept sorted by insertion: there are at most K and they are few.
        int64_t num = 0;
        for (int64_t k = 0; k < routing.num_topk; ++k) {
            const int64_t expert = *ids++;
            check_expert(expert, t, k, routing.num_experts);
            if (expert < 0) continue;
            const int64_t rank = routing.expert_rank[expert];
            if (last_token[static_cast<size_t>(rank)] == t) continue;
            last_token[static_cast<size_t>(rank)] = t;
            int64_t slot = num++;
            for (; slot > 0 && routes[slot - 1] > rank; --slot) routes[slot] = routes[slot - 1];
            routes[slot] = rank;
        }
        for (int64_t p = 0; p < num; ++p) routes[p] = next[static_cast<size_t>(routes[p])]++;
        std::fill(routes + num, routes + routing.num_topk, int64_t{-1});
    }
}

}  // namespace

int64_t count_routes(const Routing& routing, int32_t* counts) {
    check_expert_rank(routing);
    std::fill(counts, counts + routing.num_experts + routing.num_ranks, 0);
    return routing.is_int64 ? count<int64_t>(routing, counts) : count<int32_t>(routing, counts);
}

void plan_expert_major(const Routing& routing, const int64_t* bases, int64_t* routes) {
    if (routing.is_int64)
        plan_by_expert<int64_t>(routing, bases, routes);
    else
        plan_by_expert<int32_t>(routing, bases, routes);
}

void plan_flat(const Routing& routing, const int64_t* bases, int64_t* routes) {
    check_expert_rank(routing);
    if (routing.is_int64)
        plan_by_rank<int64_t>(routing, bases, routes);
    else
        plan_by_rank<int32_t>(routing, bases, routes);
}

}  // namespace moecomm
