#include "cpu/combine.h"

#include <cstring>
#include <utility>
#include <vector>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

// The rows (and weights) of one token.
struct Sources {
    std::vector<const char*> rows;
    std::vector<float> weights;
    int64_t num = 0;

    explicit Sources(int64_t num_slots)
        : rows(static_cast<size_t>(num_slots)), weights(static_cast<size_t>(num_slots)) {}

    void collect(const int64_t* routes, int64_t num_slots, const Addresses& addresses, int64_t row_bytes,
                 const float* slot_weights) {
        num = 0;
        for (int64_t p = 0; p < num_slots; ++p) {
            if (routes[p] < 0) continue;
            if (slot_weights != nullptr) weights[static_cast<size_t>(num)] = slot_weights[p];
            rows[static_cast<size_t>(num++)] = locate(routes[p], addresses, row_bytes);
        }
    }
};

}  // namespace

void combine_rows(char* out, int64_t num_tokens, int64_t num_columns, Format format, const int64_t* routes,
                  int64_t num_slots, const Addresses& addresses, const float* weights) {
    const auto reduce = row_loops().reduce[static_cast<int>(format)];
    const int64_t row_bytes = num_columns * static_cast<int64_t>(bytes_of(format));
    Sources current(num_slots), next(num_slots);
    const auto collect = [&](Sources& sources, int64_t t) {
        sources.collect(routes + t * num_slots, num_slots, addresses, row_bytes,
                        weights == nullptr ? nullptr : weights + t * num_slots);
    };
    if (num_tokens > 0) collect(next, 0);
    for (int64_t t = 0; t < num_tokens; ++t) {
        std::swap(current, next);
        next.num = 0;
        if (t + 1 < num_tokens) collect(next, t + 1);
        reduce({out + t * row_bytes, current.rows.data(), weights == nullptr ? nullptr : current.weights.data(),
                current.num, num_columns, next.rows.data(), next.num});
    }
}

}  // namespace moecomm
