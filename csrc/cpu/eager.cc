#include "cpu/eager.h"

#include <algorithm>
#include <cstring>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

constexpr int64_t kLine = 64;

int64_t lines(int64_t num_bytes) { return (num_bytes + kLine - 1) / kLine * kLine; }

// Where the parts of a message begin.
struct Parts {
    Parts(int64_t num_tokens, int64_t num_topk, int64_t value_bytes)
        : values(lines(num_tokens * num_topk * 4)), rows(values + lines(num_tokens * num_topk * value_bytes)) {}
    int64_t values;
    int64_t rows;
};

int64_t id_at(const Routing& routing, int64_t i) {
    return routing.is_int64 ? static_cast<const int64_t*>(routing.topk_idx)[i]
                            : static_cast<const int32_t*>(routing.topk_idx)[i];
}

// Calls visit(rank) once for each distinct rank among the experts of one token.
template <class Visit>
void for_each_rank(const int32_t* ids, int64_t num_topk, const int32_t* expert_rank, std::vector<int64_t>& last_token,
                   int64_t token, const Visit& visit) {
    for (int64_t k = 0; k < num_topk; ++k) {
        if (ids[k] < 0) continue;
        const int32_t rank = expert_rank[ids[k]];
        if (last_token[rank] == token) continue;
        last_token[rank] = token;
        visit(rank);
    }
}

}  // namespace

int64_t send_eager(const Routing& routing, const Rows& rows, const char* values, int64_t value_bytes,
                   const Addresses& windows, int32_t* ids_out) {
    const int64_t num_ids = routing.num_tokens * routing.num_topk;
    std::vector<int32_t> counts(static_cast<size_t>(routing.num_experts + routing.num_ranks));
    const int64_t fingerprint = count_routes(routing, counts.data());
    for (int64_t i = 0; i < num_ids; ++i) ids_out[i] = static_cast<int32_t>(id_at(routing, i));
    const Parts parts(routing.num_tokens, routing.num_topk, value_bytes);
    std::vector<char*> next(windows.size());
    for (size_t rank = 0; rank < windows.size(); ++rank) {
        char* const window = reinterpret_cast<char*>(windows[rank]);
        std::memcpy(window, ids_out, static_cast<size_t>(num_ids * 4));
        if (value_bytes > 0) std::memcpy(window + parts.values, values, static_cast<size_t>(num_ids * value_bytes));
        next[rank] = window + parts.rows;
    }
    std::vector<int64_t> last_token(windows.size(), -1);
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
        const char* const row = rows.data + t * rows.stride_bytes;
        for_each_rank(ids_out + t * routing.num_topk, routing.num_topk, routing.expert_rank, last_token, t,
                      [&](int32_t rank) {
                          std::memcpy(next[rank], row, static_cast<size_t>(rows.row_bytes));
                          next[rank] += rows.row_bytes;
                      });
    }
    fence_streaming();
    return fingerprint;
}

namespace {

class Receiver {
  public:
    explicit Receiver(const EagerReceive& args)
        : args_(args),
          num_ranks_(static_cast<int64_t>(args.windows.size())),
          starts_(static_cast<size_t>(args.num_experts)),
          totals_(static_cast<size_t>(args.num_experts)) {}

    EagerOverflow run() {
        count();
        const EagerOverflow overflow = place();
        if (overflow.index >= 0) return overflow;
        route_mine();
        copy();
        clear();
        return overflow;
    }

  private:
    const int32_t* ids(int64_t source) const { return reinterpret_cast<const int32_t*>(args_.windows[source]); }
    int32_t* counts(int64_t source) const { return args_.counts + source * (args_.num_experts + num_ranks_); }

    void count() {
        std::vector<int64_t> last_token(static_cast<size_t>(num_ranks_));
        for (int64_t source = 0; source < num_ranks_; ++source) {
            int32_t* const mine = counts(source);
            std::fill(mine, mine + args_.num_experts + num_ranks_, 0);
            std::fill(last_token.begin(), last_token.end(), -1);
            const int32_t* row = ids(source);
            for (int64_t t = 0; t < args_.num_tokens[source]; ++t, row += args_.num_topk) {
                for (int64_t k = 0; k < args_.num_topk; ++k)
                    if (row[k] >= 0) ++mine[row[k]];
                for_each_rank(row, args_.num_topk, args_.expert_rank, last_token, t,
                              [&](int32_t rank) { ++mine[args_.num_experts + rank]; });
            }
            for (int64_t e = 0; e < args_.num_experts; ++e) totals_[e] += mine[e];
        }
    }

