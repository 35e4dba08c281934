// The part of UcxWire that lets the network write to a peer's memory: keys, puts, and what has to come after them.
#include <sys/eventfd.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "check.h"
#include "transport/ucx.h"

namespace moecomm {
namespace {

// Why a key has not come (Header::slot).
constexpr std::int32_t kNotNow = 1, kNotEver = 2;

}  // namespace

std::vector<std::string> UcxWire::lanes(int peer) {
    MC_CHECK(peer >= 0 && peer < num_ranks_, "lanes: peer out of range");
    const Lock guard = lock();
    const Link& link = links_[peer];
    std::vector<std::string> names;
    if (link.endpoint == nullptr) return names;
    ucp::Lane lanes[32];
    ucp::EndpointAttr attr{};
    attr.field_mask = ucp::kEndpointAttrLanes;
    attr.transports = {lanes, 32, sizeof(ucp::Lane)};
    if (api_.ep_query(link.endpoint, &attr) != ucp::kOk) return names;
    for (unsigned i = 0; i < attr.transports.num_entries; ++i) names.emplace_back(lanes[i].transport_name);
    return names;
}

void UcxWire::allow_one_sided(int peer, std::size_t least_bytes) {
    MC_CHECK(peer >= 0 && peer < num_ranks_ && peer != rank_, "allow_one_sided: not a peer");
    const Lock guard = lock();
    links_[peer].one_sided_from = std::max<std::size_t>(least_bytes, 1);
}

void UcxWire::withhold_memory() {
    const Lock guard = lock();
    is_withheld_ = true;
}

std::uint64_t UcxWire::num_one_sided(int peer) {
    MC_CHECK(peer >= 0 && peer < num_ranks_, "num_one_sided: peer out of range");
    const Lock guard = lock();
    return links_[peer].one_sided_puts;
}

std::size_t UcxWire::registered_bytes() {
    const Lock guard = lock();
    return memory_.nbytes();
}

// -- puts, and messages after them ------------------------------------------------------------------------------------

// False: it has to go as a message, for want of a key.
bool UcxWire::put_one_sided(Link& link, int region, std::uint64_t offset, const void* source, std::size_t nbytes) {
    const UcxMemory::Place place{region, UcxMemory::segment_of(offset)};
    Key& key = link.keys[place];
    if (key.state == Key::kUnknown) {
        key.state = Key::kAsked;
        post(link, header_for_key(link, Kind::kAsk, place, 0), nullptr, 0);
    }
    if (key.state != Key::kHeld) return false;
    Send* const send = fill_send(link, source, nbytes);
    ucp::RequestParam param{};
    param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
    param.callback.send = &UcxWire::on_sent;
    param.user_data = send;
    link.is_unflushed = true;
    ++link.one_sided_puts;
    const std::uint64_t address = key.address + offset % UcxMemory::kSegmentBytes;
    sent(send, api_.put_nbx(link.endpoint, send->bytes.get(), nbytes, address, key.key, &param));
    return true;
}

void UcxWire::flush_puts(Link& link) {
    link.is_unflushed = false;
    auto pending = std::make_unique<Flush>(Flush{&link, ++link.flushes});
    ucp::RequestParam param{};
    param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
    param.callback.send = &UcxWire::on_flushed;
    param.user_data = pending.get();
    const ucp::Request request = api_.ep_flush_nbx(link.endpoint, &param);
    if (ucp::is_pending(request)) {
        static_cast<void>(pending.release());  // on_flushed owns it
        wake_server();
    } else if (ucp::is_error(request)) {
        fail(link, api_.status_string(ucp::status_of(request)));
    } else {
        flush_done(link, pending->number);
    }
}

// Posts a message without bytes that must not overtake the puts before it. Those that are messages are counted.
void UcxWire::post_after_puts(Link& link, const Header& header) {
    if (link.is_down) return;
    if (link.is_unflushed) flush_puts(link);
    link.deferred.push_back({link.flushes, header});
    link.bytes_in_flight += kOverhead;
    post_deferred(link);
}

void UcxWire::post_deferred(Link& link) {
    while (!link.deferred.empty() && link.deferred.front().flush <= link.flushed) {
        const Header header = link.deferred.front().header;
        link.deferred.pop_front();
        link.bytes_in_flight -= kOverhead;
        if (header.kind == Kind::kReturnKey) {
            Key& key = link.keys[{header.region, header.offset}];
            api_.rkey_destroy(std::exchange(key.key, nullptr));
            key.state = Key::kUnknown;
        }
        post(link, header, nullptr, 0);
    }
}

void UcxWire::flush_done(Link& link, std::uint64_t number) {
    link.flushed = std::max(link.flushed, number);  // what a flush covers, those before it cover as well
    post_deferred(link);
}

void UcxWire::on_flushed(void* request, ucp::Status status, void* user_data) {
    const std::unique_ptr<Flush> pending(static_cast<Flush*>(user_data));
    Link& link = *pending->link;
    UcxWire& self = *link.wire;
    self.api_.request_free(request);
    if (status == ucp::kOk)
        self.flush_done(link, pending->number);
    else
        self.fail(link, self.api_.status_string(status));
}

// -- keys -------------------------------------------------------------------------------------------------------------

UcxWire::Header UcxWire::header_for_key(Link& link, Kind kind, UcxMemory::Place place, std::uint64_t ticket) const {
    Header header = header_for(link, kind);
    header.region = place.first;
    header.offset = place.second;
    header.num_signals = ticket;
    return header;
}

// A peer asks.
void UcxWire::give_key(Link& link, const Header& header) {
    const UcxMemory::Place place{header.region, header.offset};
    Header answer = header_for_key(link, Kind::kKey, place, 0);
    answer.slot = kNotEver;
    const bool is_region = place.first >= 0 && place.first < static_cast<int>(regions_.size());
    if (!is_region || place.second > UcxMemory::segment_of(regions_[place.first]->nbytes() - 1)) {
        note("refused a key of region " + std::to_string(place.first) + ", which has no such place");
        return post(link, answer, nullptr, 0);
    }
    UcxMemory::Segment* segment = nullptr;
    std::string problem;
    if (!is_withheld_) segment = memory_.share(context_, place, regions_[place.first], problem);
    if (!problem.empty()) {
        is_withheld_ = true;  // where there is no memory for one there is none for the next
        note(problem + "; what is put to it goes as messages (is the limit on locked memory, `ulimit -l`, too low?)");
    }
    if (segment == nullptr) return post(link, answer, nullptr, 0);
    if (segment->is_asked_back) {
        answer.slot = kNotNow;
        return post(link, answer, nullptr, 0);
    }
    segment->holders.push_back(link.rank);
    answer.slot = 0;
    answer.n = segment->mapping->address() + segment->offset;
    answer.num_signals = segment->ticket;
    post(link, answer, segment->key.data(), segment->key.size());
}

// The peer's answer.
void UcxWire::take_key(Link& link, const Header& header, const void* data, std::size_t length) {
    Key& key = link.keys[{header.region, header.offset}];
    // Messages of different size may overtake each other: it may have been asked back already.
    if (key.state != Key::kAsked || (length > 0 && header.num_signals <= key.asked_back)) return;
    if (length == 0) {
        key.state = header.slot == kNotNow ? Key::kUnknown : Key::kRefused;
        return;
    }
    key.address = header.n;
    key.ticket = header.num_signals;
    const ucp::Status status = api_.ep_rkey_unpack(link.endpoint, data, &key.key);
    key.state = status == ucp::kOk ? Key::kHeld : Key::kRefused;
    if (status == ucp::kOk) return;
    key.key = nullptr;
    note("cannot write to memory of rank " + std::to_string(link.rank) + " directly: " + api_.status_string(status));
}

// The peer would have its key back.
void UcxWire::return_key(Link& link, const Header& header) {
    const UcxMemory::Place place{header.region, header.offset};
    Key& key = link.keys[place];
    key.asked_back = std::max(key.asked_back, header.num_signals);
    const Header answer = header_for_key(link, Kind::kReturnKey, place, header.num_signals);
    if (key.state == Key::kHeld) {
        key.state = Key::kReturning;
        post_after_puts(link, answer);
    } else if (key.state != Key::kReturning) {
        if (key.state == Key::kAsked) key.state = Key::kUnknown;
        post(link, answer, nullptr, 0);
    }
}

void UcxWire::key_returned(Link& link, const Header& header) {
    UcxMemory::Segment* const segment = memory_.find({header.region, header.offset});
    if (segment == nullptr || segment->ticket != header.num_signals) return;
    auto& holders = segment->holders;
    holders.erase(std::remove(holders.begin(), holders.end(), link.rank), holders.end());
}

// Memory that the arena would give back is registered until those who may write to it have returned their keys.
void UcxWire::reclaim_memory() {
    for (const UcxMemory::Place& place : memory_.places()) {
        UcxMemory::Segment& segment = *memory_.find(place);
        if (!segment.mapping->is_unwanted(segment.offset)) continue;
        if (!std::exchange(segment.is_asked_back, true))
            for (const int holder : segment.holders)
                post(links_[holder], header_for_key(links_[holder], Kind::kAskBack, place, segment.ticket), nullptr, 0);
        auto& holders = segment.holders;
        const auto has_gone = [this](int rank) { return links_[rank].is_down; };
        holders.erase(std::remove_if(holders.begin(), holders.end(), has_gone), holders.end());
        if (holders.empty()) memory_.release(context_, place);
    }
}

void UcxWire::destroy_keys(Link& link) {
    for (auto& entry : link.keys)
        if (entry.second.key != nullptr) api_.rkey_destroy(entry.second.key);
    link.keys.clear();
}

}  // namespace moecomm
