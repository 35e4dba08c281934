// Receive memory: blocks of one mapping, lowest address first, so that a steady state keeps using the same pages.
//
// Tensors that live for different times and differ a little in size would still drift over ever more pages, because a
// hole is often just too small. Address space is free, so where there is plenty, blocks of similar size get equal
// shares of it, on a grid: any of them fits where any other was. Pages of a share beyond its block are not touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/mapping.h"

namespace moecomm {

struct ArenaUsage {
    std::size_t live_bytes;         // in blocks that are alive
    std::size_t live_blocks;        // their number
    std::size_t peak_bytes;         // most bytes ever alive together
    std::size_t touched_bytes;      // in pages that blocks have lain on, since they were last given back
    std::size_t limit;              // live_bytes never exceeds it
    std::uint64_t num_allocations;  // blocks ever given
};

class Arena {
  public:
    // Blocks lie in [begin, begin + nbytes) of the mapping, which is address space; `limit` is what may be alive at
    // once. Up to twice the limit absorbs fragmentation; what goes beyond that is used for equal shares.
    // begin must be a multiple of kGranularity.
    Arena(std::shared_ptr<Mapping> mapping, std::size_t limit, std::size_t begin, std::size_t nbytes);

    // Offset of a block of at least `nbytes`, or nothing when the limit does not allow it.
    std::optional<std::size_t> allocate(std::size_t nbytes);
    void release(std::size_t offset) noexcept;
    // Gives all pages outside live blocks back to the system, but for pinned ones; returns their bytes.
    std::size_t trim();

    ArenaUsage usage() const;
    Mapping& mapping() const { return *mapping_; }
    std::size_t limit() const { return limit_; }

    static constexpr std::size_t kGranularity = 4096;

  private:
    struct Taken {
        std::size_t size;   // the block
        std::size_t share;  // address space set aside for it
        bool is_old;        // placed when the grid was another one, or something of that lay in the way
    };

    std::size_t share_for(std::size_t size);
    std::optional<std::size_t> place(std::size_t size, std::size_t alignment);
    void touch(std::size_t start, std::size_t end);
    void change_grid(std::size_t share);
    void give_up_old_pages();
    std::size_t trim_locked();

    const std::shared_ptr<Mapping> mapping_;
    const std::size_t limit_;
    const std::size_t begin_, end_;
    std::size_t spare_ = 0;  // address space left for shares beyond their blocks
    mutable std::mutex mutex_;
    std::map<std::size_t, std::size_t> holes_;    // offset -> bytes
    std::map<std::size_t, Taken> blocks_;         // by offset
    std::map<std::size_t, std::size_t> touched_;  // offset -> end; disjoint, not adjacent
    std::vector<std::size_t> shares_;             // sizes of shares in use
    std::size_t num_old_ = 0;
    int rounds_left_ = 0;  // until the change to another grid is complete
    std::size_t live_bytes_ = 0;
    std::size_t peak_bytes_ = 0;
    std::size_t touched_bytes_ = 0;
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
