// Instruction sets this machine has, and the one in use. Every one gives the same bits; they differ in speed only.
#pragma once

#include <string>
#include <vector>

namespace moecomm {

enum class InstructionSet { generic = 0, avx2 = 1, avx512 = 2 };

// Whether this build has code for the set and this processor (and operating system) can run it.
bool is_available(InstructionSet set);

const char* name_of(InstructionSet set);

std::vector<InstructionSet> all_instruction_sets();

// The set in use: the widest available one unless select_instruction_set chose another.
InstructionSet selected_instruction_set();

// "generic", "avx2", "avx512" or "auto"; throws std::invalid_argument naming the available ones. Not to be called
// while another thread runs a kernel whose speed matters; results never depend on it.
void select_instruction_set(const std::string& name);

}  // namespace moecomm
