// MC_CHECK: the one way in which native code reports a broken precondition.
#pragma once

#include <stdexcept>
#include <string>

#define MC_CHECK(condition, message)                                                         \
    do {                                                                                     \
        if (!(condition)) throw std::invalid_argument(std::string("moecomm: ") + (message)); \
    } while (0)
