// One rank's end of the connections that UCX makes: puts and signals as active messages.
//
// Every message has the same header. A put's bytes are copied to its place by the receiver. UCX does not keep the order
// of messages of different size, so every put is counted, and a signal says how many puts came before it: the receiver
// holds it back until they are all in. Flush and goodbye work alike.
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
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "memory/mapping.h"
#include "sync/board.h"
#include "transport/ucp_api.h"

namespace moecomm {

class UcxWire {
  public:
    static constexpr std::size_t kSecretBytes = 16;
    static constexpr std::size_t kLargestPiece = std::size_t{256} << 10;  // puts are sent in pieces of that many bytes
    static constexpr std::size_t kNumSizeClasses = 3;                     // of the copies that they are sent from

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
    enum class Kind : std::uint32_t { kHello = 1, kPut, kSignal, kFlush, kAnswer, kGoodbye };
    struct Header {
        std::uint8_t secret[kSecretBytes];
        Kind kind;
        std::int32_t source;
        std::int32_t region;  // of a put; the rank that a goodbye blames, or kNobody
        std::int32_t slot;
        std::uint64_t offset;    // of a put; the ticket of a flush, a goodbye or an answer
        std::uint64_t n;         // 0: a put that signals nothing
        std::uint64_t num_puts;  // that were sent before
        std::uint64_t num_signals;
    };
    static_assert(sizeof(Header) == 64, "the header is what ranks agree on");
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

    Lock lock();
    bool wait_until(Lock& lock, const std::function<bool()>& done, Clock::time_point deadline);
    bool can_send(const Link& link) const;
    // Waits until a message of so many bytes may be sent. False: the peer has gone, or takes nothing in.
    bool make_room(Lock& lock, Link& link, std::size_t nbytes, Clock::time_point deadline);
    Header header_for(Link& link, Kind kind) const;
    Send* take_send(std::size_t size_class);
    void give_back(Send* send);
    void post(Link& link, const Header& header, const void* source, std::size_t nbytes);
    unsigned progress();
    void fail(Link& link, const std::string& reason);
    void take_leave(Link& link, int blamed);
    void tell_departure(Link& link);
    void note(const std::string& text);
    void serve();
    void sleep(Lock& lock, bool hears_events, int timeout_ms);
    void end_nap();
    ucp::Status receive(const Header& header, void* data, std::size_t length, bool is_rendezvous);
    void put_arrived(Link& link, const Header& header);
    void settle(Link& link);
    bool apply(Link& link, const Header& header);
    void close_endpoint(Link& link);
    void release();

    static ucp::Status on_message(void* arg, const void* header, std::size_t header_length, void* data,
                                  std::size_t length, const ucp::MessageParam* param);
    static void on_sent(void* request, ucp::Status status, void* user_data);
    static void on_received(void* request, ucp::Status status, std::size_t length, void* user_data);
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
