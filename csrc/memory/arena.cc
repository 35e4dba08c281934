#include "memory/arena.h"

#include <algorithm>

#include "check.h"

namespace moecomm {
namespace {

std::size_t round_up(std::size_t nbytes) {
    const std::size_t units = std::max<std::size_t>(1, (nbytes + Arena::kGranularity - 1) / Arena::kGranularity);
    return units * Arena::kGranularity;
}

}  // namespace

Arena::Arena(std::shared_ptr<Mapping> mapping, std::size_t limit, std::size_t begin, std::size_t nbytes)
    : mapping_(std::move(mapping)), limit_(limit) {
    MC_CHECK(begin % kGranularity == 0 && begin <= mapping_->nbytes() && nbytes <= mapping_->nbytes() - begin,
             "Arena: the range lies outside the mapping");
    const std::size_t size = nbytes / kGranularity * kGranularity;
    if (size > 0) holes_[begin] = size;
}

std::optional<std::size_t> Arena::allocate(std::size_t nbytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (nbytes > limit_) return std::nullopt;
    const std::size_t size = round_up(nbytes);
    if (live_bytes_ + size > limit_) return std::nullopt;
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
        if (hole->second < size) continue;
        const std::size_t offset = hole->first;
        const std::size_t rest = hole->second - size;
        holes_.erase(hole);
        if (rest > 0) holes_[offset + size] = rest;
        blocks_[offset] = size;
        live_bytes_ += size;
        peak_bytes_ = std::max(peak_bytes_, live_bytes_);
        high_water_ = std::max(high_water_, offset + size);
        ++num_allocations_;
        return offset;
    }
    return std::nullopt;
}

void Arena::release(std::size_t offset) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = blocks_.find(offset);
    if (block == blocks_.end()) return;
    std::size_t start = block->first;
    std::size_t size = block->second;
    live_bytes_ -= size;
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
}

std::size_t Arena::trim() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [offset, size] : holes_) {
        if (offset >= high_water_) continue;
        const std::size_t used = std::min(size, high_water_ - offset);
        mapping_->punch(offset, used);
        bytes += used;
    }
    high_water_ = 0;
    for (const auto& [offset, size] : blocks_) high_water_ = std::max(high_water_, offset + size);
    return bytes;
}

ArenaUsage Arena::usage() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {live_bytes_, blocks_.size(), peak_bytes_, high_water_, limit_, num_allocations_};
}

}  // namespace moecomm
