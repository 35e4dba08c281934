#include "cpu/push.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/prefetch.h"

namespace moecomm {
namespace {

// A row longer than this is sent piece by piece, so that a piece stays in the first-level cache for all destinations.
constexpr int64_t kPieceBytes = 8192;

bool is_streaming(const Rows& rows, const int64_t* routes, int64_t num_slots) {
    const int64_t num_routes = rows.num_rows * num_slots;
    if (rows.row_bytes < kStreamingRowBytes || num_routes * rows.row_bytes < kStreamingBytes) return false;
    const int64_t num_absent = std::count_if(routes, routes + num_routes, [](int64_t route) { return route < 0; });
    return (num_routes - num_absent) * rows.row_bytes >= kStreamingBytes;
}

}  // namespace

void push_rows(const Rows& rows, const int64_t* routes, int64_t num_slots, const Addresses& addresses) {
    const bool streaming = is_streaming(rows, routes, num_slots);
    const RowLoops& loops = row_loops();
    std::vector<char*> targets(static_cast<size_t>(num_slots));
    for (int64_t t = 0; t < rows.num_rows; ++t, routes += num_slots) {
        size_t num = 0;
        for (int64_t p = 0; p < num_slots; ++p)
            if (routes[p] >= 0) targets[num++] = locate(routes[p], addresses, rows.row_bytes);
        const char* const row = rows.data + t * rows.stride_bytes;
        for (int64_t begin = 0; begin < rows.row_bytes; begin += kPieceBytes) {
            const size_t piece = static_cast<size_t>(std::min(kPieceBytes, rows.row_bytes - begin));
            for (size_t i = 0; i < num; ++i) {
                if (streaming)
                    loops.copy_streaming(targets[i] + begin, row + begin, piece);
                else
                    std::memcpy(targets[i] + begin, row + begin, piece);
            }
        }
    }
    fence_streaming();
}

void push_weighted_rows(const Rows& rows, Format format, const int64_t* routes, int64_t num_slots,
                        const Addresses& addresses, const float* weights) {
    const bool streaming = is_streaming(rows, routes, num_slots);
    const RowLoops& loops = row_loops();
    const auto scale = loops.scale[static_cast<int>(format)];
    const int64_t num_columns = rows.row_bytes / static_cast<int64_t>(bytes_of(format));
    std::vector<char> scaled(streaming ? static_cast<size_t>(rows.row_bytes) : 0);
    for (int64_t t = 0; t < rows.num_rows; ++t, routes += num_slots, weights += num_slots) {
        const char* const row = rows.data + t * rows.stride_bytes;
        for (int64_t p = 0; p < num_slots; ++p) {
            if (routes[p] < 0) continue;
            char* const target = locate(routes[p], addresses, rows.row_bytes);
            const bool is_aligned = reinterpret_cast<uintptr_t>(target) % 64 == 0;
            if (!streaming || is_aligned) {
                scale(target, row, weights[p], num_columns, streaming);
            } else {
                scale(scaled.data(), row, weights[p], num_columns, false);
                loops.copy_streaming(target, scaled.data(), scaled.size());
            }
        }
    }
    fence_streaming();
}

}  // namespace moecomm
