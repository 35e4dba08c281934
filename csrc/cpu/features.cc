#include "cpu/features.h"

#include <atomic>
#include <stdexcept>

#include "cpu/row_loops.h"

namespace moecomm {
namespace {

InstructionSet widest() {
    InstructionSet best = InstructionSet::generic;
    for (InstructionSet set : all_instruction_sets())
        if (is_available(set)) best = set;
    return best;
}

std::atomic<InstructionSet>& selected() {
    static std::atomic<InstructionSet> set{widest()};
    return set;
}

const RowLoops* loops_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::avx512:
            return avx512_row_loops();
        case InstructionSet::avx2:
            return avx2_row_loops();
        default:
            return generic_row_loops();
    }
}

bool processor_has(InstructionSet set) {
#if defined(__x86_64__) || defined(__i386__)
    switch (set) {
        case InstructionSet::avx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        case InstructionSet::avx2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        default:
            return true;
    }
#else
    return set == InstructionSet::generic;
#endif
}

}  // namespace

std::vector<InstructionSet> all_instruction_sets() {
    return {InstructionSet::generic, InstructionSet::avx2, InstructionSet::avx512};
}

const char* name_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::avx512:
            return "avx512";
        case InstructionSet::avx2:
            return "avx2";
        default:
            return "generic";
    }
}

bool is_available(InstructionSet set) { return loops_of(set) != nullptr && processor_has(set); }

InstructionSet selected_instruction_set() { return selected().load(std::memory_order_relaxed); }

void select_instruction_set(const std::string& name) {
    if (name == "auto") {
        selected().store(widest(), std::memory_order_relaxed);
        return;
    }
    std::string available;
    for (InstructionSet set : all_instruction_sets()) {
        if (!is_available(set)) continue;
        if (name == name_of(set)) {
            selected().store(set, std::memory_order_relaxed);
            return;
        }
        available += std::string(", ") + name_of(set);
    }
    throw std::invalid_argument("instruction set '" + name + "' is not available here; available: auto" + available);
}

const RowLoops& row_loops() { return *loops_of(selected_instruction_set()); }

}  // namespace moecomm
