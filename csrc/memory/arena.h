// Receive memory: blocks of one mapping, lowest address first, so that a steady state keeps using the same pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "memory/mapping.h"

namespace moecomm {

struct ArenaUsage {
    std::size_t live_bytes;         // in blocks that are alive
    std::size_t live_blocks;        // their number
    std::size_t peak_bytes;         // most bytes ever alive together
    std::size_t high_water;         // end of the highest block ever given: no page beyond it was ever touched
    std::size_t limit;              // live_bytes never exceeds it
    std::uint64_t num_allocations;  // blocks ever given
};

class Arena {
  public:
    // Blocks lie in [begin, begin + nbytes) of the mapping, which is address space; `limit` is what may be alive at
    // once (the rest absorbs fragmentation). begin must be a multiple of kGranularity.
    Arena(std::shared_ptr<Mapping> mapping, std::size_t limit, std::size_t begin, std::size_t nbytes);

    // Offset of a block of at least `nbytes`, or nothing when the limit does not allow it.
    std::optional<std::size_t> allocate(std::size_t nbytes);
    void release(std::size_t offset);
    // Gives all pages outside live blocks back to the system; returns the bytes of those holes below the high water.
    std::size_t trim();

    ArenaUsage usage() const;
    Mapping& mapping() const { return *mapping_; }
    std::size_t limit() const { return limit_; }

    static constexpr std::size_t kGranularity = 4096;

  private:
    const std::shared_ptr<Mapping> mapping_;
    const std::size_t limit_;
    mutable std::mutex mutex_;
    std::map<std::size_t, std::size_t> holes_;   // offset -> bytes
    std::map<std::size_t, std::size_t> blocks_;  // offset -> bytes
    std::size_t live_bytes_ = 0;
    std::size_t peak_bytes_ = 0;
    std::size_t high_water_ = 0;
    std::uint64_t num_allocations_ = 0;
};

// Owns one block of an arena; the block returns when this dies.
class Block {
  public:
    Block(std::shared_ptr<Arena> arena, std::size_t offset, std::size_t nbytes)
        : arena_(std::move(arena)), offset_(offset), nbytes_(nbytes) {}
    ~Block() { arena_->release(offset_); }
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    std::size_t offset() const { return offset_; }
    std::size_t nbytes() const { return nbytes_; }
    std::uint64_t address() const { return arena_->mapping().address() + offset_; }

  private:
    std::shared_ptr<Arena> arena_;
    std::size_t offset_;
    std::size_t nbytes_;
};

}  // namespace moecomm
