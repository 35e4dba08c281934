// Low-latency messages between ranks that take turns in one thread: windows of exactly the size a message has.
#include "cpu/eager.h"

#include <cstring>
#include <random>
#include <vector>

#include "expect.h"
#include "tests.h"

namespace native_test {
namespace {

constexpr int kNumRanks = 3, kNumExperts = 5, kNumTopk = 4;
const std::vector<int32_t> kExpertRank{0, 0, 1, 1, 2}, kExpertLocal{0, 1, 0, 1, 0};
const int kLocalExperts[kNumRanks] = {2, 2, 1};

struct Message {
    std::vector<int64_t> ids;
    std::vector<float> values;
    std::vector<char> rows;
    int64_t num_tokens;
};

char byte_of(int source, int64_t token, int64_t column) {
    return static_cast<char>(source * 50 + token * 7 + column + 1);
}

Message make_message(int source, int64_t num_tokens, int64_t row_bytes, unsigned seed) {
    std::mt19937 random(seed * 10 + static_cast<unsigned>(source));
    Message message{{}, {}, {}, num_tokens};
    for (int64_t t = 0; t < num_tokens; ++t) {
        for (int k = 0; k < kNumTopk; ++k) {
            message.ids.push_back(static_cast<int64_t>(random() % (kNumExperts + 1)) - 1);
            message.values.push_back(static_cast<float>(source * 1000 + t * 10 + k));
        }
        for (int64_t column = 0; column < row_bytes; ++column) message.rows.push_back(byte_of(source, t, column));
    }
    return message;
}

std::size_t lines(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

std::size_t message_bytes(const Message& message, int target, int64_t row_bytes) {
    const std::size_t part = lines(static_cast<std::size_t>(message.num_tokens * kNumTopk * 4));
    std::size_t rows = 0;
    for (int64_t t = 0; t < message.num_tokens; ++t) {
        bool wanted = false;
        for (int k = 0; k < kNumTopk; ++k) {
            const int64_t id = message.ids[t * kNumTopk + k];
            wanted = wanted || (id >= 0 && kExpertRank[id] == target);
        }
        rows += wanted;
    }
    return 2 * part + rows * static_cast<std::size_t>(row_bytes);
}

// A block of one rank, used again and again as the library does: zero where no row is.
struct Block {
    std::vector<char> rows;
    std::vector<float> values;
    std::vector<int64_t> used;
};

struct Shape {
    int64_t row_bytes, capacity, alignment, num_rows;
};

void receive(int rank, const Shape& shape, const std::vector<Message>& messages,
             const std::vector<std::vector<char>>& windows, Block& block) {
    moecomm::Addresses addresses;
    std::vector<int64_t> num_tokens;
    for (int source = 0; source < kNumRanks; ++source) {
        addresses.push_back(reinterpret_cast<uint64_t>(windows[source].data()));
        num_tokens.push_back(messages[source].num_tokens);
    }
    const Message& mine = messages[rank];
    std::vector<int32_t> counts(kNumRanks * (kNumExperts + kNumRanks)), per_expert(kLocalExperts[rank]),
        offsets(kLocalExperts[rank]);
    std::vector<int64_t> routes(mine.ids.size()), tokens_per_expert(kLocalExperts[rank]);
    const moecomm::EagerReceive args{addresses,
                                     num_tokens,
                                     kNumTopk,
                                     kExpertRank.data(),
                                     kExpertLocal.data(),
                                     kNumExperts,
                                     rank,
                                     nullptr,
                                     nullptr,
                                     shape.row_bytes,
                                     4,
                                     shape.capacity,
                                     shape.alignment,
                                     shape.num_rows,
                                     block.rows.data(),
                                     reinterpret_cast<char*>(block.values.data()),
                                     block.used.data(),
                                     counts.data(),
                                     routes.data(),
                                     per_expert.data(),
                                     offsets.data(),
                                     tokens_per_expert.data()};
    EXPECT(moecomm::receive_eager(args).index == -1);

    // Expected: by local expert, source, token, k; all else zero.
    std::vector<char> rows(block.rows.size());
    std::vector<float> values(block.values.size());
    int64_t start = 0;
    for (int expert = 0; expert < kNumExperts; ++expert) {
        if (kExpertRank[expert] != rank) continue;
        int64_t row = shape.capacity > 0 ? kExpertLocal[expert] * shape.capacity : start;
        const int64_t first = row;
        for (int source = 0; source < kNumRanks; ++source)
            for (std::size_t i = 0; i < messages[source].ids.size(); ++i) {
                if (messages[source].ids[i] != expert) continue;
                const auto token = static_cast<int64_t>(i) / kNumTopk;
                for (int64_t c = 0; c < shape.row_bytes; ++c)
                    rows[row * shape.row_bytes + c] = byte_of(source, token, c);
                values[row] = messages[source].values[i];
                if (source == rank) EXPECT(routes[i] == moecomm::make_route(rank, row));
                ++row;
            }
        EXPECT(per_expert[kExpertLocal[expert]] == row - first);
        start = first + (row - first + shape.alignment - 1) / shape.alignment * shape.alignment;
    }
    EXPECT(rows == block.rows);
    EXPECT(values == block.values);
}

void rounds(const Shape& shape) {
    std::vector<Block> blocks;
    for (int rank = 0; rank < kNumRanks; ++rank) {
        const int64_t count = shape.capacity > 0 ? shape.capacity * kLocalExperts[rank] : shape.num_rows;
        blocks.push_back({std::vector<char>(count * shape.row_bytes), std::vector<float>(count),
                          std::vector<int64_t>(kLocalExperts[rank])});
    }
    const int64_t tokens[4][kNumRanks] = {{5, 0, 3}, {0, 0, 0}, {1, 6, 2}, {2, 2, 2}};
    for (unsigned round = 0; round < 8; ++round) {
        std::vector<Message> messages;
        for (int source = 0; source < kNumRanks; ++source)
            messages.push_back(make_message(source, tokens[round % 4][source], shape.row_bytes, round));
        // windows[target][source]
        std::vector<std::vector<std::vector<char>>> windows(kNumRanks);
        for (int target = 0; target < kNumRanks; ++target)
            for (int source = 0; source < kNumRanks; ++source)
                windows[target].emplace_back(message_bytes(messages[source], target, shape.row_bytes), char{0x5a});
        for (int source = 0; source < kNumRanks; ++source) {
            const Message& message = messages[source];
            moecomm::Addresses mine;
            for (int target = 0; target < kNumRanks; ++target)
                mine.push_back(reinterpret_cast<uint64_t>(windows[target][source].data()));
            const moecomm::Routing routing{message.ids.data(), true,        message.num_tokens, kNumTopk,
                                           kExpertRank.data(), kNumExperts, kNumRanks};
            const moecomm::Rows rows{message.rows.data(), shape.row_bytes, message.num_tokens, shape.row_bytes};
            std::vector<int32_t> ids(message.ids.size());
            // A message of no tokens has no bytes, and then there is no address to write to.
            if (message.num_tokens > 0)
                moecomm::send_eager(routing, rows, reinterpret_cast<const char*>(message.values.data()), 4, mine,
                                    ids.data());
        }
        for (int rank = 0; rank < kNumRanks; ++rank) receive(rank, shape, messages, windows[rank], blocks[rank]);
    }
}

}  // namespace

void test_eager() {
    for (int64_t row_bytes : {1, 37, 128}) {
        rounds({row_bytes, 40, 1, 0});
        rounds({row_bytes, 0, 1, 80});
        rounds({row_bytes, 0, 8, 96});
    }
}

}  // namespace native_test
