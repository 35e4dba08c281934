// Stands in for csrc/cuda/bulk_copy.cuh when a kernel runs on the CPU. Copies complete as late as they may: a load some
// time after somebody looks for it, its target poisoned until then; a store reads when it must have been read, and is
// written, in any order, when it must have been written: never, if nobody waits for that.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>

#include "device.h"

namespace moecomm {

inline constexpr int kWarp = emulation::kWarpThreads;
using Arrival = unsigned long long;

namespace late {

inline constexpr std::chrono::seconds kPatience(3);  // then an arrival is taken to be lost

struct Load {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes;
    int looks;  // that it still takes to arrive
};

struct Phase {
    long long bytes_to_come = 0;
    unsigned number = 0;
    bool ready = false;  // known to the copy engine
    bool armed = false;
    std::vector<Load> loads;
};

struct Store {
    unsigned char* to;
    const unsigned char* from;
    std::vector<unsigned char> bytes;
    bool was_read = false;

    void read() {
        if (!was_read) std::copy_n(from, bytes.size(), bytes.begin());
        was_read = true;
    }
};

struct Engine {
    std::mutex mutex;
    std::map<const Arrival*, Phase> arrivals;
};

// Of this block.
inline Engine& engine() {
    std::call_once(emulation::block->once, [] { emulation::block->engine = std::make_shared<Engine>(); });
    return *static_cast<Engine*>(emulation::block->engine.get());
}

inline thread_local std::vector<std::vector<Store>> groups;
inline thread_local std::vector<Store> open_group;
inline thread_local std::chrono::steady_clock::time_point waiting_since{};

inline void fail(const char* what) { emulation::block->failures->add(what); }

inline bool is_multiple(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

inline bool is_allowed(const void* global, const void* shared, unsigned bytes) {
    const bool allowed = is_multiple(global) && is_multiple(shared) && bytes % 16 == 0 && bytes > 0;
    if (!allowed) fail("a bulk copy whose addresses or size are not multiples of 16");
    if (!emulation::block->holds(shared, bytes)) fail("a bulk copy outside of shared memory");
    return allowed && emulation::block->holds(shared, bytes);
}

}  // namespace late

inline unsigned char* shared_memory() {
    // A thread starts here: nothing is left of the block before.
    late::groups.clear();
    late::open_group.clear();
    late::waiting_since = {};
    return emulation::block->shared;
}

inline void arrival_init(Arrival* arrival) {
    if (!emulation::block->holds(arrival, sizeof(Arrival))) late::fail("an arrival outside of shared memory");
    late::Engine& engine = late::engine();
    const std::lock_guard<std::mutex> lock(engine.mutex);
    engine.arrivals[arrival] = late::Phase();
}

inline void arrivals_ready() {
    late::Engine& engine = late::engine();
    const std::lock_guard<std::mutex> lock(engine.mutex);
    for (auto& [_, phase] : engine.arrivals) phase.ready = true;
}

inline void shared_before_bulk() {}

inline bool arrival_ended(Arrival* arrival, unsigned parity) {
    late::Engine& engine = late::engine();
    {
        const std::lock_guard<std::mutex> lock(engine.mutex);
        late::Phase& phase = engine.arrivals[arrival];
        for (late::Load& load : phase.loads) {
            if (load.looks-- != 0) continue;
            std::copy_n(load.from, load.bytes, load.to);
            phase.bytes_to_come -= load.bytes;
        }
        if (phase.armed && phase.bytes_to_come == 0) {
            phase.loads.clear();
            phase.armed = false;
            ++phase.number;
        }
        if (phase.number % 2 != parity) {
            late::waiting_since = {};
            return true;
        }
    }
    if (emulation::block->failures->any()) return true;  // what follows is of no interest: to its end without waits
    const auto now = std::chrono::steady_clock::now();
    if (late::waiting_since == std::chrono::steady_clock::time_point{}) late::waiting_since = now;
    if (now - late::waiting_since > late::kPatience) {
        late::fail("a wait for a load that does not come");
        return true;
    }
    std::this_thread::yield();
    return false;
}

inline void bulk_load(void* shared, const void* global, unsigned bytes, Arrival* arrival) {
    if (!late::is_allowed(global, shared, bytes)) return;
    late::Engine& engine = late::engine();
    const std::lock_guard<std::mutex> lock(engine.mutex);
    late::Phase& phase = engine.arrivals[arrival];
    if (!phase.ready) late::fail("a load reports to an arrival that the copy engine does not know");
    if (phase.armed) late::fail("a load reports to an arrival whose phase has not ended");
    auto* to = static_cast<unsigned char*>(shared);
    std::fill_n(to, bytes, emulation::kPoison);
    phase.armed = true;
    phase.bytes_to_come += bytes;
    phase.loads.push_back(
        {to, static_cast<const unsigned char*>(global), bytes, static_cast<int>(emulation::chance() % 40)});
}

inline void bulk_store(void* global, const void* shared, unsigned bytes) {
    if (!late::is_allowed(global, shared, bytes)) return;
    late::open_group.push_back({static_cast<unsigned char*>(global), static_cast<const unsigned char*>(shared),
                                std::vector<unsigned char>(bytes)});
}

inline void bulk_commit() {
    late::groups.push_back(std::move(late::open_group));
    late::open_group.clear();
}

template <int kBehind>
inline void bulk_wait_read() {
    // Who starts the next loads is quick; the others take their time.
    if (threadIdx.x != 0 && emulation::chance() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
    for (std::size_t group = 0; group + kBehind < late::groups.size(); ++group) {
        for (late::Store& store : late::groups[group]) store.read();
    }
}

inline void bulk_wait() {
    std::vector<late::Store> all;
    for (std::vector<late::Store>& group : late::groups) {
        for (late::Store& store : group) all.push_back(std::move(store));
    }
    late::groups.clear();
    std::shuffle(all.begin(), all.end(), emulation::chance);
    for (late::Store& store : all) {
        store.read();
        std::copy(store.bytes.begin(), store.bytes.end(), store.to);
    }
}

}  // namespace moecomm
