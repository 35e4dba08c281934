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

}  // namespace moecomm
