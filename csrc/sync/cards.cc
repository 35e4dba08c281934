#include "sync/cards.h"

#include <cstring>

namespace moecomm {

CardState read_cards(const CardLayout& layout, int first, int num_columns, const std::vector<std::int64_t>& bases,
                     std::vector<std::int64_t>& columns) {
    const auto card = [&](int rank) {
        return reinterpret_cast<const std::int64_t*>(layout.address) + rank * (layout.stride_bytes / 8);
    };
    bool is_recorded = false;
    columns.resize(static_cast<std::size_t>(num_columns) * layout.num_ranks);
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
        const std::int64_t* const words = card(rank);
        if (words[layout.refused] != 0) return CardState::kDiffer;
        if (std::memcmp(words, card(0), sizeof(std::int64_t) * layout.num_agreed) != 0) return CardState::kDiffer;
        is_recorded |= words[layout.recording] != 0;
        for (int column = 0; column < num_columns; ++column)
            columns[static_cast<std::size_t>(column) * layout.num_ranks + rank] =
                words[first + column] + (bases.empty() ? 0 : bases[static_cast<std::size_t>(rank)]);
    }
    return is_recorded ? CardState::kAgreeAndRecorded : CardState::kAgree;
}

void file_card(std::uint64_t source, std::uint64_t target, std::size_t nbytes, std::int64_t sequence) {
    const auto* const card = reinterpret_cast<const std::int64_t*>(source);
    const bool is_written = card[1] != 0;  // an operation is no 0; untouched memory would look like call 0
    if (card[0] == sequence && is_written) std::memcpy(reinterpret_cast<void*>(target), card, nbytes);
}

}  // namespace moecomm
