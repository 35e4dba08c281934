#include "transport/ucx.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "check.h"

namespace moecomm {
namespace {

std::chrono::steady_clock::time_point after(double seconds) {
    const auto duration = std::chrono::duration<double>(std::min(seconds, 1e6));
    return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(duration);
}

std::int64_t now_ns() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

UcxWire::UcxWire(const std::string& library, int rank, int num_ranks, std::shared_ptr<SignalBoard> board, bool yields)
    : api_(ucp::load(library)),
      rank_(rank),
      num_ranks_(num_ranks),
      owner_(getpid()),
      yields_(yields),
      board_(std::move(board)),
      links_(static_cast<std::size_t>(std::max(num_ranks, 0))),
      memory_(api_),
      idle_sends_(kNumSizeClasses) {
    MC_CHECK(rank >= 0 && rank < num_ranks, "UcxWire: rank out of range");
    for (int peer = 0; peer < num_ranks; ++peer) {
        links_[peer].wire = this;
        links_[peer].rank = peer;
    }
    const auto check = [this](ucp::Status status, const char* what) {
        if (status == ucp::kOk) return;
        const std::string reason = std::string(what) + ": " + api_.status_string(status);
        release();
        throw std::runtime_error(reason);
    };
    ucp::Params params{};
    params.field_mask = ucp::kParamsFeatures | ucp::kParamsNumEndpoints;
    params.features = ucp::kFeatureActiveMessages | ucp::kFeatureOneSided | ucp::kFeatureWakeup;
    params.estimated_num_eps = static_cast<std::size_t>(num_ranks);
    check(api_.init_version(ucp::kApiMajor, ucp::kApiMinor, &params, nullptr, &context_), "ucp_init");
    ucp::WorkerParams worker_params{};
    worker_params.field_mask = ucp::kWorkerThreadMode;
    worker_params.thread_mode = ucp::kThreadModeSerialized;
    check(api_.worker_create(context_, &worker_params, &worker_), "ucp_worker_create");
    ucp::HandlerParam handler{};
    handler.field_mask = ucp::kHandlerId | ucp::kHandlerFlags | ucp::kHandlerCallback | ucp::kHandlerArg;
    handler.id = kMessageId;
    handler.flags = ucp::kHandlerWholeMessage;
    handler.callback = &UcxWire::on_message;
    handler.arg = this;
    check(api_.worker_set_am_recv_handler(worker_, &handler), "ucp_worker_set_am_recv_handler");
    check(api_.worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
    ucp::WorkerAttr attr{};
    attr.field_mask = ucp::kWorkerAttrAddress | ucp::kWorkerAttrMaxHeader;
    check(api_.worker_query(worker_, &attr), "ucp_worker_query");
    address_.assign(static_cast<const char*>(attr.address), attr.address_length);
    api_.worker_release_address(worker_, attr.address);
    if (attr.max_am_header < sizeof(Header)) {
        release();
        throw std::runtime_error("the network that UCX found carries headers of " + std::to_string(attr.max_am_header) +
                                 " bytes only");
    }
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) {
        const int error = errno;
        release();
        throw std::system_error(error, std::generic_category(), "eventfd");
    }
}

UcxWire::~UcxWire() {
    interrupt_ = nullptr;
    close(0.0);
    board_->set_poll(nullptr);
}

std::string UcxWire::address() const { return address_; }

void UcxWire::connect(const std::vector<std::string>& addresses, const std::string& secret) {
    MC_CHECK(static_cast<int>(addresses.size()) == num_ranks_, "UcxWire: one address per rank");
    MC_CHECK(secret.size() == kSecretBytes && thread_ == nullptr && !is_closed_, "UcxWire: secret or order of calls");
    const Lock guard = lock();
    std::memcpy(secret_, secret.data(), kSecretBytes);
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        Link& link = links_[peer];
        ucp::EndpointParams params{};
        params.field_mask = ucp::kEndpointRemoteAddress | ucp::kEndpointErrorMode | ucp::kEndpointErrorHandler;
        params.address = addresses[peer].data();
        params.err_mode = ucp::kErrorModePeer;
        params.err_handler = {&UcxWire::on_error, &link};
        const ucp::Status status = api_.ep_create(worker_, &params, &link.endpoint);
        if (status != ucp::kOk) {
            link.endpoint = nullptr;
            fail(link, api_.status_string(status));
            continue;
        }
        post(link, header_for(link, Kind::kHello), nullptr, 0);
    }
    board_->set_poll([this](bool is_last) { poll(is_last); });
    thread_ = new std::thread(&UcxWire::serve, this);
}

std::vector<int> UcxWire::greeted(double timeout) {
    Lock guard = lock();
    std::vector<int> silent;
    wait_until(
        guard,
        [&] {
            silent.clear();
            for (const Link& link : links_)
                if (link.rank != rank_ && !link.has_greeted) silent.push_back(link.rank);
            return std::all_of(silent.begin(), silent.end(), [&](int peer) { return links_[peer].is_down; });
        },
        after(timeout));
    return silent;
}

void UcxWire::set_region(int index, std::shared_ptr<Mapping> mapping) {
    const Lock guard = lock();
    MC_CHECK(index >= 0 && index <= static_cast<int>(regions_.size()), "set_region: index out of range");
    if (index == static_cast<int>(regions_.size())) regions_.emplace_back();
    regions_[index] = std::move(mapping);
}

bool UcxWire::put(int peer, int region, std::uint64_t offset, const void* source, std::size_t nbytes, int slot,
                  std::uint64_t n, double timeout) {
    MC_CHECK(peer >= 0 && peer < num_ranks_ && !is_closed_, "put: peer out of range, or the transport is closed");
    Lock guard = lock();
    MC_CHECK(region >= 0 && region < static_cast<int>(regions_.size()), "put: no such region");
    const Mapping& mine = *regions_[region];
    MC_CHECK(nbytes <= mine.nbytes() && offset <= mine.nbytes() - nbytes, "put: outside the region");
    if (peer == rank_) {
        guard.unlock();
        std::memcpy(reinterpret_cast<char*>(mine.address()) + offset, source, nbytes);
        if (n > 0) board_->deliver(slot, rank_, n);
        return true;
    }
    Link& link = links_[peer];
    const auto deadline = after(timeout);
    const char* from = static_cast<const char*>(source);
    const bool is_large = nbytes >= link.one_sided_from;
    for (std::size_t done = 0; done < nbytes;) {
        const std::uint64_t place = offset + done;
        std::size_t piece = std::min(nbytes - done, kLargestPiece);
        if (is_large) piece = std::min(piece, UcxMemory::rest_of_segment(place));
        if (!make_room(guard, link, piece, deadline)) return link.is_down;
        if (is_large && put_one_sided(link, region, place, from + done, piece)) {
            done += piece;
            continue;
        }
        Header header = header_for(link, Kind::kPut);
        header.num_puts = ++link.puts_sent;
        header.region = region;
        header.offset = place;
        // The signal rides on the last message, unless it has to wait for a flush.
        if (n > 0 && done + piece == nbytes && !has_unflushed(link)) {
            header.slot = slot;
            header.n = std::exchange(n, 0);
            ++link.signals_sent;
        }
        post(link, header, from + done, piece);
        done += piece;
    }
    return n == 0 || post_signal(guard, link, slot, n, deadline);
}

bool UcxWire::signal(int peer, int slot, std::uint64_t n, double timeout) {
    MC_CHECK(peer >= 0 && peer < num_ranks_ && !is_closed_, "signal: peer out of range, or the transport is closed");
    if (n == 0) return true;
    if (peer == rank_) {
        board_->deliver(slot, rank_, n);
        return true;
    }
    Lock guard = lock();
    return post_signal(guard, links_[peer], slot, n, after(timeout));
}

bool UcxWire::post_signal(Lock& guard, Link& link, int slot, std::uint64_t n, Clock::time_point deadline) {
    if (!make_room(guard, link, 0, deadline)) return link.is_down;
    Header header = header_for(link, Kind::kSignal);
    header.slot = slot;
    header.n = n;
    ++link.signals_sent;
    post_after_puts(link, header);
    return true;
}

std::vector<int> UcxWire::flush(double timeout) {
    Lock guard = lock();
    for (Link& link : links_) {
        if (link.rank == rank_ || link.is_down || link.puts_sent + link.one_sided_puts == 0) continue;
        Header header = header_for(link, Kind::kFlush);
        header.offset = ++link.tickets;
        post_after_puts(link, header);
    }
    std::vector<int> late;
    wait_until(
        guard,
        [&] {
            late.clear();
            for (const Link& link : links_)
                if (link.answered < link.tickets && can_send(link)) late.push_back(link.rank);
            return late.empty();
        },
        after(timeout));
    return late;
}

void UcxWire::poll(bool is_last) {
    if (is_closed_) return;
    if (is_last) {
        const Lock guard = lock();
        end_nap();
        return;
    }
    bool is_served = false;
    if (mutex_.try_lock()) {
        const Lock guard(mutex_, std::adopt_lock);
        polled_at_ = now_ns();
        is_served = worker_ != nullptr && progress() > 0;
        if (is_served && num_waiting_ > 0) served_.notify_all();
    }
    if (yields_ && !is_served) sched_yield();
}

void UcxWire::close(double timeout) {
    // A forked child has neither the thread nor a right to the connections.
    if (getpid() != owner_ || is_closed_.exchange(true)) return;
    std::exception_ptr interrupted;
    {
        Lock guard = lock();
        int blamed = first_failed_;
        for (int peer = 0; peer < num_ranks_ && blamed == kNobody; ++peer)
            if (!board_->process_alive(peer)) blamed = peer;
        for (Link& link : links_) {
            if (link.rank == rank_ || link.is_down || link.endpoint == nullptr) continue;
            Header header = header_for(link, Kind::kGoodbye);
            header.offset = ++link.tickets;
            header.region = blamed;
            header.num_signals = link.signals_sent;
            post_after_puts(link, header);
        }
        const auto answered = [this] {
            return std::all_of(links_.begin(), links_.end(),
                               [this](const Link& link) { return link.answered == link.tickets || !can_send(link); });
        };
        try {
            if (thread_ != nullptr) wait_until(guard, answered, after(timeout));
        } catch (...) {
            interrupted = std::current_exception();
            if (!guard.owns_lock()) guard.lock();
        }
        for (Link& link : links_) link.is_down = true;
        is_stopping_ = true;
    }
    if (thread_ != nullptr) {
        eventfd_write(wake_fd_, 1);
        thread_->join();
        delete thread_;
        thread_ = nullptr;
    }
    const Lock guard = lock();
    release();
    if (interrupted) std::rethrow_exception(interrupted);
}

std::vector<std::string> UcxWire::notes() {
    const Lock guard = lock();
    return std::exchange(notes_, {});
}

// -- the end ----------------------------------------------------------------------------------------------------------

void UcxWire::close_endpoint(Link& link) {
    if (link.endpoint == nullptr) return;
    ucp::RequestParam param{};
    param.op_attr_mask = ucp::kOpFlags;
    param.flags = ucp::kCloseForce;
    const ucp::Request request = api_.ep_close_nbx(std::exchange(link.endpoint, nullptr), &param);
    if (!ucp::is_pending(request)) return;
    const auto deadline = after(1.0);
    while (api_.request_check_status(request) == ucp::kInProgress && Clock::now() < deadline)
        api_.worker_progress(worker_);
    api_.request_free(request);
}

void UcxWire::release() {
    for (Link& link : links_) {
        // Before the endpoint, unless puts that use them are still under way: closing ends those.
        if (!has_unflushed(link)) destroy_keys(link);
        close_endpoint(link);
        destroy_keys(link);
    }
    // After all connections: nobody writes to it any more.
    memory_.release_all(context_);
    if (worker_ != nullptr) api_.worker_destroy(std::exchange(worker_, nullptr));
    if (context_ != nullptr) api_.cleanup(std::exchange(context_, nullptr));
    if (wake_fd_ >= 0) ::close(std::exchange(wake_fd_, -1));
    for (auto& idle : idle_sends_) idle.clear();
    sends_.clear();
    regions_.clear();
}

}  // namespace moecomm
