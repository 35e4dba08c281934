// Ranks as threads of one process, over private memory: the transport `local`.
#include <thread>

#include "exchange.h"
#include "expect.h"
#include "tests.h"

namespace native_test {
namespace {

std::vector<Rank> make_ranks(const Shape& shape, int64_t spin_ns) {
    std::vector<std::shared_ptr<moecomm::Mapping>> boards, regions;
    std::vector<uint64_t> addresses;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
        boards.push_back(moecomm::Mapping::create_private(board_bytes(shape)));
        regions.push_back(moecomm::Mapping::create_private(region_bytes(shape)));
        addresses.push_back(boards.back()->address());
    }
    std::vector<Rank> ranks;
    for (int rank = 0; rank < shape.num_ranks; ++rank)
        ranks.push_back({rank, shape,
                         std::make_shared<moecomm::SignalBoard>(rank, kNumSlots, addresses,
                                                                std::vector<int>(shape.num_ranks, 0), spin_ns, boards),
                         regions});
    return ranks;
}

void exchange(const Shape& shape, int64_t spin_ns, int num_rounds) {
    std::vector<Rank> ranks = make_ranks(shape, spin_ns);
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&rank, num_rounds] { run_rounds(rank, num_rounds); });
    for (std::thread& thread : threads) thread.join();
}

// Counters, deadlines and departures, with the waiter asleep when the signal comes.
void waits() {
    std::vector<Rank> ranks = make_ranks({3, 1, 1, 3, 1}, 0);
    moecomm::SignalBoard& mine = *ranks[0].board;
    EXPECT(mine.wait(0, 0, 1'000'000) == moecomm::WaitStatus::kReached);
    EXPECT(mine.wait(0, 1, 1'000'000) == moecomm::WaitStatus::kTimeout);
    std::thread waiter([&mine] {
        EXPECT(mine.wait(1, 3, 30'000'000'000) == moecomm::WaitStatus::kReached);
        EXPECT(mine.wait(1, 4, 30'000'000'000) == moecomm::WaitStatus::kLost);
    });
    for (int source = 0; source < 3; ++source)
        for (int i = 0; i < 3; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            ranks[source].board->signal(0, 1, 1);
        }
    ranks[0].board->signal(0, 1, 1);
    ranks[1].board->signal(0, 1, 1);
    ranks[2].board->depart();
    waiter.join();
    EXPECT(mine.lane(1, 0) == 4 && mine.lane(1, 1) == 4 && mine.lane(1, 2) == 3);
    EXPECT(mine.gone() == std::vector<int>{2});
    mine.mark_departed(1);
    EXPECT((mine.gone() == std::vector<int>{1, 2}));
}

}  // namespace

void test_threads() {
    waits();
    exchange({1, 5, 2, 3, 9}, 0, 20);
    exchange({2, 40, 4, 6, 33}, 20'000, 60);
    exchange({4, 9, 3, 10, 65}, 0, 40);
    exchange({2, 300, 8, 8, 260}, 20'000, 4);  // large enough for streaming stores
}

}  // namespace native_test
