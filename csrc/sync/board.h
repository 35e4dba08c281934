// Counters by which ranks tell each other how far they are, in memory that all of them map.
//
// Every rank has one board. A board holds, per slot, one 64-bit counter (lane) per source rank: lane (slot, source) is
// written by that source only and read by the board's owner. All counters grow; a waiter asks for "at least".
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "memory/mapping.h"
#include "sync/process.h"

namespace moecomm {

enum class WaitStatus { kReached = 0, kTimeout = 1, kLost = 2 };

class SignalBoard {
  public:
    static std::size_t board_bytes(int num_ranks, int num_slots);

    // boards[r]: address of rank r's board, zeroed memory, aligned to 64 bytes.
    // pids[r]: process of rank r, or 0 for a rank that lives in this process.
    // spin_ns: how long a wait spins before it sleeps.
    // mappings: where the boards lie; kept alive with this object.
    SignalBoard(int rank, int num_slots, std::vector<std::uint64_t> boards, const std::vector<int>& pids,
                std::int64_t spin_ns, std::vector<std::shared_ptr<Mapping>> mappings);

    // Adds n to lane (slot, me) of the peer's board, after all my earlier stores, and wakes the peer if it sleeps.
    void signal(int peer, int slot, std::uint64_t n);
    // Adds n to lane (slot, source) of my board, for a source that cannot write to it by itself.
    void deliver(int slot, int source, std::uint64_t n);
    bool has_slot(int slot) const { return slot >= 0 && slot < num_slots_; }
    // What a wait calls while it spins, in place of doing nothing; with true when it stops and goes to sleep.
    void set_poll(std::function<void(bool)> poll) { poll_ = std::move(poll); }
    // Signals every rank, those behind me first.
    void signal_all(int slot, std::uint64_t n);
    // Copies nbytes to every destination (0 = none), then signals every rank.
    void post(const void* source, std::size_t nbytes, const std::vector<std::uint64_t>& destinations, int slot,
              std::uint64_t n);
    // Waits until every lane of my `slot` is at least `at_least`; at most `timeout_ns`. My loads after it see the
    // stores that the sources made before they signalled. kLost: a rank whose lane is behind has gone.
    WaitStatus wait(int slot, std::uint64_t at_least, std::int64_t timeout_ns);
    // The same for lanes of others' boards, which must be mapped here: pairs of a rank and a source. kLost: the rank
    // whose lane is behind has gone.
    WaitStatus wait_at(int slot, const std::vector<std::pair<int, int>>& lanes, std::uint64_t at_least,
                       std::int64_t timeout_ns);
    bool reached(int slot, std::uint64_t at_least) const;
    std::uint64_t lane(int slot, int source) const { return lane_at(slot, rank_, source); }
    std::uint64_t lane_at(int slot, int rank, int source) const;
    // The sum of all lanes of my slot.
    std::uint64_t total(int slot) const;
    // The sum of all lanes of so many of my slots; more than `beyond` ends the wait. Whether a rank has gone is not
    // looked at: any source may be the one that goes on.
    std::uint64_t traffic(int first_slot, int num_slots) const;
    WaitStatus wait_traffic(int first_slot, int num_slots, std::uint64_t beyond, std::int64_t timeout_ns);
    // How long waits have waited for each source, in nanoseconds: in all, and at most in one wait.
    const std::vector<std::int64_t>& waited_ns() const { return waited_ns_; }
    const std::vector<std::int64_t>& longest_wait_ns() const { return longest_wait_ns_; }
    // Ranks that have gone: their process has ended, or they said so.
    std::vector<int> gone() const;
    bool process_alive(int peer) const { return processes_[peer].alive(); }
    // Tells every peer that this rank will not signal again.
    void depart();
    // In-process peers cannot be seen dying; whoever sees it says so here.
    void mark_departed(int peer);

  private:
    struct Header;
    Header& header(int rank) const;
    std::atomic<std::uint64_t>& counter(int rank, int slot, int source) const;
    void ring(int rank);
    bool has_gone(int peer) const;
    bool lost(int slot, std::uint64_t at_least) const;
    void note_wait(int source, std::int64_t start_ns);
    bool all_arrived(int slot, std::uint64_t at_least, std::int64_t start_ns, std::vector<int>& late);

    const int rank_;
    const int num_ranks_;
    const int num_slots_;
    const std::vector<std::uint64_t> boards_;
    std::vector<PeerProcess> processes_;
    const std::int64_t spin_ns_;
    std::function<void(bool)> poll_;
    std::vector<std::int64_t> waited_ns_;
    std::vector<std::int64_t> longest_wait_ns_;
    const std::vector<std::shared_ptr<Mapping>> mappings_;
};

}  // namespace moecomm
