// The column loops in portable C++ for any architecture.
#include <cstdint>
#include <cstring>

#include "cpu/numbers.h"
#include "cpu/prefetch.h"
#include "cpu/row_loops.h"

#define MOECOMM_TARGET
#define MOECOMM_INLINE inline

namespace moecomm {
namespace generic {
namespace {
#include "cpu/lanes_generic.h"
#include "cpu/row_loops_impl.h"
}  // namespace
}  // namespace generic

const RowLoops* generic_row_loops() { return &generic::kRowLoops; }

}  // namespace moecomm
