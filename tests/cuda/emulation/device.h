// Enough of a CUDA device to run a kernel of one-warp blocks on the CPU: each thread of a block is a thread, blocks run
// one after another, shared memory is poisoned and exactly as large as the launch says.
#pragma once

#include <atomic>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)

namespace emulation {

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned char kPoison = 0xC9;

struct Index {
    unsigned x;
};

// What goes wrong in a launch: the first thing that does is kept.
class Failures {
  public:
    void add(const std::string& what) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (first_.empty()) first_ = what;
        any_ = true;
    }
    bool any() const { return any_; }
    std::string first() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return first_;
    }

  private:
    std::mutex mutex_;
    std::string first_;
    std::atomic<bool> any_ = false;
};

struct Block {
    Block(std::size_t shared_bytes, unsigned seed, Failures* failures)
        : barrier(kWarpThreads), memory(shared_bytes + 128, kPoison), seed(seed), failures(failures) {
        const auto begin = reinterpret_cast<std::uintptr_t>(memory.data());
        shared = memory.data() + (128 - begin % 128) % 128;
        end = shared + shared_bytes;
    }

    bool holds(const void* pointer, std::size_t bytes) const {
        const auto* begin = static_cast<const unsigned char*>(pointer);
        return begin >= shared && begin + bytes <= end;
    }

    std::barrier<> barrier;
    std::vector<unsigned char> memory;
    unsigned char* shared;
    unsigned char* end;
    unsigned seed;
    Failures* failures;
    std::once_flag once;
    std::shared_ptr<void> engine;  // what stands in for the hardware of the block beside its threads
};

inline thread_local Block* block = nullptr;
inline thread_local std::minstd_rand chance;

// Runs kernel() as every thread of every block; gives the first failure, or nothing.
template <typename Kernel>
std::string launch(unsigned num_blocks, std::size_t shared_bytes, unsigned seed, Kernel kernel);

}  // namespace emulation

inline thread_local emulation::Index threadIdx{};
inline thread_local emulation::Index blockIdx{};
inline thread_local emulation::Index gridDim{};

inline void __syncwarp() { emulation::block->barrier.arrive_and_wait(); }

template <typename Kernel>
std::string emulation::launch(unsigned num_blocks, std::size_t shared_bytes, unsigned seed, Kernel kernel) {
    Failures failures;
    for (unsigned b = 0; b < num_blocks; ++b) {
        Block here(shared_bytes, seed + b, &failures);
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < kWarpThreads; ++t) {
            threads.emplace_back([&, t] {
                block = &here;
                chance.seed(here.seed * kWarpThreads + t + 1);
                threadIdx = {t};
                blockIdx = {b};
                gridDim = {num_blocks};
                kernel();
                here.barrier.arrive_and_drop();
            });
        }
        for (std::thread& thread : threads) thread.join();
    }
    return failures.first();
}
