// Every row kernel on every instruction set of this machine: no access outside what was given, equal bits.
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "cpu/combine.h"
#include "cpu/features.h"
#include "cpu/gradient.h"
#include "cpu/push.h"
#include "cpu/routing.h"
#include "cpu/stream.h"
#include "cpu/values.h"
#include "expect.h"
#include "tests.h"

namespace native_test {
namespace {

using Bytes = std::vector<char>;

constexpr int kNumRanks = 3;
constexpr int kNumExperts = 7;

struct Case {
    int64_t num_tokens, num_topk, num_columns;
    int misalignment;  // of every address, in bytes
};

template <class T>
std::vector<T> random_values(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    std::vector<T> values(count);
    for (T& value : values) value = static_cast<T>(normal(random));
    return values;
}

Bytes random_bytes(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    Bytes bytes(count);
    for (char& byte : bytes) byte = static_cast<char>(random());
    return bytes;
}

// Memory of exactly the size that the kernels may touch: a sanitizer sees every byte too far.
struct Memory {
    std::vector<Bytes> parts;
    moecomm::Addresses addresses;

    Memory(const std::vector<int64_t>& rows, int64_t row_bytes, int misalignment, unsigned seed = 0) {
        for (int64_t count : rows) {
            parts.push_back(random_bytes(static_cast<std::size_t>(count * row_bytes + misalignment), seed));
            addresses.push_back(reinterpret_cast<uint64_t>(parts.back().data() + misalignment));
        }
    }
    void append_to(Bytes& digest) const {
        for (const Bytes& part : parts) digest.insert(digest.end(), part.begin(), part.end());
    }
};

struct Planned {
    std::vector<int64_t> topk_idx, routes;
    std::vector<int64_t> rows;  // at each rank
};

std::vector<int32_t> expert_rank() { return {0, 0, 0, 1, 1, 2, 2}; }
std::vector<int32_t> expert_local() { return {0, 1, 2, 0, 1, 0, 1}; }

moecomm::Routing routing_of(const Case& one, const std::vector<int64_t>& ids, const std::vector<int32_t>& ranks) {
    return {ids.data(), true, one.num_tokens, one.num_topk, ranks.data(), kNumExperts, kNumRanks};
}

Planned plan(const Case& one, bool flat) {
    std::mt19937 random(static_cast<unsigned>(one.num_tokens * 64 + one.num_topk));
    Planned planned;
    for (int64_t i = 0; i < one.num_tokens * one.num_topk; ++i)
        planned.topk_idx.push_back(static_cast<int64_t>(random() % (kNumExperts + 1)) - 1);
    const std::vector<int32_t> ranks = expert_rank();
    const moecomm::Routing routing = routing_of(one, planned.topk_idx, ranks);
    std::vector<int32_t> counts(kNumExperts + kNumRanks);
    moecomm::count_routes(routing, counts.data());
    planned.rows.assign(kNumRanks, 0);
    planned.routes.resize(planned.topk_idx.size());
    if (flat) {
        for (int rank = 0; rank < kNumRanks; ++rank) planned.rows[rank] = counts[kNumExperts + rank];
        const std::vector<int64_t> bases(kNumRanks, 0);
        moecomm::plan_flat(routing, bases.data(), planned.routes.data());
    } else {
        std::vector<int64_t> bases(kNumExperts);
        for (int expert = 0; expert < kNumExperts; ++expert) {
            bases[expert] = planned.rows[ranks[expert]];
            planned.rows[ranks[expert]] += counts[expert];
        }
        moecomm::plan_expert_major(routing, bases.data(), planned.routes.data());
    }
    return planned;
}

// Weight is double for fp64 rows and float for the others.
template <class Weight>
void rows_of_format(const Case& one, const Planned& planned, moecomm::Format format, Bytes& digest) {
    const int64_t row_bytes = one.num_columns * static_cast<int64_t>(moecomm::bytes_of(format));
    const auto size = static_cast<std::size_t>(one.num_tokens * row_bytes);
    const Bytes x = random_bytes(size + one.misalignment, 1);
    const std::vector<Weight> weights = random_values<Weight>(planned.routes.size(), 2);
    const moecomm::Rows rows{x.data() + one.misalignment, row_bytes, one.num_tokens, row_bytes};

    Memory plain(planned.rows, row_bytes, one.misalignment), scaled(planned.rows, row_bytes, one.misalignment);
    moecomm::push_rows(rows, planned.routes.data(), one.num_topk, plain.addresses);
    moecomm::push_weighted_rows(rows, format, planned.routes.data(), one.num_topk, scaled.addresses, weights.data());
    plain.append_to(digest);
    scaled.append_to(digest);

    for (const Weight* given : {static_cast<const Weight*>(nullptr), weights.data()}) {
        Bytes out(size);
        moecomm::combine_rows(out.data(), one.num_tokens, one.num_columns, format, planned.routes.data(), one.num_topk,
                              plain.addresses, given);
        digest.insert(digest.end(), out.begin(), out.end());
    }
    Bytes gradient(size);
    std::vector<Weight> dots(static_cast<std::size_t>(one.num_tokens));
    const std::vector<Weight> row_weights = random_values<Weight>(dots.size(), 3);
    const Bytes y = random_bytes(size, 4);
    moecomm::scale_dot(gradient.data(), dots.data(), x.data() + one.misalignment, y.data(), row_weights.data(),
                       one.num_tokens, one.num_columns, format);
    digest.insert(digest.end(), gradient.begin(), gradient.end());
    const char* bytes = reinterpret_cast<const char*>(dots.data());
    digest.insert(digest.end(), bytes, bytes + dots.size() * sizeof(Weight));
}

template <class Value>
void small_things(const Case& one, const Planned& planned, bool flat, Bytes& digest) {
    const std::vector<Value> values = random_values<Value>(planned.routes.size(), 5);
    Memory pushed(planned.rows, sizeof(Value), 0);
    moecomm::push_values(values.data(), planned.routes.data(), one.num_tokens, one.num_topk, pushed.addresses);
    pushed.append_to(digest);
    std::vector<Value> back(values.size());
    moecomm::pull_values(back.data(), planned.routes.data(), one.num_tokens, one.num_topk, pushed.addresses);
    for (std::size_t i = 0; i < back.size(); ++i) EXPECT(back[i] == (planned.routes[i] < 0 ? Value(0) : values[i]));
    if (!flat) return;
    const std::vector<int32_t> ranks = expert_rank(), locals = expert_local();
    const moecomm::Routing routing = routing_of(one, planned.topk_idx, ranks);
    Memory ids(planned.rows, one.num_topk * 4, 0);
    Memory floats(planned.rows, one.num_topk * static_cast<int64_t>(sizeof(Value)), 0);
    moecomm::push_flat_metadata(routing, locals.data(), values.data(), planned.routes.data(), one.num_topk,
                                ids.addresses, floats.addresses);
    moecomm::pull_flat_values(back.data(), routing, planned.routes.data(), one.num_topk, floats.addresses);
    for (std::size_t i = 0; i < back.size(); ++i) EXPECT(back[i] == (planned.topk_idx[i] < 0 ? Value(0) : values[i]));
    ids.append_to(digest);
    floats.append_to(digest);
}

Bytes everything(const Case& one) {
    Bytes digest;
    for (bool flat : {false, true}) {
        const Planned planned = plan(one, flat);
        rows_of_format<double>(one, planned, moecomm::Format::fp64, digest);
        for (auto format : {moecomm::Format::fp32, moecomm::Format::bf16, moecomm::Format::fp16})
            rows_of_format<float>(one, planned, format, digest);
        small_things<float>(one, planned, flat, digest);
        small_things<double>(one, planned, flat, digest);
    }
    return digest;
}

void streams() {
    for (std::size_t nbytes : {0, 1, 63, 64, 65, 4095, 100'003}) {
        const Bytes in = random_bytes(nbytes, 6);
        Bytes out(nbytes);
        moecomm::stream_copy(out.data(), in.data(), nbytes);
        EXPECT(in == out);
        moecomm::stream_read(in.data(), nbytes);
    }
    const Bytes rows = random_bytes(5 * 130, 7);
    Bytes copies(3 * rows.size());
    moecomm::stream_scatter(copies.data(), rows.data(), 5, 130, 3);
}

void bad_ids_throw() {
    const Case one{4, 3, 1, 0};
    const std::vector<int32_t> ranks = expert_rank();
    for (int64_t bad : {int64_t{kNumExperts}, int64_t{-2}, INT64_MAX, INT64_MIN}) {
        std::vector<int64_t> ids(12, 0), bases(kNumExperts), routes(12);
        std::vector<int32_t> counts(kNumExperts + kNumRanks);
        ids[7] = bad;
        bool thrown = false;
        try {
            moecomm::count_routes(routing_of(one, ids, ranks), counts.data());
        } catch (const std::invalid_argument& error) {
            thrown = std::strstr(error.what(), std::to_string(bad).c_str()) != nullptr;
        }
        EXPECT(thrown);
    }
}

}  // namespace

void test_kernels() {
    bad_ids_throw();
    const std::vector<Case> cases{{0, 2, 5, 0},  {1, 1, 1, 0},    {9, 4, 33, 0},  {9, 4, 33, 1},
                                  {5, 40, 7, 3}, {11, 3, 260, 0}, {7, 2, 515, 2}, {400, 8, 1031, 0}};
    for (const Case& one : cases) {
        moecomm::select_instruction_set("generic");
        const Bytes expected = everything(one);
        for (moecomm::InstructionSet set : moecomm::all_instruction_sets()) {
            if (!moecomm::is_available(set)) continue;
            moecomm::select_instruction_set(moecomm::name_of(set));
            EXPECT(everything(one) == expected);
            streams();
        }
    }
    moecomm::select_instruction_set("auto");
}

}  // namespace native_test
