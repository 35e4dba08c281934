// Plain loops over memory, without routes: the bounds that the row kernels are measured against.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moecomm {

// Copies with streaming stores.
void stream_copy(char* out, const char* in, size_t num_bytes);

// Reads each of num_rows rows once and writes it num_copies times, one after the other, with streaming stores.
void stream_scatter(char* out, const char* in, int64_t num_rows, int64_t row_bytes, int64_t num_copies);

// Reads everything once; returns the exclusive or of the 8-byte words (the last one filled with zeros).
uint64_t stream_read(const char* in, size_t num_bytes);

}  // namespace moecomm
