#include "cpu/push.h"

#include <algorithm>
#include <cstring>
#include <utility>
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

void copy_plainly(char* out, const char* in, size_t num_bytes) { std::memcpy(out, in, num_bytes); }

struct Target {
    char* address;
    int64_t slot;  // which of the token's routes it is
};

// Where one token's row goes.
using Targets = std::vector<Target>;

void collect(Targets& targets, const int64_t* routes, int64_t num_slots, const Addresses& addresses,
             int64_t row_bytes) {
    targets.clear();
    for (int64_t p = 0; p < num_slots; ++p)
        if (routes[p] >= 0) targets.push_back({locate(routes[p], addresses, row_bytes), p});
}

// Lines that a row shares with its neighbours are written by ordinary stores; asks for them in time.
void fetch_partial_lines(const Targets& targets, int64_t row_bytes) {
    for (const Target& target : targets) {
        if (reinterpret_cast<uintptr_t>(target.address) % 64 != 0) MOECOMM_PREFETCH_WRITE(target.address);
        char* const end = target.address + row_bytes;
        if (reinterpret_cast<uintptr_t>(end) % 64 != 0) MOECOMM_PREFETCH_WRITE(end);
    }
}

// Calls send(token, row, targets) for every row in order, with the lines of the next row on their way.
template <class Send>
void for_each_row(const Rows& rows, const int64_t* routes, int64_t num_slots, const Addresses& addresses,
                  bool streaming, const Send& send) {
    Targets current, next;
    for (int64_t t = -1; t < rows.num_rows; ++t) {
        std::swap(current, next);
        if (t + 1 < rows.num_rows) {
            collect(next, routes + (t + 1) * num_slots, num_slots, addresses, rows.row_bytes);
            if (streaming) fetch_partial_lines(next, rows.row_bytes);
        }
        if (t >= 0) send(t, rows.data + t * rows.stride_bytes, current);
    }
    fence_streaming();
}

}  // namespace

void push_rows(const Rows& rows, const int64_t* routes, int64_t num_slots, const Addresses& addresses) {
    const bool streaming = is_streaming(rows, routes, num_slots);
    const auto copy = streaming ? row_loops().copy_streaming : copy_plainly;
    for_each_row(rows, routes, num_slots, addresses, streaming, [&](int64_t, const char* row, const Targets& targets) {
        for (int64_t begin = 0; begin < rows.row_bytes; begin += kPieceBytes) {
            const size_t piece = static_cast<size_t>(std::min(kPieceBytes, rows.row_bytes - begin));
            for (const Target& target : targets) copy(target.address + begin, row + begin, piece);
        }
    });
}

void push_weighted_rows(const Rows& rows, Format format, const int64_t* routes, int64_t num_slots,
                        const Addresses& addresses, const void* weights) {
    const bool streaming = is_streaming(rows, routes, num_slots);
    const RowLoops& loops = row_loops();
    const auto scale = loops.scale[static_cast<int>(format)];
    const int64_t num_columns = rows.row_bytes / static_cast<int64_t>(bytes_of(format));
    std::vector<char> scaled(streaming ? static_cast<size_t>(rows.row_bytes) : 0);
    for_each_row(rows, routes, num_slots, addresses, streaming,
                 [&](int64_t t, const char* row, const Targets& targets) {
                     for (const Target& target : targets) {
                         const double weight = weight_at(weights, t * num_slots + target.slot, format);
                         const bool is_aligned = reinterpret_cast<uintptr_t>(target.address) % 64 == 0;
                         if (!streaming || is_aligned) {
                             scale(target.address, row, weight, num_columns, streaming);
                         } else {
                             scale(scaled.data(), row, weight, num_columns, false);
                             loops.copy_streaming(target.address, scaled.data(), scaled.size());
                         }
                     }
                 });
}

}  // namespace moecomm
