// A check that prints where it failed and ends the process; for drivers that run under the sanitizers.
#pragma once

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                                 \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::fflush(stderr);                                                          \
            std::_Exit(1);                                                                \
        }                                                                                 \
    } while (0)
