#include "exchange.h"

#include <cstring>

#include "cpu/combine.h"
#include "cpu/push.h"
#include "cpu/routing.h"
#include "cpu/values.h"
#include "expect.h"

namespace native_test {
namespace {

constexpr int64_t kPatienceNs = 60'000'000'000;
enum Slot { kCounted = 0, kPushed = 1, kRead = 2 };

uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ull;
    value = (value ^ (value >> 27)) * 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

// The inputs are functions of who and when, so every rank knows what it must get.
int64_t expert_at(const Shape& shape, int round, int rank, int token, int k) {
    const uint64_t random = mix((((uint64_t{1} + round) * 64 + rank) * 65536 + token) * 64 + k);
    return random % 5 == 0 ? -1 : static_cast<int64_t>(random / 5 % shape.num_experts);
}

float value_at(int round, int rank, int token, int column) {
    return static_cast<float>((round % 7) * 64 + rank * 8 + token % 8) + static_cast<float>(column % 16) / 16;
}

float weight_at(int rank, int token, int k) { return static_cast<float>((rank + token + k) % 9 + 1) / 8; }

struct Half {
    std::size_t counts, values, rows, bytes;
};

Half half_of(const Shape& shape) {
    const auto line = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    Half half{};
    half.values = line(sizeof(int32_t) * shape.num_ranks * (shape.num_experts + shape.num_ranks));
    half.rows = half.values + line(sizeof(float) * shape.most_rows());
    half.bytes = half.rows + line(sizeof(float) * shape.most_rows() * shape.num_columns);
    return half;
}

int rank_of_expert(const Shape& shape, int expert) { return expert * shape.num_ranks / shape.num_experts; }

// The canonical order: by expert of the rank, then source rank, then (token, k).
std::vector<int64_t> bases_of(const Shape& shape, const int32_t* counts, int me) {
    const int width = shape.num_experts + shape.num_ranks;
    std::vector<int64_t> bases(shape.num_experts);
    int64_t row = 0;
    for (int expert = 0; expert < shape.num_experts; ++expert) {
        if (expert > 0 && rank_of_expert(shape, expert) != rank_of_expert(shape, expert - 1)) row = 0;
        for (int source = 0; source < shape.num_ranks; ++source) {
            if (source == me) bases[expert] = row;
            row += counts[source * width + expert];
        }
    }
    return bases;
}

void await(const Rank& me, Slot slot, int round) {
    EXPECT(me.board->wait(slot, static_cast<uint64_t>(round), kPatienceNs) == moecomm::WaitStatus::kReached);
}

void signal_everyone(const Rank& me, Slot slot) {
    for (int i = 1; i <= me.shape.num_ranks; ++i) me.board->signal((me.rank + i) % me.shape.num_ranks, slot, 1);
}

void check_arrived(const Rank& me, int round, const float* rows, const float* values) {
    const Shape& shape = me.shape;
    std::size_t row = 0;
    for (int expert = 0; expert < shape.num_experts; ++expert) {
        if (rank_of_expert(shape, expert) != me.rank) continue;
        for (int source = 0; source < shape.num_ranks; ++source)
            for (int token = 0; token < shape.tokens_of(source); ++token)
                for (int k = 0; k < shape.num_topk; ++k) {
                    if (expert_at(shape, round, source, token, k) != expert) continue;
                    EXPECT(values[row] == weight_at(source, token, k));
                    for (int column = 0; column < shape.num_columns; ++column)
                        EXPECT(rows[row * shape.num_columns + column] == value_at(round, source, token, column));
                    ++row;
                }
    }
}

void run_round(Rank& me, int round) {
    const Shape& shape = me.shape;
    const int num_tokens = shape.tokens_of(me.rank);
    const int width = shape.num_experts + shape.num_ranks;
    const Half half = half_of(shape);
    const std::size_t start = round % 2 * half.bytes;
    std::vector<int64_t> topk_idx;
    std::vector<int32_t> expert_rank;
    std::vector<float> x, weights;
    for (int expert = 0; expert < shape.num_experts; ++expert) expert_rank.push_back(rank_of_expert(shape, expert));
    for (int token = 0; token < num_tokens; ++token) {
        for (int k = 0; k < shape.num_topk; ++k) {
            topk_idx.push_back(expert_at(shape, round, me.rank, token, k));
            weights.push_back(weight_at(me.rank, token, k));
        }
        for (int column = 0; column < shape.num_columns; ++column) x.push_back(value_at(round, me.rank, token, column));
    }
    const moecomm::Routing routing{topk_idx.data(),   true,           num_tokens, shape.num_topk, expert_rank.data(),
                                   shape.num_experts, shape.num_ranks};

    std::vector<int32_t> counts(width);
    moecomm::count_routes(routing, counts.data());
    std::vector<uint64_t> counts_at, values_at, rows_at;
    for (const auto& region : me.regions) {
        counts_at.push_back(region->address() + start + sizeof(int32_t) * width * me.rank);
        values_at.push_back(region->address() + start + half.values);
        rows_at.push_back(region->address() + start + half.rows);
    }
    // Nobody writes into this half before everybody has read what it held two rounds ago.
    if (round > 2) await(me, kRead, round - 2);
    me.board->post(counts.data(), sizeof(int32_t) * width, counts_at, kCounted, 1);
    await(me, kCounted, round);

    const char* mine = reinterpret_cast<const char*>(me.regions[me.rank]->address()) + start;
    const std::vector<int64_t> bases = bases_of(shape, reinterpret_cast<const int32_t*>(mine), me.rank);
    std::vector<int64_t> routes(topk_idx.size());
    moecomm::plan_expert_major(routing, bases.data(), routes.data());
    const int64_t row_bytes = static_cast<int64_t>(sizeof(float)) * shape.num_columns;
    const moecomm::Rows rows{reinterpret_cast<const char*>(x.data()), row_bytes, num_tokens, row_bytes};
    moecomm::push_rows(rows, routes.data(), shape.num_topk, rows_at);
    moecomm::push_values(weights.data(), routes.data(), num_tokens, shape.num_topk, values_at);
    signal_everyone(me, kPushed);
    await(me, kPushed, round);
    check_arrived(me, round, reinterpret_cast<const float*>(mine + half.rows),
                  reinterpret_cast<const float*>(mine + half.values));

    std::vector<float> out(x.size(), -1.0f);
    moecomm::combine_rows(reinterpret_cast<char*>(out.data()), num_tokens, shape.num_columns, moecomm::Format::fp32,
                          routes.data(), shape.num_topk, rows_at, weights.data());
    for (int token = 0; token < num_tokens; ++token)
        for (int column = 0; column < shape.num_columns; ++column) {
            float sum = 0.0f;
            for (int k = 0; k < shape.num_topk; ++k)
                if (topk_idx[token * shape.num_topk + k] >= 0)
                    sum += weights[token * shape.num_topk + k] * value_at(round, me.rank, token, column);
            EXPECT(out[token * shape.num_columns + column] == sum);
        }
    signal_everyone(me, kRead);
}

}  // namespace

int Shape::most_rows() const { return num_ranks * (num_tokens + num_ranks) * num_topk; }

std::size_t board_bytes(const Shape& shape) { return moecomm::SignalBoard::board_bytes(shape.num_ranks, kNumSlots); }

std::size_t region_bytes(const Shape& shape) { return 2 * half_of(shape).bytes; }

void run_rounds(Rank& me, int num_rounds) {
    for (int round = 1; round <= num_rounds; ++round) run_round(me, round);
}

}  // namespace native_test
