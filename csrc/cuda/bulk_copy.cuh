// The bulk copy engine (compute capability 9.0 and later): copies between global and shared memory that one thread
// starts and that run beside it, through the asynchronous proxy.
//
// Addresses and sizes are multiples of 16. A load reports to an Arrival in shared memory; stores belong to groups of
// the thread that started them. When a load has been seen to arrive, or a group has been waited for, its bytes can be
// read by anybody; no further fence is needed then.
#pragma once

namespace moecomm {

inline constexpr int kWarp = 32;

// Counts bytes that are still to come; a phase ends when all that were announced are there.
using Arrival = unsigned long long;

// The shared memory of the block, as much as the launch asked for.
inline __device__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char moecomm_shared[];
    return moecomm_shared;
}

inline __device__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// By one thread; the others see it behind arrivals_ready and a barrier.
inline __device__ void arrival_init(Arrival* arrival) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrival)) : "memory");
}

// Makes new arrivals known to the copy engine; by the thread that made them.
inline __device__ void arrivals_ready() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders what this thread has read or written in shared memory before copies that start later.
inline __device__ void shared_before_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Whether the phase of this parity (0 for the first, then 1, 0, ...) has ended; may wait a little.
inline __device__ bool arrival_ended(Arrival* arrival, unsigned parity) {
    unsigned ended;
    asm volatile(
        "{\n.reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n}"
        : "=r"(ended)
        : "r"(shared_address(arrival)), "r"(parity)
        : "memory");
    return ended != 0;
}

// Starts to copy global memory into shared memory; the present phase of the arrival ends when it is there.
inline __device__ void bulk_load(void* shared, const void* global, unsigned bytes, Arrival* arrival) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(arrival))
                 : "memory");
}

// Starts to copy shared memory to global memory, as part of this thread's open group.
inline __device__ void bulk_store(void* global, const void* shared, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
}

// Closes this thread's open group, which may be empty.
inline __device__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when all but the latest `kBehind` groups of this thread have read their shared memory.
template <int kBehind>
inline __device__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kBehind) : "memory");
}

// Returns when all groups of this thread have been written: before a signal and before the kernel ends.
inline __device__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace moecomm
