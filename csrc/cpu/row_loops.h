// The inner loops over the columns of rows, once per instruction set, behind one table of functions.
//
//   push, combine, gradient (which row goes where)  ->  RowLoops (what happens to the bytes of one row)
//
// Arithmetic is the same in all of them, operation by operation: products and sums are rounded separately (never
// fused), sums run in a stated order, and a NaN result is stored as the canonical quiet NaN of its format.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moecomm {

enum class Format { fp64 = 0, fp32 = 1, bf16 = 2, fp16 = 3 };
inline constexpr int kNumFormats = 4;

inline constexpr size_t bytes_of(Format format) { return format == Format::fp64 ? 8 : format == Format::fp32 ? 4 : 2; }

// Sums are made, and weights kept, in fp64 for fp64 rows and in fp32 for all others.
inline double weight_at(const void* weights, int64_t i, Format format) {
    return format == Format::fp64 ? static_cast<const double*>(weights)[i] : static_cast<const float*>(weights)[i];
}

// Calls that write at least this many bytes use streaming stores: what they write would not stay in the caches.
inline constexpr int64_t kStreamingBytes = int64_t{4} << 20;

// Dot products keep this many partial sums: column c is added to sum c % 32 in ascending order, then the sums are
// added pairwise, j with j + 16, then j + 8, 4, 2, 1.
inline constexpr int kDotLanes = 32;

struct ReduceArgs {
    char* out;                // num_columns values
    const char* const* rows;  // num_rows addresses of rows
    const void* weights;      // num_rows weights (fp64 rows: double, others: float), or nullptr for a plain sum
    int64_t num_rows;         // zero rows give zeros
    int64_t num_columns;      // any number
    // While byte c of a row is added, byte c + fetch_bytes is asked for: of the same row or, past its end, of the row
    // that is rows_ahead further on in rows. 0 < fetch_bytes <= bytes of a row.
    int64_t fetch_bytes;
    int64_t rows_ahead;
    bool is_streaming;  // write out past the caches; then out is a multiple of 64
};

struct RowLoops {
    // Copies bytes past the caches where whole cache lines are written; the caller fences with fence_streaming.
    void (*copy_streaming)(char* out, const char* in, size_t num_bytes);
    // out = rows[0] + rows[1] + ... (each times its weight), from zero, in this order, fp32 (fp64 for fp64) inside.
    void (*reduce[kNumFormats])(const ReduceArgs& args);
    // out = weight * in; is_streaming writes past the caches, and then out is a multiple of 64.
    void (*scale[kNumFormats])(char* out, const char* in, double weight, int64_t num_columns, bool is_streaming);
    // out = weight * g; returns the dot product of g and y, made in fp32 (fp64 for fp64).
    double (*scale_dot[kNumFormats])(char* out, const char* g, const char* y, double weight, int64_t num_columns);
    // Reads every byte and returns their exclusive or by 8-byte words: the bound for reading.
    uint64_t (*read)(const char* in, size_t num_bytes);
};

// nullptr where this build has no such code.
const RowLoops* generic_row_loops();
const RowLoops* avx2_row_loops();
const RowLoops* avx512_row_loops();

// The table of the selected instruction set.
const RowLoops& row_loops();

}  // namespace moecomm
