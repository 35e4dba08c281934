// What the driver runs.
#pragma once

namespace native_test {

void test_eager();
void test_kernels();
void test_memory();
void test_processes();
void test_threads();

}  // namespace native_test
