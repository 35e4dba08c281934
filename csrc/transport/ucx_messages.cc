// The inner half of UcxWire: everything that happens under its mutex, and the thread that serves what arrives.
#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/ucx.h"

namespace moecomm {
namespace {

// Puts are sent from copies; each copy belongs to one of the classes.
constexpr std::size_t kSizeClasses[UcxWire::kNumSizeClasses] = {0, 4096, UcxWire::kLargestPiece};
constexpr std::size_t kMaxInFlight = std::size_t{4} << 20;  // per peer; enough for 100 Gbit/s and 300 us
// Up to so many bytes go with their message; asking the receiver first would cost a way there and back.
constexpr std::size_t kEagerBytes = std::size_t{64} << 10;
constexpr std::size_t kMaxNotes = 64;  // a flood of refusals must not become one of memory
// How long a rank that left on account of another one is not reported, so that the one at fault comes first.
constexpr auto kGrace = std::chrono::milliseconds(300);
constexpr auto kNap = std::chrono::milliseconds(1);
constexpr auto kInterruptEvery = std::chrono::milliseconds(200);
constexpr auto kLookEvery = std::chrono::milliseconds(5);

std::size_t cost(std::size_t size_class) { return kSizeClasses[size_class] + UcxWire::kOverhead; }

std::size_t class_of(std::size_t nbytes) {
    std::size_t size_class = 0;
    while (kSizeClasses[size_class] < nbytes) ++size_class;
    return size_class;
}

}  // namespace

UcxWire::Lock UcxWire::lock() {
    ++num_wanting_;
    Lock guard(mutex_);
    --num_wanting_;
    return guard;
}

bool UcxWire::wait_until(Lock& guard, const std::function<bool()>& done, Clock::time_point deadline) {
    auto next_interrupt = Clock::now() + kInterruptEvery;
    for (;;) {
        if (done()) return true;
        const bool is_served = worker_ != nullptr && progress() > 0;
        const auto now = Clock::now();
        if (now >= deadline) return done();
        if (now >= next_interrupt && interrupt_) {
            guard.unlock();
            interrupt_();
            guard.lock();
            next_interrupt = now + kInterruptEvery;
        }
        if (is_served) continue;
        end_nap();
        ++num_waiting_;
        served_.wait_for(guard, kLookEvery);
        --num_waiting_;
    }
}

// A peer of this host that was killed is seen by its process; UCX may notice much later.
bool UcxWire::can_send(const Link& link) const { return !link.is_down && board_->process_alive(link.rank); }

bool UcxWire::make_room(Lock& guard, Link& link, std::size_t nbytes, Clock::time_point deadline) {
    const std::size_t size_class = class_of(nbytes);
    if (link.is_down) return false;
    if (link.bytes_in_flight + cost(size_class) <= kMaxInFlight) return true;
    wait_until(
        guard, [&] { return link.bytes_in_flight + cost(size_class) <= kMaxInFlight || !can_send(link); }, deadline);
    if (!link.is_down && !can_send(link)) fail(link, "its process has ended");
    return !link.is_down && link.bytes_in_flight + cost(size_class) <= kMaxInFlight;
}

UcxWire::Header UcxWire::header_for(Link& link, Kind kind) const {
    Header header{};
    std::memcpy(header.secret, secret_, kSecretBytes);
    header.kind = kind;
    header.source = rank_;
    header.num_puts = link.puts_sent;
    return header;
}

UcxWire::Send* UcxWire::take_send(std::size_t size_class) {
    auto& idle = idle_sends_[size_class];
    if (idle.empty()) {
        auto made = std::make_unique<Send>();
        made->size_class = size_class;
        made->bytes.reset(new char[kSizeClasses[size_class]]);
        sends_.push_back(std::move(made));
        return sends_.back().get();
    }
    Send* const send = idle.back();
    idle.pop_back();
    return send;
}

void UcxWire::give_back(Send* send) {
    send->link->bytes_in_flight -= cost(send->size_class);
    idle_sends_[send->size_class].push_back(send);
}

// A copy of the bytes, to be sent from.
UcxWire::Send* UcxWire::fill_send(Link& link, const void* source, std::size_t nbytes) {
    Send* const send = take_send(class_of(nbytes));
    send->link = &link;
    if (nbytes > 0) std::memcpy(send->bytes.get(), source, nbytes);
    link.bytes_in_flight += cost(send->size_class);
    return send;
}

void UcxWire::sent(Send* send, ucp::Request request) {
    if (ucp::is_pending(request)) return wake_server();
    Link& link = *send->link;
    give_back(send);
    if (ucp::is_error(request)) fail(link, api_.status_string(ucp::status_of(request)));
}

void UcxWire::post(Link& link, const Header& header, const void* source, std::size_t nbytes) {
    if (link.is_down) return;
    Send* const send = fill_send(link, source, nbytes);
    send->header = header;
    ucp::RequestParam param{};
    param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
    param.callback.send = &UcxWire::on_sent;
    param.user_data = send;
    if (nbytes <= kEagerBytes) {
        param.op_attr_mask |= ucp::kOpFlags;
        param.flags = ucp::kSendEager;
    }
    sent(send, api_.am_send_nbx(link.endpoint, kMessageId, &send->header, sizeof send->header, send->bytes.get(),
                                nbytes, &param));
}

unsigned UcxWire::progress() {
    const unsigned served = api_.worker_progress(worker_);
    if (num_lingering_ > 0)
        for (Link& link : links_) tell_departure(link);
    return served;
}

void UcxWire::fail(Link& link, const std::string& reason) {
    if (link.is_down) return;
    link.is_down = true;
    if (first_failed_ == kNobody) first_failed_ = link.rank;
    board_->mark_departed(link.rank);
    // Two that close at once end each other's connection, and that is no failure.
    if (!is_closed_) note("the connection to rank " + std::to_string(link.rank) + " has failed: " + reason);
}

// The peer has said goodbye. When a rank dies, its peers notice one after the other, and leave: who hears of the
// leaving first would report the wrong rank.
void UcxWire::take_leave(Link& link, int blamed) {
    link.is_down = true;
    const bool is_peer = blamed >= 0 && blamed < num_ranks_ && blamed != rank_ && blamed != link.rank;
    link.blamed = is_peer ? blamed : kNobody;
    link.departs_at = Clock::now() + kGrace;
    if (is_peer) ++num_lingering_;
    if (!is_peer) board_->mark_departed(link.rank);
}

void UcxWire::tell_departure(Link& link) {
    if (link.blamed == kNobody) return;
    if (can_send(links_[link.blamed]) && Clock::now() < link.departs_at) return;
    link.blamed = kNobody;
    --num_lingering_;
    board_->mark_departed(link.rank);
}

void UcxWire::note(const std::string& text) {
    if (notes_.size() < kMaxNotes) notes_.push_back("rank " + std::to_string(rank_) + ": " + text);
}

// -- the thread that serves what arrives ------------------------------------------------------------------------------

void UcxWire::serve() {
    Lock guard(mutex_);
    while (!is_stopping_) {
        unsigned served = 0;
        for (int i = 0; i < 64 && num_wanting_ == 0; ++i) {
            const unsigned now = progress();
            served += now;
            if (now == 0) break;
        }
        if (served > 0 && num_waiting_ > 0) served_.notify_all();
        const std::int64_t now = std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
        if (served == 0 && num_wanting_ == 0 && now - polled_at_ < std::chrono::nanoseconds(kNap).count()) {
            sleep(guard, false, 1);
            continue;
        }
        ucp::Status status = ucp::kErrorBusy;
        if (served == 0 && num_wanting_ == 0) status = api_.worker_arm(worker_);
        if (status == ucp::kErrorBusy) {
            if (num_wanting_ == 0 && num_waiting_ == 0) continue;
            // The mutex is not fair: without this they could starve while data keeps coming, or cannot go.
            guard.unlock();
            sched_yield();
            for (int i = 0; i < 100 && num_wanting_ > 0; ++i) sched_yield();
            guard.lock();
            continue;
        }
        reclaim_memory();
        // Now and then without an event: UCX looks after its own timers only when it is called.
        sleep(guard, true, status != ucp::kOk ? 1 : num_lingering_ > 0 ? 10 : 1000);
    }
}

// Without events it is a nap: somebody else serves, and would wake this thread with each message.
void UcxWire::sleep(Lock& guard, bool hears_events, int timeout_ms) {
    is_asleep_ = true;
    is_napping_ = !hears_events;
    guard.unlock();
    pollfd entries[] = {{wake_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
    ::poll(entries, hears_events ? 2 : 1, timeout_ms);
    eventfd_t ignored = 0;
    eventfd_read(wake_fd_, &ignored);
    guard.lock();
    is_asleep_ = is_napping_ = false;
}

// A sleeping thread has not armed the descriptor for the end of what has just begun.
void UcxWire::wake_server() {
    if (is_asleep_ && !is_napping_) eventfd_write(wake_fd_, 1);
}

void UcxWire::end_nap() {
    polled_at_ = 0;
    if (is_napping_) eventfd_write(wake_fd_, 1);
}

ucp::Status UcxWire::on_message(void* arg, const void* header, std::size_t header_length, void* data,
                                std::size_t length, const ucp::MessageParam* param) {
    UcxWire& self = *static_cast<UcxWire*>(arg);
    Header received;
    unsigned difference = header_length == sizeof received ? 0 : 1;
    if (difference == 0) {
        std::memcpy(&received, header, sizeof received);
        for (std::size_t i = 0; i < kSecretBytes; ++i) difference |= received.secret[i] ^ self.secret_[i];
    }
    // is_stopping_: no memory is written to once close has begun to take things down.
    if (self.is_stopping_) return ucp::kOk;
    if (difference != 0) {
        self.note("refused a message of " + std::to_string(length) + " bytes that does not carry the group's secret");
        return ucp::kOk;
    }
    if (received.source < 0 || received.source >= self.num_ranks_ || received.source == self.rank_) {
        self.note("refused a message from rank " + std::to_string(received.source) + ", which is not a peer");
        return ucp::kOk;
    }
    return self.receive(received, data, length, (param->attributes & ucp::kReceiveIsRendezvous) != 0);
}

ucp::Status UcxWire::receive(const Header& header, void* data, std::size_t length, bool is_rendezvous) {
    Link& link = links_[header.source];
    if (header.kind == Kind::kHello) {
        link.has_greeted = true;
        return ucp::kOk;
    }
    if (header.kind == Kind::kAnswer) {
        link.answered = std::max(link.answered, header.offset);
        return ucp::kOk;
    }
    if (header.kind == Kind::kAsk) give_key(link, header);
    if (header.kind == Kind::kKey) take_key(link, header, data, is_rendezvous ? 0 : length);
    if (header.kind == Kind::kAskBack) return_key(link, header);
    if (header.kind == Kind::kReturnKey) key_returned(link, header);
    if (header.kind >= Kind::kAsk) return ucp::kOk;
    if (header.n > 0 && !board_->has_slot(header.slot)) {
        note("refused a signal to slot " + std::to_string(header.slot) + ", which does not exist");
        return ucp::kOk;
    }
    if (header.kind != Kind::kPut) {
        link.held.push_back(header);
        settle(link);
        return ucp::kOk;
    }
    const bool is_region = header.region >= 0 && header.region < static_cast<int>(regions_.size());
    const std::size_t size = is_region ? regions_[header.region]->nbytes() : 0;
    if (!is_region || length > size || header.offset > size - length) {
        note("refused a put outside region " + std::to_string(header.region));
        return ucp::kOk;
    }
    char* const place = reinterpret_cast<char*>(regions_[header.region]->address()) + header.offset;
    if (!is_rendezvous) {
        std::memcpy(place, data, length);
        put_arrived(link, header);
        return ucp::kOk;
    }
    auto pending = std::make_unique<Receive>(Receive{&link, header});
    ucp::RequestParam param{};
    param.op_attr_mask = ucp::kOpCallback | ucp::kOpUserData;
    param.callback.receive = &UcxWire::on_received;
    param.user_data = pending.get();
    const ucp::Request request = api_.am_recv_data_nbx(worker_, data, place, length, &param);
    if (ucp::is_pending(request))
        static_cast<void>(pending.release());  // on_received owns it
    else if (ucp::is_error(request))
        fail(link, api_.status_string(ucp::status_of(request)));
    else
        put_arrived(link, header);
    return ucp::kInProgress;
}

void UcxWire::put_arrived(Link& link, const Header& header) {
    ++link.puts_received;
    if (header.n > 0) {
        link.held.push_back(header);
        link.held.back().kind = Kind::kSignal;
    }
    settle(link);
}

void UcxWire::settle(Link& link) {
    // Applying one may let another follow: a goodbye waits for signals.
    for (bool changed = true; changed;) {
        changed = false;
        for (std::size_t i = 0; i < link.held.size();) {
            const Header header = link.held[i];
            if (!apply(link, header)) {
                ++i;
                continue;
            }
            link.held.erase(link.held.begin() + static_cast<std::ptrdiff_t>(i));
            changed = true;
        }
    }
}

// False: not yet.
bool UcxWire::apply(Link& link, const Header& header) {
    if (link.puts_received < header.num_puts) return false;
    if (header.kind == Kind::kSignal) {
        ++link.signals_received;
        board_->deliver(header.slot, link.rank, header.n);
        return true;
    }
    if (header.kind == Kind::kGoodbye && link.signals_received < header.num_signals) return false;
    Header answer = header_for(link, Kind::kAnswer);
    answer.offset = header.offset;
    post(link, answer, nullptr, 0);
    if (header.kind == Kind::kGoodbye) take_leave(link, header.region);
    return true;
}

void UcxWire::on_sent(void* request, ucp::Status status, void* user_data) {
    Send* const send = static_cast<Send*>(user_data);
    UcxWire& self = *send->link->wire;
    self.give_back(send);
    self.api_.request_free(request);
    if (status != ucp::kOk) self.fail(*send->link, self.api_.status_string(status));
}

void UcxWire::on_received(void* request, ucp::Status status, std::size_t, void* user_data) {
    const std::unique_ptr<Receive> pending(static_cast<Receive*>(user_data));
    UcxWire& self = *pending->link->wire;
    self.api_.request_free(request);
    if (self.is_stopping_) return;
    if (status == ucp::kOk)
        self.put_arrived(*pending->link, pending->header);
    else
        self.fail(*pending->link, self.api_.status_string(status));
}

void UcxWire::on_error(void* arg, ucp::Endpoint, ucp::Status status) {
    Link& link = *static_cast<Link*>(arg);
    link.wire->fail(link, link.wire->api_.status_string(status));
}

}  // namespace moecomm
