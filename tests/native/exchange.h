// One rank's side of a small dispatch and combine, written on csrc alone: count, announce, plan, push, sum, check.
// The same program runs as threads of one process and as processes with shared mappings.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/mapping.h"
#include "sync/board.h"

namespace native_test {

struct Shape {
    int num_ranks;
    int num_tokens;  // of rank r: num_tokens + r, and of rank 1: none
    int num_topk;
    int num_experts;
    int num_columns;  // of fp32

    int tokens_of(int rank) const { return rank == 1 ? 0 : num_tokens + rank; }
    int most_rows() const;
};

inline constexpr int kNumSlots = 4;

std::size_t board_bytes(const Shape& shape);
// Of the region in which a rank receives: two halves, used in turn.
std::size_t region_bytes(const Shape& shape);

// What a rank works with: everybody's boards and regions, mapped here.
struct Rank {
    int rank;
    Shape shape;
    std::shared_ptr<moecomm::SignalBoard> board;
    std::vector<std::shared_ptr<moecomm::Mapping>> regions;
};

// Runs the rounds; every received row and every sum is compared with what it must be.
void run_rounds(Rank& me, int num_rounds);

}  // namespace native_test
