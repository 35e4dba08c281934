// The column loops for AVX-512; absent on other architectures.
#if defined(__GNUC__) && !defined(__clang__)
// The compiler's own intrinsics start some results from undefined registers, and it then warns about that.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <cstdint>
#include <cstring>

#include "cpu/numbers.h"
#include "cpu/prefetch.h"
#include "cpu/row_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define MOECOMM_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define MOECOMM_INLINE inline MOECOMM_TARGET __attribute__((always_inline))

namespace moecomm {
namespace avx512 {
namespace {
#include "cpu/lanes_avx512.h"
#include "cpu/row_loops_impl.h"
}  // namespace
}  // namespace avx512

const RowLoops* avx512_row_loops() { return &avx512::kRowLoops; }

}  // namespace moecomm

#else

namespace moecomm {
const RowLoops* avx512_row_loops() { return nullptr; }
}  // namespace moecomm

#endif
