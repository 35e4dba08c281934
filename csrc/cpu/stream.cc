#include "cpu/stream.h"

#include "cpu/prefetch.h"
#include "cpu/row_loops.h"

namespace moecomm {

void stream_copy(char* out, const char* in, size_t num_bytes) {
    if (num_bytes == 0) return;  // then the addresses may be null, which memcpy does not take
    row_loops().copy_streaming(out, in, num_bytes);
    fence_streaming();
}

void stream_scatter(char* out, const char* in, int64_t num_rows, int64_t row_bytes, int64_t num_copies) {
    const RowLoops& loops = row_loops();
    for (int64_t t = 0; t < num_rows; ++t, in += row_bytes)
        for (int64_t i = 0; i < num_copies; ++i, out += row_bytes)
            loops.copy_streaming(out, in, static_cast<size_t>(row_bytes));
    fence_streaming();
}

uint64_t stream_read(const char* in, size_t num_bytes) { return row_loops().read(in, num_bytes); }

}  // namespace moecomm
