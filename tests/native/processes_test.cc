// Ranks as processes that map each other's anonymous files: the transport `shm`.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

#include "exchange.h"
#include "expect.h"
#include "tests.h"

namespace native_test {
namespace {

struct Shared {
    std::vector<std::shared_ptr<moecomm::Mapping>> boards, regions;
};

Shared make_shared_memory(const Shape& shape) {
    Shared shared;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
        shared.boards.push_back(moecomm::Mapping::create_shared("board", board_bytes(shape)));
        shared.regions.push_back(moecomm::Mapping::create_shared("region", region_bytes(shape)));
    }
    return shared;
}

// In a child: opens what the parent made, as a peer would, instead of using the inherited mappings.
Rank join(const Shared& shared, const Shape& shape, int rank, const std::vector<int>& pids, int64_t spin_ns) {
    Shared own;
    std::vector<uint64_t> addresses;
    for (int peer = 0; peer < shape.num_ranks; ++peer) {
        own.boards.push_back(moecomm::Mapping::open_peer(getppid(), shared.boards[peer]->fd(), board_bytes(shape)));
        own.regions.push_back(moecomm::Mapping::open_peer(getppid(), shared.regions[peer]->fd(), region_bytes(shape)));
        addresses.push_back(own.boards.back()->address());
    }
    auto board = std::make_shared<moecomm::SignalBoard>(rank, kNumSlots, addresses, pids, spin_ns, own.boards);
    return {rank, shape, board, own.regions};
}

// Forks one process per rank. Each gets the pids of all (0 for its own) through a pipe, then runs the program.
std::vector<int> run_processes(const Shape& shape, int64_t spin_ns, const std::function<void(Rank&)>& program) {
    const Shared shared = make_shared_memory(shape);
    std::vector<int> pids, pipes;
    for (int rank = 0; rank < shape.num_ranks; ++rank) {
        int ends[2];
        EXPECT(pipe(ends) == 0);
        const int pid = fork();
        EXPECT(pid >= 0);
        if (pid == 0) {
            close(ends[1]);
            std::vector<int> everyone(shape.num_ranks);
            const auto nbytes = static_cast<ssize_t>(sizeof(int) * everyone.size());
            EXPECT(read(ends[0], everyone.data(), nbytes) == nbytes);
            close(ends[0]);
            everyone[rank] = 0;
            {
                Rank me = join(shared, shape, rank, everyone, spin_ns);
                program(me);
            }
            std::_Exit(0);
        }
        close(ends[0]);
        pids.push_back(pid);
        pipes.push_back(ends[1]);
    }
    for (int end : pipes) {
        const auto nbytes = static_cast<ssize_t>(sizeof(int) * pids.size());
        EXPECT(write(end, pids.data(), nbytes) == nbytes);
        close(end);
    }
    std::vector<int> statuses;
    for (int pid : pids) {
        int status = 0;
        EXPECT(waitpid(pid, &status, 0) == pid);
        statuses.push_back(status);
    }
    return statuses;
}

void exchange(const Shape& shape, int64_t spin_ns, int num_rounds) {
    for (int status : run_processes(shape, spin_ns, [num_rounds](Rank& me) { run_rounds(me, num_rounds); }))
        EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// The last rank is killed in the middle; the others notice although nobody tells them, one of them while asleep.
void a_killed_peer_is_noticed() {
    const auto program = [](Rank& me) {
        const int last = me.shape.num_ranks - 1;
        run_rounds(me, 2);
        if (me.rank == last) raise(SIGKILL);
        EXPECT(me.board->wait(3, 1, 30'000'000'000) == moecomm::WaitStatus::kLost);
        EXPECT(me.board->gone() == std::vector<int>{last});
        EXPECT(!me.board->process_alive(last));
    };
    const Shape shape{3, 6, 2, 5, 20};
    const std::vector<int> statuses = run_processes(shape, 0, [&](Rank& me) {
        // Those that live must not be taken for dead because they finish first.
        program(me);
        if (me.rank != me.shape.num_ranks - 1) {
            for (int peer = 0; peer < me.shape.num_ranks - 1; ++peer) me.board->signal(peer, 1, 1000);
            while (me.board->lane(1, 0) < 1000 || me.board->lane(1, 1) < 1000) usleep(1000);
        }
    });
    EXPECT(WIFSIGNALED(statuses[2]) && WTERMSIG(statuses[2]) == SIGKILL);
    EXPECT(WIFEXITED(statuses[0]) && WEXITSTATUS(statuses[0]) == 0);
    EXPECT(WIFEXITED(statuses[1]) && WEXITSTATUS(statuses[1]) == 0);
}

}  // namespace

void test_processes() {
    exchange({1, 5, 2, 3, 9}, 0, 10);
    exchange({2, 40, 4, 6, 33}, 20'000, 60);
    exchange({4, 9, 3, 10, 65}, 0, 30);
    exchange({2, 300, 8, 8, 260}, 20'000, 4);
    a_killed_peer_is_noticed();
}

}  // namespace native_test
