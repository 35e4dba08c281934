// What peers may write to by themselves: segments of my regions, registered with UCX when a peer first asks for one.
//
// Registering pins pages, and regions are mostly address space without any; so no segment is registered that nobody
// wants to write to. One that the arena would give back, Mapping::is_unwanted, is asked back from those who hold its
// key, and let go of when they have returned it. UcxWire's mutex guards all of this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "memory/mapping.h"
#include "transport/ucp_api.h"

namespace moecomm {

class UcxMemory {
  public:
    static constexpr std::size_t kSegmentBytes = std::size_t{16} << 20;
    static std::uint64_t segment_of(std::uint64_t offset) { return offset / kSegmentBytes; }
    static std::size_t rest_of_segment(std::uint64_t offset) { return kSegmentBytes - offset % kSegmentBytes; }

    // (region, segment)
    using Place = std::pair<int, std::uint64_t>;
    struct Segment {
        std::shared_ptr<Mapping> mapping;
        std::size_t offset;
        ucp::Memory memory;
        std::string key;             // what a peer makes its key from
        std::uint64_t ticket;        // tells this registration from an earlier one of the same place
        std::vector<int> holders;    // ranks that have the key
        bool is_asked_back = false;  // nobody else gets it
    };

    explicit UcxMemory(const ucp::Api& api) : api_(api) {}
    UcxMemory(const UcxMemory&) = delete;
    UcxMemory& operator=(const UcxMemory&) = delete;

    // The segment of a region, which is registered now if it was not. Null: the system does not allow it; `problem`
    // says why.
    Segment* share(ucp::Context context, Place place, const std::shared_ptr<Mapping>& mapping, std::string& problem);
    // The segment, if it is registered.
    Segment* find(Place place);
    // Lets go of one segment, or of all; the context must be there still.
    void release(ucp::Context context, Place place);
    void release_all(ucp::Context context);
    // Places that have been registered, in order.
    std::vector<Place> places() const;
    std::size_t nbytes() const;

  private:
    void drop(ucp::Context context, const Segment& segment);

    const ucp::Api& api_;
    std::map<Place, Segment> segments_;
    std::uint64_t num_tickets_ = 0;
};

}  // namespace moecomm
