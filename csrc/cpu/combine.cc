#include "cpu/combine.h"

#include <algorithm>
#include <vector>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

// So many bytes of rows are asked for before they are added: enough to hide the memory, few enough to stay in the
// first-level cache until they are used.
constexpr int64_t kFetchBytes = 8 << 10;
// Short rows are asked for at most so many tokens before.
constexpr int64_t kMaxTokensAhead = 8;

// The rows (and weights) of a run of tokens, without the slots that have no route.
template <class Weight>
class Sources {
  public:
    static constexpr int64_t kNumTokens = 64;

    explicit Sources(int64_t num_slots) : begins_(kNumTokens + 1) {
        rows_.reserve(static_cast<size_t>(2 * kNumTokens * num_slots));
        weights_.reserve(static_cast<size_t>(kNumTokens * num_slots));
    }

    // Tokens of the run are numbered from 0; weights may be nullptr.
    void collect(const int64_t* routes, const Weight* weights, int64_t num_tokens, int64_t num_slots,
                 const Addresses& addresses, int64_t row_bytes, int64_t max_ahead) {
        rows_.clear();
        weights_.clear();
        for (int64_t t = 0; t < num_tokens; ++t) {
            for (int64_t i = t * num_slots; i < (t + 1) * num_slots; ++i) {
                if (routes[i] < 0) continue;
                rows_.push_back(locate(routes[i], addresses, row_bytes));
                if (weights != nullptr) weights_.push_back(weights[i]);
            }
            begins_[static_cast<size_t>(t) + 1] = rows_.size();
        }
        // Whoever looks ahead from the last rows sees the last row again.
        if (!rows_.empty()) rows_.resize(rows_.size() + static_cast<size_t>(max_ahead), rows_.back());
    }

    int64_t num_rows(int64_t token) const { return static_cast<int64_t>(begin(token + 1) - begin(token)); }
    const char* const* rows(int64_t token) const { return rows_.data() + begin(token); }
    const Weight* weights(int64_t token) const { return weights_.data() + begin(token); }

  private:
    size_t begin(int64_t token) const { return begins_[static_cast<size_t>(token)]; }

    std::vector<const char*> rows_;
    std::vector<Weight> weights_;
    std::vector<size_t> begins_;
};

template <class Weight>
void combine(char* out, int64_t num_tokens, int64_t num_columns, Format format, const int64_t* routes,
             int64_t num_slots, const Addresses& addresses, const Weight* weights) {
    const auto reduce = row_loops().reduce[static_cast<int>(format)];
    const int64_t row_bytes = num_columns * static_cast<int64_t>(bytes_of(format));
    const bool is_streaming =
        num_tokens * row_bytes >= kStreamingBytes && row_bytes % 64 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    // What is fetched is further on in the same rows or, where those are short, some tokens ahead.
    const int64_t slots = std::max<int64_t>(num_slots, 1);
    const int64_t fetch_bytes = std::max<int64_t>(kFetchBytes / slots, 1);
    const int64_t tokens_ahead = std::clamp<int64_t>(fetch_bytes / std::max<int64_t>(row_bytes, 1), 1, kMaxTokensAhead);
    Sources<Weight> sources(num_slots);
    for (int64_t begin = 0; begin < num_tokens; begin += sources.kNumTokens) {
        const int64_t num = std::min(sources.kNumTokens, num_tokens - begin);
        const int64_t first = begin * num_slots;
        sources.collect(routes + first, weights == nullptr ? nullptr : weights + first, num, num_slots, addresses,
                        row_bytes, tokens_ahead * num_slots);
        for (int64_t t = 0; t < num; ++t)
            reduce({out + (begin + t) * row_bytes, sources.rows(t), weights == nullptr ? nullptr : sources.weights(t),
                    sources.num_rows(t), num_columns, std::min(fetch_bytes, row_bytes),
                    tokens_ahead * sources.num_rows(t), is_streaming});
    }
    fence_streaming();
}

}  // namespace

void combine_rows(char* out, int64_t num_tokens, int64_t num_columns, Format format, const int64_t* routes,
                  int64_t num_slots, const Addresses& addresses, const void* weights) {
    if (format == Format::fp64)
        combine(out, num_tokens, num_columns, format, routes, num_slots, addresses,
                static_cast<const double*>(weights));
    else
        combine(out, num_tokens, num_columns, format, routes, num_slots, addresses, static_cast<const float*>(weights));
}

}  // namespace moecomm
