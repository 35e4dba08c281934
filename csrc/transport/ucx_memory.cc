#include "transport/ucx_memory.h"

namespace moecomm {

UcxMemory::Segment* UcxMemory::share(ucp::Context context, Place place, const std::shared_ptr<Mapping>& mapping,
                                     std::string& problem) {
    if (Segment* const known = find(place)) return known;
    Segment segment{mapping, place.second * kSegmentBytes, nullptr, {}, ++num_tickets_, {}};
    const std::size_t nbytes = std::min(kSegmentBytes, mapping->nbytes() - segment.offset);
    ucp::MapParams params{};
    params.field_mask = ucp::kMapAddress | ucp::kMapLength;
    params.address = reinterpret_cast<void*>(mapping->address() + segment.offset);
    params.length = nbytes;
    mapping->pin(segment.offset, nbytes);
    ucp::Status status = api_.mem_map(context, &params, &segment.memory);
    if (status == ucp::kOk) {
        void* buffer = nullptr;
        std::size_t length = 0;
        status = api_.rkey_pack(context, segment.memory, &buffer, &length);
        if (status == ucp::kOk) {
            segment.key.assign(static_cast<const char*>(buffer), length);
            api_.rkey_buffer_release(buffer);
            return &segments_.emplace(place, std::move(segment)).first->second;
        }
        api_.mem_unmap(context, segment.memory);
    }
    mapping->unpin(segment.offset);
    problem = "cannot register " + std::to_string(nbytes) + " bytes with UCX: " + api_.status_string(status);
    return nullptr;
}

UcxMemory::Segment* UcxMemory::find(Place place) {
    const auto found = segments_.find(place);
    return found == segments_.end() ? nullptr : &found->second;
}

void UcxMemory::drop(ucp::Context context, const Segment& segment) {
    api_.mem_unmap(context, segment.memory);
    segment.mapping->unpin(segment.offset);
}

void UcxMemory::release(ucp::Context context, Place place) {
    const auto found = segments_.find(place);
    if (found == segments_.end()) return;
    drop(context, found->second);
    segments_.erase(found);
}

void UcxMemory::release_all(ucp::Context context) {
    for (const auto& entry : segments_) drop(context, entry.second);
    segments_.clear();
}

std::vector<UcxMemory::Place> UcxMemory::places() const {
    std::vector<Place> found;
    for (const auto& entry : segments_) found.push_back(entry.first);
    return found;
}

std::size_t UcxMemory::nbytes() const {
    std::size_t sum = 0;
    for (const auto& entry : segments_)
        sum += std::min(kSegmentBytes, entry.second.mapping->nbytes() - entry.second.offset);
    return sum;
}

}  // namespace moecomm
