// Cards: what every rank says when it begins a call, as 64-bit words that lie side by side, one card per source rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moecomm {

// Where the cards of one call lie, and what their words mean.
struct CardLayout {
    std::uint64_t address;      // of rank 0's card
    std::int64_t stride_bytes;  // from one rank's card to the next
    int num_ranks;
    int num_agreed;  // the first so many words must be the same on all cards
    int refused;     // index of the word that says that a rank cannot go on
    int recording;   // index of the word that says that a rank records the call
};

enum class CardState { kDiffer = 0, kAgree = 1, kAgreeAndRecorded = 2 };

// kDiffer: the cards do not all show the same call, or a rank cannot go on. Otherwise columns becomes, one column after
// the other, what all ranks wrote into the num_columns words from `first` on, each plus its rank's base (none = 0).
CardState read_cards(const CardLayout& layout, int first, int num_columns, const std::vector<std::int64_t>& bases,
                     std::vector<std::int64_t>& columns);

// Copies a card that came at the head of a message to its place, if it is of this call: what a source sends otherwise
// stands there already.
void file_card(std::uint64_t source, std::uint64_t target, std::size_t nbytes, std::int64_t sequence);

}  // namespace moecomm
