// Drives the native part without Python, for the sanitizers. Usage: driver [eager|kernels|memory|processes|threads]...
#include <cstdio>
#include <cstring>
#include <utility>

#include "tests.h"

int main(int argc, char** argv) {
    // Processes first: they fork, and that goes best before there ever was a second thread.
    const std::pair<const char*, void (*)()> tests[] = {
        {"processes", native_test::test_processes}, {"threads", native_test::test_threads},
        {"memory", native_test::test_memory},       {"kernels", native_test::test_kernels},
        {"eager", native_test::test_eager},
    };
    for (const auto& [name, test] : tests) {
        bool wanted = argc == 1;
        for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], name) == 0;
        if (!wanted) continue;
        std::printf("%s ... ", name);
        std::fflush(stdout);
        test();
        std::printf("fine\n");
    }
    return 0;
}
