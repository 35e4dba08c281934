#include "memory/arena.h"

#include <algorithm>
#include <exception>

#include "check.h"

namespace moecomm {
namespace {

// Sizes within this factor share alike, and a share is by a quarter larger than the first block that asks for it.
// Chosen by simulation: 1 to 8 tensors alive, with sizes that vary by up to 90 % and die in any order, touch at
// most 1.25 times as much as that many tensors of the largest size.
constexpr std::size_t kSimilar = 8;

constexpr std::size_t kLargePage = std::size_t{1} << 21;

std::size_t with_room(std::size_t size) { return size + size / 4; }

std::size_t round_up(std::size_t nbytes) {
    return std::max<std::size_t>(1, (nbytes + Arena::kGranularity - 1) / Arena::kGranularity) * Arena::kGranularity;
}

}  // namespace

Arena::Arena(std::shared_ptr<Mapping> mapping, std::size_t limit, std::size_t begin, std::size_t nbytes)
    : mapping_(std::move(mapping)), limit_(limit), begin_(begin), end_(begin + nbytes / kGranularity * kGranularity) {
    MC_CHECK(begin % kGranularity == 0 && begin <= mapping_->nbytes() && nbytes <= mapping_->nbytes() - begin,
             "Arena: the range lies outside the mapping");
    const std::size_t size = end_ - begin_;
    if (size > 0) holes_[begin] = size;
    if (size / 2 > limit) spare_ = size - 2 * limit;
}

std::optional<std::size_t> Arena::allocate(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (nbytes > limit_) return std::nullopt;
    const std::size_t size = round_up(nbytes);
    if (live_bytes_ + size > limit_) return std::nullopt;
    give_up_old_pages();
    std::size_t share = share_for(size);
    std::optional<std::size_t> offset;
    if (share > size) offset = place(share, share);
    if (!offset) offset = place(share = size, kGranularity);
    if (!offset) return std::nullopt;
    blocks_[*offset] = Taken{size, share, false};
    spare_ -= share - size;
    live_bytes_ += size;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    touch(*offset, *offset + size);
    ++num_allocations_;
    return offset;
}

// The address space that a block of this size is to get; just its size if none is to spare.
std::size_t Arena::share_for(std::size_t size) {
    if (spare_ == 0) return size;
    std::size_t share = 0;
    for (std::size_t one : shares_)
        if (one >= size && one / kSimilar < size) share = std::max(share, one);
    if (share == 0) {
        share = round_up(with_room(size));
        change_grid(share);
    }
    return share - size <= spare_ ? share : size;
}

void Arena::change_grid(std::size_t share) {
    const auto superseded = [&](std::size_t one) { return one < share && one > share / kSimilar; };
    shares_.erase(std::remove_if(shares_.begin(), shares_.end(), superseded), shares_.end());
    shares_.push_back(share);
    // What is alive lies off the new grid, and will be in the way of what comes next. When all of that is gone as well,
    // the pages that only they have used are not needed any more.
    num_old_ = blocks_.size();
    rounds_left_ = 2;
    for (auto& [offset, taken] : blocks_) taken.is_old = true;
}

// Not when a block returns: that may happen anywhere, also after the communicator was closed, when peers may still
// read.
void Arena::give_up_old_pages() {
    while (num_old_ == 0 && rounds_left_ > 0) {
        if (--rounds_left_ > 0) {
            num_old_ = blocks_.size();
            for (auto& [offset, taken] : blocks_) taken.is_old = true;
            continue;
        }
        try {
            trim_locked();
        } catch (const std::exception&) {
            // They stay, which costs memory and nothing else.
        }
    }
}

std::optional<std::size_t> Arena::place(std::size_t size, std::size_t alignment) {
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
        const auto [start, length] = *hole;
        const std::size_t from_begin = start - begin_;
        const std::size_t gap = (alignment - from_begin % alignment) % alignment;
        if (length < gap || length - gap < size) continue;
        const std::size_t rest = length - gap - size;
        if (gap > 0)
            hole->second = gap;
        else
            holes_.erase(hole);
        if (rest > 0) holes_[start + gap + size] = rest;
        return start + gap;
    }
    return std::nullopt;
}

void Arena::touch(std::size_t start, std::size_t end) {
    auto next = touched_.upper_bound(start);
    if (next != touched_.begin()) {
        const auto previous = std::prev(next);
        if (previous->second >= start) next = previous;
    }
    while (next != touched_.end() && next->first <= end) {
        start = std::min(start, next->first);
        end = std::max(end, next->second);
        touched_bytes_ -= next->second - next->first;
        next = touched_.erase(next);
    }
    touched_[start] = end;
    touched_bytes_ += end - start;
}

void Arena::release(std::size_t offset) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(offset);
    if (block == blocks_.end()) return;
    const Taken taken = block->second;
    std::size_t start = block->first;
    std::size_t size = taken.share;
    live_bytes_ -= taken.size;
    spare_ += taken.share - taken.size;
    blocks_.erase(block);
    auto next = holes_.lower_bound(start);
    if (next != holes_.end() && next->first == start + size) {
        size += next->second;
        next = holes_.erase(next);
    }
    if (next != holes_.begin()) {
        const auto previous = std::prev(next);
        if (previous->first + previous->second == start) {
            start = previous->first;
            size += previous->second;
            holes_.erase(previous);
        }
    }
    holes_[start] = size;
    if (taken.is_old) --num_old_;
}

std::size_t Arena::trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return trim_locked();
}

std::size_t Arena::trim_locked() {
    if (!mapping_->is_sparse()) return 0;
    // What is pinned is in memory, whether or not a block ever touched it.
    for (const auto& [start, end] : mapping_->pinned(begin_, end_)) touch(start, end);
    const std::size_t before = touched_bytes_;
    auto block = blocks_.begin();
    const std::size_t base = mapping_->address();
    std::size_t from = begin_;
    for (const auto& [start, end] : touched_) {
        // Where the system gives large pages, what lies beside a block is there as well.
        from = std::max(from, start - std::min(start, (base + start) % kLargePage));
        const std::size_t to = std::min(end_, end + (kLargePage - (base + end) % kLargePage) % kLargePage);
        for (; block != blocks_.end() && block->first < to; ++block) {
            if (block->first > from) mapping_->punch(from, block->first - from);
            from = block->first + block->second.size;
        }
        if (to > from) mapping_->punch(from, to - from);
        from = std::max(from, to);
    }
    touched_.clear();
    touched_bytes_ = 0;
    for (const auto& [offset, taken] : blocks_) touch(offset, offset + taken.size);
    for (const auto& [start, end] : mapping_->pinned(begin_, end_)) touch(start, end);
    return before > touched_bytes_ ? before - touched_bytes_ : 0;  // more may have been pinned meanwhile
}

ArenaUsage Arena::usage() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {live_bytes_, blocks_.size(), peak_bytes_, touched_bytes_, limit_, num_allocations_};
}

}  // namespace moecomm
