// One rank's end of the connections that UCX makes: puts, as active messages or one-sided, and signals.
//
// Every message has the same header. A put's bytes are copied to its place by the receiver. UCX does not keep the order
// of messages of different size, so every put is counted, and a signal says how many puts came before it: the receiver
// holds it back until they are all in. Flush and goodbye work alike.
//
// Where the network writes to a peer's memory by itself (allow_one_sided), large puts need no message (ucx_rma.cc).
// They want a key of the segment that they go to (ucx_memory.h): it is asked for, and until it comes the puts are
// messages. Nobody counts them when they arrive, so what must come after them is sent when UCX has flushed them. A
// signal is a message always: an atomic operation on the counter would not wake who waits for it.
//
// A thread sleeps on UCX's event descriptor and serves what arrives, so a peer's messages are taken in whatever this
// rank is doing; a waiting rank serves itself, and then the thread would only get in its way, so it naps. One mutex
// guards the worker and everything that callbacks change.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory/mapping.h"
#include "sync/board.h"
#include "transport/ucp_api.h"
#include "transport/ucx_memory.h"

namespace moecomm {

class UcxWire {
  public:
    static constexpr std::size_t kSecretBytes = 16;
    static constexpr std::size_t kLargestPiece = std::size_t{256} << 10;  // puts are sent in pieces of that many bytes
    static constexpr std::size_t kNumSizeClasses = 3;                     // of the copies that they are sent from
    static constexpr std::size_t kOverhead = 256;                         // what a message without bytes counts as

    // library: path or name of libucp. board: where the peers' signals are counted; its lanes are only written here.
    // yields: whoever polls in vain gives the core away.
    UcxWire(const std::string& library, int rank, int num_ranks, std::shared_ptr<SignalBoard> board, bool yields);
    ~UcxWire();
    UcxWire(const UcxWire&) = delete;
    UcxWire& operator=(const UcxWire&) = delete;

    // Where this rank can be reached; for the peers.
    std::string address() const;
    // Connects to all peers (addresses[rank] is skipped) and greets them. The secret stands in every message; one that
    // lacks it is dropped and noted.
    void connect(const std::vector<std::string>& addresses, const std::string& secret);
    // Waits until all peers have greeted; gives those that have not.
    std::vector<int> greeted(double timeout);

    // The transports of UCX that carry what goes to a peer, as UCX calls them.
    std::vector<std::string> lanes(int peer);
    // Puts of at least so many bytes to the peer are one-sided from now on, if the peer lets me have its keys.
    void allow_one_sided(int peer, std::size_t least_bytes);
    // Gives no peer a key.
    void withhold_memory();
    // One-sided puts to the peer so far, each of up to kLargestPiece bytes.
    std::uint64_t num_one_sided(int peer);
    // Bytes of my regions that are registered for the peers.
    std::size_t registered_bytes();

    // My part of a region.
    void set_region(int index, std::shared_ptr<Mapping> mapping);
    // Sends bytes to a place in the peer's part of a region; the memory may change when this returns. Nothing is sent
    // to a peer that has gone. With n > 0 the peer's counter grows by n afterwards. False: the peer takes nothing in.
    bool put(int peer, int region, std::uint64_t offset, const void* source, std::size_t nbytes, int slot,
             std::uint64_t n, double timeout);
    // Adds n to lane (slot, me) of the peer's board, after all my earlier puts to it.
    bool signal(int peer, int slot, std::uint64_t n, double timeout);
    // Waits until the peers have everything that was put; gives those that do not answer.
    std::vector<int> flush(double timeout);
    // Serves what has arrived, unless somebody else is doing so. Who has polled and stops says so.
    void poll(bool is_last);
    // Says goodbye, waits at most `timeout` seconds for answers, and lets go of everything. Idempotent.
    void close(double timeout);
    // What should be logged, since the last call.
    std::vector<std::string> notes();
    // Called every 200 ms by whoever waits here, without any lock; may throw.
    void set_interrupt(std::function<void()> interrupt) { interrupt_ = std::move(interrupt); }

  private:
    static constexpr unsigned kMessageId = 0;
    static constexpr int kNobody = -1;
    using Clock = std::chrono::steady_clock;
    using Lock = std::unique_lock<std::mutex>;
    static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
    enum class Kind : std::uint32_t {
        kHello = 1,
        kPut,
        kSignal,
        kFlush,
        kAnswer,
        kGoodbye,
        kAsk,        // for the key of a segment
        kKey,        // the answer; without bytes: not now, or never
        kAskBack,    // for a key that was given
        kReturnKey,  // it is not used any more
    };
    struct Header {
        std::uint8_t secret[kSecretBytes];
        Kind kind;
        std::int32_t source;
        std::int32_t region;        // of a put or a key; the rank that a goodbye blames, or kNobody
        std::int32_t slot;          // of a key: whether asking again may help
        std::uint64_t offset;       // of a put; the segment of a key; the ticket of a flush, a goodbye or an answer
        std::uint64_t n;            // 0: a put that signals nothing; of a key: the segment's address
        std::uint64_t num_puts;     // that were sent before
        std::uint64_t num_signals;  // of a key: its ticket
    };
    static_assert(sizeof(Header) == 64, "the header is what ranks agree on");
    // A key of a peer's segment, or how far I am with asking for it.
    struct Key {
        enum { kUnknown, kAsked, kHeld, kReturning, kRefused } state = kUnknown;
        ucp::RemoteKey key = nullptr;
        std::uint64_t address = 0;
        std::uint64_t ticket = 0;
        std::uint64_t asked_back = 0;  // up to that ticket, which may come before the key
    };
    struct Deferred {
        std::uint64_t flush;
        Header header;
    };
    struct Link {
        UcxWire* wire = nullptr;
        int rank = 0;
        ucp::Endpoint endpoint = nullptr;
        bool has_greeted = false;
        bool is_down = false;  // failed, or the peer has said goodbye: nothing is sent any more
        int blamed = kNobody;  // its goodbye is told to waiters only after the failure of that rank, or at departs_at
        Clock::time_point departs_at;
        std::uint64_t puts_sent = 0, signals_sent = 0, tickets = 0, answered = 0;
        std::size_t bytes_in_flight = 0;
        std::uint64_t puts_received = 0, signals_received = 0;
        std::vector<Header> held;  // whose puts are still on their way
        std::size_t one_sided_from = kNever;
        std::map<UcxMemory::Place, Key> keys;
        std::uint64_t one_sided_puts = 0;
        bool is_unflushed = false;  // one-sided puts were made since the last flush
        std::uint64_t flushes = 0, flushed = 0;
        std::deque<Deferred> deferred;  // messages that wait for a flush
    };
    struct Send {
        Header header;
        Link* link;
        std::size_t size_class;
        std::unique_ptr<char[]> bytes;
    };
    struct Receive {
        Link* link;
        Header header;
    };
    struct Flush {
        Link* link;
        std::uint64_t number;
    };

