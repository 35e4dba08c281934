#include "cpu/gradient.h"

namespace moecomm {

void scale_dot(char* scaled, float* dots, const char* g, const char* y, const float* weights, int64_t num_rows,
               int64_t num_columns, Format format) {
    const auto loop = row_loops().scale_dot[static_cast<int>(format)];
    const int64_t row_bytes = num_columns * static_cast<int64_t>(bytes_of(format));
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t offset = i * row_bytes;
        dots[i] = loop(scaled + offset, g + offset, y + offset, weights[i], num_columns);
    }
}

}  // namespace moecomm