    // Where each expert's rows begin at its rank, whose experts follow each other in ascending id.
    EagerOverflow place() {
        std::vector<int64_t> ends(static_cast<size_t>(num_ranks_));
        for (int64_t e = 0; e < args_.num_experts; ++e) {
            const int32_t local = args_.expert_local[e];
            int64_t& end = ends[static_cast<size_t>(args_.expert_rank[e])];
            if (args_.capacity > 0) {
                if (totals_[e] > args_.capacity) return {e, totals_[e], args_.capacity};
                starts_[e] = local * args_.capacity;
                end = starts_[e] + totals_[e];
            } else {
                starts_[e] = end;
                end += (totals_[e] + args_.alignment - 1) / args_.alignment * args_.alignment;
                if (end > args_.num_rows) return {args_.expert_rank[e], end, args_.num_rows};
            }
            if (args_.expert_rank[e] != args_.rank) continue;
            args_.num_tokens_per_expert[local] = static_cast<int32_t>(totals_[e]);
            if (args_.capacity == 0) args_.offsets[local] = static_cast<int32_t>(end);
        }
        for (int64_t e = 0; e < args_.num_experts; ++e)
            if (args_.expert_rank[e] == args_.rank) args_.tokens_per_expert[args_.expert_local[e]] += totals_[e];
        return {-1, 0, 0};
    }

    void route_mine() {
        std::vector<int64_t> next(starts_);
        for (int64_t source = 0; source < args_.rank; ++source)
            for (int64_t e = 0; e < args_.num_experts; ++e) next[e] += counts(source)[e];
        const int32_t* const mine = ids(args_.rank);
        for (int64_t i = 0; i < args_.num_tokens[args_.rank] * args_.num_topk; ++i)
            args_.routes[i] = mine[i] < 0 ? -1 : make_route(args_.expert_rank[mine[i]], next[mine[i]]++);
    }

    void copy() {
        std::vector<int64_t> next(starts_);
        for (int64_t source = 0; source < num_ranks_; ++source) {
            const Parts parts(args_.num_tokens[source], args_.num_topk, args_.value_bytes);
            const char* const window = reinterpret_cast<const char*>(args_.windows[source]);
            const char* row = window + parts.rows;
            const int32_t* token_ids = ids(source);
            const bool is_shared = args_.domain_sources != nullptr && args_.domain_sources[source] != 0;
            for (int64_t t = 0; t < args_.num_tokens[source]; ++t, token_ids += args_.num_topk) {
                bool has_row = false;
                for (int64_t k = 0; k < args_.num_topk; ++k) {
                    const int32_t e = token_ids[k];
                    if (e < 0) continue;
                    if (args_.expert_rank[e] != args_.rank) {
                        has_row = has_row || (is_shared && args_.domain_experts[e] != 0);
                        continue;
                    }
                    has_row = true;
                    const int64_t place = next[e]++;
                    std::memcpy(args_.rows + place * args_.row_bytes, row, static_cast<size_t>(args_.row_bytes));
                    if (args_.values == nullptr) continue;
                    std::memcpy(args_.values + place * args_.value_bytes,
                                window + parts.values + (t * args_.num_topk + k) * args_.value_bytes,
                                static_cast<size_t>(args_.value_bytes));
                }
                if (has_row) row += args_.row_bytes;
            }
        }
    }

    void zero(int64_t begin, int64_t end) {
        if (begin >= end) return;
        std::memset(args_.rows + begin * args_.row_bytes, 0, static_cast<size_t>((end - begin) * args_.row_bytes));
        if (args_.values == nullptr) return;
        std::memset(args_.values + begin * args_.value_bytes, 0,
                    static_cast<size_t>((end - begin) * args_.value_bytes));
    }

    void clear() {
        int64_t end = 0;
        for (int64_t e = 0; e < args_.num_experts; ++e) {
            if (args_.expert_rank[e] != args_.rank) continue;
            const int32_t local = args_.expert_local[e];
            const int64_t filled = starts_[e] + totals_[e];
            if (args_.capacity > 0) {
                zero(filled, starts_[e] + args_.used[local]);
                args_.used[local] = totals_[e];
            } else {
                end = args_.offsets[local];
                zero(filled, end);
            }
        }
        if (args_.capacity > 0) return;
        zero(end, args_.used[0]);
        args_.used[0] = end;
    }

    const EagerReceive& args_;
    const int64_t num_ranks_;
    std::vector<int64_t> starts_;
    std::vector<int64_t> totals_;
};

}  // namespace

EagerOverflow receive_eager(const EagerReceive& receive) { return Receiver(receive).run(); }

void copy_expert_rows(char* out, const char* in, int64_t row_bytes, const int32_t* counts, int64_t num_ranks,
                      int64_t num_experts, int64_t first_expert, int64_t num_local, int64_t capacity,
                      int64_t alignment) {
    int64_t begin = 0;
    for (int64_t e = 0; e < num_local; ++e) {
        int64_t rows = 0;
        for (int64_t source = 0; source < num_ranks; ++source)
            rows += counts[source * (num_experts + num_ranks) + first_expert + e];
        if (capacity > 0) begin = e * capacity;
        std::memcpy(out + begin * row_bytes, in + begin * row_bytes, static_cast<size_t>(rows * row_bytes));
        if (capacity == 0) begin += (rows + alignment - 1) / alignment * alignment;
    }
}

}  // namespace moecomm
