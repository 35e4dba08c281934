#include "cpu/plan.h"

#include <algorithm>

namespace moecomm {
namespace {

int64_t padded(int64_t rows, int64_t alignment) { return (rows + alignment - 1) / alignment * alignment; }

// Adds up, over the sources before `end`, the columns [first, first + num) of the counts.
std::vector<int64_t> sum_sources(const PlanRequest& request, int64_t end, int64_t first, int64_t num) {
    std::vector<int64_t> sums(static_cast<size_t>(num));
    for (int64_t source = 0; source < end; ++source) {
        const int32_t* const row = request.counts + source * (request.num_experts + request.num_ranks) + first;
        for (int64_t i = 0; i < num; ++i) sums[static_cast<size_t>(i)] += row[i];
    }
    return sums;
}

}  // namespace

ExchangePlan plan_exchange(const PlanRequest& request) {
    ExchangePlan plan;
    const bool is_slab = request.order == RowOrder::kSlab, is_flat = request.order == RowOrder::kFlat;
    const std::vector<int64_t> totals = sum_sources(request, request.num_ranks, 0, request.num_experts);
    if (is_flat) {
        plan.bases = sum_sources(request, request.rank, request.num_experts, request.num_ranks);
        plan.rows_per_rank = sum_sources(request, request.num_ranks, request.num_experts, request.num_ranks);
    } else {
        plan.bases = sum_sources(request, request.rank, 0, request.num_experts);
        plan.rows_per_rank.resize(static_cast<size_t>(request.num_ranks));
    }
    for (int64_t rank = 0; rank < request.num_ranks; ++rank) {
        const int64_t first = request.first_expert[rank], end = request.first_expert[rank + 1];
        int64_t next = 0;
        for (int64_t expert = first; expert < end; ++expert) {
            const int64_t total = totals[static_cast<size_t>(expert)];
            if (is_slab && total > request.capacity && total > plan.overflow_rows) {
                plan.overflow_index = expert;
                plan.overflow_rows = total;
            }
            if (is_slab) next = (expert - first) * request.capacity;
            if (!is_flat) plan.bases[static_cast<size_t>(expert)] += next;
            next += is_slab ? total : padded(total, request.alignment);
            if (rank != request.rank) continue;
            plan.num_tokens_per_expert.push_back(static_cast<int32_t>(total));
            plan.offsets.push_back(static_cast<int32_t>(next));
        }
        plan.most_rows = std::max(plan.most_rows, next);
        if (is_flat) next = plan.rows_per_rank[static_cast<size_t>(rank)];
        if (rank == request.rank) plan.num_rows = next;
        if (is_slab) {
            next = (end - first) * request.capacity;
        } else if (request.capacity > 0) {
            if (next > request.capacity && next > plan.overflow_rows) {
                plan.overflow_index = rank;
                plan.overflow_rows = next;
            }
            next = request.capacity;
        }
        plan.rows_per_rank[static_cast<size_t>(rank)] = next;
        plan.most_rows = std::max(plan.most_rows, next);
    }
    return plan;
}

}  // namespace moecomm
