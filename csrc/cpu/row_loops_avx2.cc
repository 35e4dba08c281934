// The column loops for AVX2 and F16C; absent on other architectures.
#include <cstdint>
#include <cstring>

#include "cpu/numbers.h"
#include "cpu/prefetch.h"
#include "cpu/row_loops.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define MOECOMM_TARGET __attribute__((target("avx2,f16c")))
#define MOECOMM_INLINE inline MOECOMM_TARGET __attribute__((always_inline))

namespace moecomm {
namespace avx2 {
namespace {
#include "cpu/lanes_avx2.h"
#include "cpu/row_loops_impl.h"
}  // namespace
}  // namespace avx2

const RowLoops* avx2_row_loops() { return &avx2::kRowLoops; }

}  // namespace moecomm

#else

namespace moecomm {
const RowLoops* avx2_row_loops() { return nullptr; }
}  // namespace moecomm

#endif
