// What the backward of a weighted combine needs at the expert's rank.
#pragma once

#include <cstdint>

#include "cpu/row_loops.h"

namespace moecomm {

// g, y and scaled are [num_rows, num_columns]; weights and dots are [num_rows] double for fp64 rows, float for others.
// scaled = weights * g, rounded once; dots = sum over columns of g * y in the order stated at kDotLanes.
void scale_dot(char* scaled, void* dots, const char* g, const char* y, const void* weights, int64_t num_rows,
               int64_t num_columns, Format format);

}  // namespace moecomm
