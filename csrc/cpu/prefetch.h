// Hints and fences that depend on the architecture.
#pragma once

#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Asks for the cache line at an address, to be read (or written) soon; any address is allowed.
#if defined(__GNUC__)
#define MOECOMM_PREFETCH(address) __builtin_prefetch((address), 0, 3)
#define MOECOMM_PREFETCH_WRITE(address) __builtin_prefetch((address), 1, 3)
#else
#define MOECOMM_PREFETCH_WRITE(address) static_cast<void>(address)
#define MOECOMM_PREFETCH(address) static_cast<void>(address)
#endif

namespace moecomm {

// Orders every earlier store, streaming ones included, before every later one.
inline void fence_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_release);
}

}  // namespace moecomm
