#include "cpu/gradient.h"

namespace moecomm {

void scale_dot(char* scaled, void* dots, const char* g, const char* y, const void* weights, int64_t num_rows,
               int64_t num_columns, Format format) {
    const auto loop = row_loops().scale_dot[static_cast<int>(format)];
    const int64_t row_bytes = num_columns * static_cast<int64_t>(bytes_of(format));
    for (int64_t i = 0; i < num_rows; ++i) {
        const int64_t offset = i * row_bytes;
        const double dot = loop(scaled + offset, g + offset, y + offset, weight_at(weights, i, format), num_columns);
        if (format == Format::fp64)
            static_cast<double*>(dots)[i] = dot;
        else
            static_cast<float*>(dots)[i] = static_cast<float>(dot);
    }
}

}  // namespace moecomm