    Lock lock();
    bool wait_until(Lock& lock, const std::function<bool()>& done, Clock::time_point deadline);
    bool can_send(const Link& link) const;
    // Waits until a message of so many bytes may be sent. False: the peer has gone, or takes nothing in.
    bool make_room(Lock& lock, Link& link, std::size_t nbytes, Clock::time_point deadline);
    Header header_for(Link& link, Kind kind) const;
    Send* take_send(std::size_t size_class);
    void give_back(Send* send);
    Send* fill_send(Link& link, const void* source, std::size_t nbytes);
    void sent(Send* send, ucp::Request request);
    void post(Link& link, const Header& header, const void* source, std::size_t nbytes);
    bool post_signal(Lock& lock, Link& link, int slot, std::uint64_t n, Clock::time_point deadline);
    unsigned progress();
    void fail(Link& link, const std::string& reason);
    void take_leave(Link& link, int blamed);
    void tell_departure(Link& link);
    void note(const std::string& text);
    void serve();
    void sleep(Lock& lock, bool hears_events, int timeout_ms);
    void end_nap();
    void wake_server();
    ucp::Status receive(const Header& header, void* data, std::size_t length, bool is_rendezvous);
    void put_arrived(Link& link, const Header& header);
    void settle(Link& link);
    bool apply(Link& link, const Header& header);

    bool put_one_sided(Link& link, int region, std::uint64_t offset, const void* source, std::size_t nbytes);
    bool has_unflushed(const Link& link) const { return link.is_unflushed || link.flushed < link.flushes; }
    void flush_puts(Link& link);
    void post_after_puts(Link& link, const Header& header);
    void post_deferred(Link& link);
    void flush_done(Link& link, std::uint64_t number);
    Header header_for_key(Link& link, Kind kind, UcxMemory::Place place, std::uint64_t ticket) const;
    void give_key(Link& link, const Header& header);
    void take_key(Link& link, const Header& header, const void* data, std::size_t length);
    void return_key(Link& link, const Header& header);
    void key_returned(Link& link, const Header& header);
    void reclaim_memory();
    void destroy_keys(Link& link);

    void close_endpoint(Link& link);
    void release();

    static ucp::Status on_message(void* arg, const void* header, std::size_t header_length, void* data,
                                  std::size_t length, const ucp::MessageParam* param);
    static void on_sent(void* request, ucp::Status status, void* user_data);
    static void on_received(void* request, ucp::Status status, std::size_t length, void* user_data);
    static void on_flushed(void* request, ucp::Status status, void* user_data);
    static void on_error(void* arg, ucp::Endpoint endpoint, ucp::Status status);

    const ucp::Api& api_;
    const int rank_;
    const int num_ranks_;
    const int owner_;  // the process that made this
    const bool yields_;
    const std::shared_ptr<SignalBoard> board_;
    std::function<void()> interrupt_;
    ucp::Context context_ = nullptr;
    ucp::Worker worker_ = nullptr;
    int event_fd_ = -1;
    int wake_fd_ = -1;
    std::string address_;
    std::uint8_t secret_[kSecretBytes] = {};
    std::vector<Link> links_;
    std::vector<std::shared_ptr<Mapping>> regions_;
    UcxMemory memory_;
    bool is_withheld_ = false;                    // nothing more is registered
    std::vector<std::unique_ptr<Send>> sends_;    // all that were made
    std::vector<std::vector<Send*>> idle_sends_;  // those that carry nothing, by size class
    std::vector<std::string> notes_;

    std::mutex mutex_;
    std::condition_variable served_;
    std::atomic<int> num_wanting_{0};  // who waits for the mutex; the serving thread lets them pass
    int num_waiting_ = 0;
    int num_lingering_ = 0;  // links that blame somebody
    int first_failed_ = kNobody;
    bool is_asleep_ = false;
    bool is_napping_ = false;
    std::atomic<std::int64_t> polled_at_{0};  // in nanoseconds
    bool is_stopping_ = false;
    std::atomic<bool> is_closed_{false};
    std::thread* thread_ = nullptr;
};

}  // namespace moecomm
