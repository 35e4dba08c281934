// A route says where a row goes: the rank in the upper bits, the row there in the lower 40, or -1 for nowhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"

namespace moecomm {

inline constexpr int kRowBits = 40;
inline constexpr int64_t kRowMask = (int64_t{1} << kRowBits) - 1;

inline int64_t make_route(int64_t rank, int64_t row) { return rank << kRowBits | row; }
inline int64_t rank_of(int64_t route) { return route >> kRowBits; }
inline int64_t row_of(int64_t route) { return route & kRowMask; }

// Where row 0 is at each rank, in this process.
using Addresses = std::vector<uint64_t>;

// The address of a route's row when each row takes row_bytes. The route must not be -1.
inline char* locate(int64_t route, const Addresses& addresses, int64_t row_bytes) {
    const uint64_t rank = static_cast<uint64_t>(rank_of(route));
    MC_CHECK(rank < addresses.size() && addresses[rank] != 0,
             "routes names rank " + std::to_string(rank) + ", but addresses (of " + std::to_string(addresses.size()) +
                 " ranks) has none for it");
    return reinterpret_cast<char*>(addresses[rank] +
                                   static_cast<uint64_t>(row_of(route)) * static_cast<uint64_t>(row_bytes));
}

}  // namespace moecomm
