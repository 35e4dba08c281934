#include "sync/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>

#include "check.h"

namespace moecomm {
namespace {

constexpr std::size_t kLine = 64;              // one cache line per counter: sources do not disturb each other
constexpr std::int64_t kSliceNs = 50'000'000;  // how often a sleeper looks whether its peers still live

std::int64_t now_ns() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * std::int64_t{1'000'000'000} + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: the word may lie in memory shared between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::int64_t timeout_ns) {
    const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct SignalBoard::Header {
    alignas(kLine) std::atomic<std::uint32_t> doorbell;  // changes whenever a sleeper should look again
    alignas(kLine) std::atomic<std::uint32_t> sleepers;
    alignas(kLine) std::atomic<std::uint32_t> departed;  // this board's owner will not signal again
};

std::size_t SignalBoard::board_bytes(int num_ranks, int num_slots) {
    return sizeof(Header) + static_cast<std::size_t>(num_ranks) * num_slots * kLine;
}

SignalBoard::SignalBoard(int rank, int num_slots, std::vector<std::uint64_t> boards, const std::vector<int>& pids,
                         std::int64_t spin_ns, std::vector<std::shared_ptr<Mapping>> mappings)
    : rank_(rank),
      num_ranks_(static_cast<int>(boards.size())),
      num_slots_(num_slots),
      boards_(std::move(boards)),
      spin_ns_(spin_ns),
      waited_ns_(boards_.size()),
      longest_wait_ns_(boards_.size()),
      mappings_(std::move(mappings)) {
    static_assert(std::atomic<std::uint64_t>::is_always_lock_free, "counters are shared between processes");
    MC_CHECK(boards_.size() == pids.size(), "SignalBoard: one board and one pid per rank");
    MC_CHECK(rank_ >= 0 && rank_ < num_ranks_ && num_slots_ > 0, "SignalBoard: rank or num_slots out of range");
    for (int pid : pids) processes_.emplace_back(pid);
}

SignalBoard::Header& SignalBoard::header(int rank) const { return *reinterpret_cast<Header*>(boards_[rank]); }

std::atomic<std::uint64_t>& SignalBoard::counter(int rank, int slot, int source) const {
    const std::size_t index = static_cast<std::size_t>(slot) * num_ranks_ + source;
    return *reinterpret_cast<std::atomic<std::uint64_t>*>(boards_[rank] + sizeof(Header) + index * kLine);
}

void SignalBoard::ring(int rank) {
    Header& board = header(rank);
    // Either the sleeper sees the counter before it sleeps, or we see the sleeper: all four accesses are seq_cst.
    if (board.sleepers.load(std::memory_order_seq_cst) == 0) return;
    board.doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(board.doorbell);
}

void SignalBoard::signal(int peer, int slot, std::uint64_t n) {
    MC_CHECK(peer >= 0 && peer < num_ranks_ && slot >= 0 && slot < num_slots_, "signal: peer or slot out of range");
    counter(peer, slot, rank_).fetch_add(n, std::memory_order_seq_cst);
    ring(peer);
}

void SignalBoard::deliver(int slot, int source, std::uint64_t n) {
    MC_CHECK(source >= 0 && source < num_ranks_ && has_slot(slot), "deliver: out of range");
    counter(rank_, slot, source).fetch_add(n, std::memory_order_seq_cst);
    ring(rank_);
}

void SignalBoard::signal_all(int slot, std::uint64_t n) {
    for (int i = 1; i <= num_ranks_; ++i) signal((rank_ + i) % num_ranks_, slot, n);
}

void SignalBoard::post(const void* source, std::size_t nbytes, const std::vector<std::uint64_t>& destinations, int slot,
                       std::uint64_t n) {
    MC_CHECK(static_cast<int>(destinations.size()) == num_ranks_, "post: one destination per rank");
    // Starting behind myself spreads the ranks over different receivers.
    for (int i = 1; i <= num_ranks_; ++i) {
        const int peer = (rank_ + i) % num_ranks_;
        if (destinations[peer] != 0) std::memcpy(reinterpret_cast<void*>(destinations[peer]), source, nbytes);
        signal(peer, slot, n);
    }
}

bool SignalBoard::reached(int slot, std::uint64_t at_least) const {
    for (int source = 0; source < num_ranks_; ++source)
        if (counter(rank_, slot, source).load(std::memory_order_seq_cst) < at_least) return false;
    return true;
}

std::uint64_t SignalBoard::lane_at(int slot, int rank, int source) const {
    const auto is_rank = [&](int number) { return number >= 0 && number < num_ranks_; };
    MC_CHECK(is_rank(rank) && is_rank(source) && has_slot(slot), "lane: out of range");
    return counter(rank, slot, source).load(std::memory_order_seq_cst);
}

std::uint64_t SignalBoard::total(int slot) const {
    std::uint64_t sum = 0;
    for (int source = 0; source < num_ranks_; ++source) sum += lane(slot, source);
    return sum;
}

std::uint64_t SignalBoard::traffic(int first_slot, int num_slots) const {
    MC_CHECK(num_slots > 0 && has_slot(first_slot) && has_slot(first_slot + num_slots - 1), "traffic: out of range");
    std::uint64_t sum = 0;
    for (int slot = first_slot; slot < first_slot + num_slots; ++slot)
        for (int source = 0; source < num_ranks_; ++source)
            sum += counter(rank_, slot, source).load(std::memory_order_seq_cst);
    return sum;
}

WaitStatus SignalBoard::wait_traffic(int first_slot, int num_slots, std::uint64_t beyond, std::int64_t timeout_ns) {
    const std::int64_t start = now_ns();
    const auto grown = [&] { return traffic(first_slot, num_slots) > beyond; };
    if (grown()) return WaitStatus::kReached;
    if (spin_ns_ > 0 && timeout_ns > 0) {
        const std::int64_t spin_until = start + (spin_ns_ < timeout_ns ? spin_ns_ : timeout_ns);
        do {
            for (int i = 0; i < 32; ++i) {
                poll_ ? poll_(false) : relax();
                if (grown()) return WaitStatus::kReached;
            }
        } while (now_ns() < spin_until);
        if (poll_) poll_(true);
    }
    Header& mine = header(rank_);
    for (;;) {
        mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = mine.doorbell.load(std::memory_order_seq_cst);
        const std::int64_t left = start + timeout_ns - now_ns();
        if (!grown() && left > 0) futex_wait(mine.doorbell, seen, left < kSliceNs ? left : kSliceNs);
        mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (grown()) return WaitStatus::kReached;
        if (left <= 0) return WaitStatus::kTimeout;
    }
}

bool SignalBoard::lost(int slot, std::uint64_t at_least) const {
    for (int source : gone())
        if (counter(rank_, slot, source).load(std::memory_order_acquire) < at_least) return true;
    return false;
}

void SignalBoard::note_wait(int source, std::int64_t start_ns) {
    const std::int64_t waited = now_ns() - start_ns;
    waited_ns_[source] += waited;
    if (waited > longest_wait_ns_[source]) longest_wait_ns_[source] = waited;
}

// Strikes those that have come off the list of the late.
bool SignalBoard::all_arrived(int slot, std::uint64_t at_least, std::int64_t start_ns, std::vector<int>& late) {
    for (std::size_t i = 0; i < late.size();) {
        if (counter(rank_, slot, late[i]).load(std::memory_order_seq_cst) < at_least) {
            ++i;
            continue;
        }
        note_wait(late[i], start_ns);
        late.erase(late.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return late.empty();
}

WaitStatus SignalBoard::wait(int slot, std::uint64_t at_least, std::int64_t timeout_ns) {
    MC_CHECK(slot >= 0 && slot < num_slots_, "wait: slot out of range");
    if (reached(slot, at_least)) return WaitStatus::kReached;
    if (timeout_ns <= 0) return lost(slot, at_least) ? WaitStatus::kLost : WaitStatus::kTimeout;  // only looked
    const std::int64_t start = now_ns();
    std::vector<int> late;
    for (int source = 0; source < num_ranks_; ++source) late.push_back(source);
    if (spin_ns_ > 0) {
        const std::int64_t spin_until = start + (spin_ns_ < timeout_ns ? spin_ns_ : timeout_ns);
        do {
            for (int i = 0; i < 32; ++i) {
                poll_ ? poll_(false) : relax();
                if (all_arrived(slot, at_least, start, late)) return WaitStatus::kReached;
            }
        } while (now_ns() < spin_until);
        if (poll_) poll_(true);
    }
    Header& mine = header(rank_);
    for (;;) {
        mine.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = mine.doorbell.load(std::memory_order_seq_cst);
        const bool done = all_arrived(slot, at_least, start, late);
        const std::int64_t left = start + timeout_ns - now_ns();
        const bool gone_before = !done && lost(slot, at_least);
        if (!done && !gone_before && left > 0) futex_wait(mine.doorbell, seen, left < kSliceNs ? left : kSliceNs);
        mine.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (all_arrived(slot, at_least, start, late)) return WaitStatus::kReached;
        if (!gone_before && left > 0) continue;
        for (int source : late) note_wait(source, start);
        return gone_before ? WaitStatus::kLost : WaitStatus::kTimeout;
    }
}

WaitStatus SignalBoard::wait_at(int slot, const std::vector<std::pair<int, int>>& lanes, std::uint64_t at_least,
                                std::int64_t timeout_ns) {
    std::size_t next = 0;  // those before it have arrived
    const auto all_arrived = [&] {
        while (next < lanes.size() && lane_at(slot, lanes[next].first, lanes[next].second) >= at_least) ++next;
        return next == lanes.size();
    };
    if (all_arrived()) return WaitStatus::kReached;
    const std::int64_t start = now_ns();
    const int first = lanes[next].second;
    const auto ended = [&](WaitStatus status) {
        note_wait(first, start);
        return status;
    };
    if (spin_ns_ > 0 && timeout_ns > 0) {
        const std::int64_t spin_until = start + (spin_ns_ < timeout_ns ? spin_ns_ : timeout_ns);
        do {
            for (int i = 0; i < 32; ++i) {
                poll_ ? poll_(false) : relax();
                if (all_arrived()) return ended(WaitStatus::kReached);
            }
        } while (now_ns() < spin_until);
        if (poll_) poll_(true);
    }
    for (;;) {
        // Whoever adds to a lane of that board rings its doorbell.
        const int owner = lanes[next].first;
        Header& there = header(owner);
        there.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = there.doorbell.load(std::memory_order_seq_cst);
        const bool gone_before = has_gone(owner);
        const std::int64_t left = start + timeout_ns - now_ns();
        const bool sleeps = lane_at(slot, owner, lanes[next].second) < at_least && !gone_before && left > 0;
        if (sleeps) futex_wait(there.doorbell, seen, left < kSliceNs ? left : kSliceNs);
        there.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (all_arrived()) return ended(WaitStatus::kReached);
        if (gone_before && lanes[next].first == owner) return ended(WaitStatus::kLost);
        if (left <= 0) return ended(WaitStatus::kTimeout);
    }
}

bool SignalBoard::has_gone(int peer) const {
    return header(peer).departed.load(std::memory_order_acquire) != 0 || !processes_[peer].alive();
}

std::vector<int> SignalBoard::gone() const {
    std::vector<int> ranks;
    for (int peer = 0; peer < num_ranks_; ++peer)
        if (has_gone(peer)) ranks.push_back(peer);
    return ranks;
}

void SignalBoard::mark_departed(int peer) {
    header(peer).departed.store(1, std::memory_order_seq_cst);
    for (int other = 0; other < num_ranks_; ++other) ring(other);
}

void SignalBoard::depart() { mark_departed(rank_); }

}  // namespace moecomm
