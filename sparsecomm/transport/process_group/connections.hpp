// TCP connections between the ranks of a group, and the messages on them. Linux only.
//
// Of two ranks, the higher one connects. Each connection carries frames both ways (frames.hpp). If the round trip is
// long, the higher rank opens several connections: a lost packet halves the congestion window of only one of them. The
// sender may send each piece of a message over another connection.
//
// Strangers: anybody can connect to the listener. A connection belongs to the group once its first bytes are a hello
// with a valid ticket. Each ticket is accepted once. If more than MAX_STRANGERS accepted connections have not said
// hello, the oldest one is closed. Before the tickets are known, connections wait in the system's accept queue; the
// thread closes the oldest ones before the queue is full. If a rank's connection is closed before the listener has
// answered its hello, the rank connects again and repeats the bytes that it had written. The listener closes when all
// ranks are connected.
//
// Threads: one thread of this module reads from all connections. It never runs Python. A caller that sends writes as
// much as the system accepts at once; the thread writes the rest. Only one caller at a time may wait in `next`. Each
// piece of data belongs to a thread or to the holder of a lock:
//   - the thread, without a lock: received data, the assemblies of messages, the list of streams;
//   - the holder of a peer's `lock`: the peer's send queue, and its streams for writing;
//   - the holder of `inbox_lock_`: completions, until a caller takes them.
// Locks are acquired in this order.
// The caller that takes a completion frees its message. The caller must keep the memory of a long message that it sends
// until the completion SENT, or until `close` has returned.
#pragma once

#include "frames.hpp"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <netinet/in.h>
#include <sys/socket.h>
#include <thread>

namespace sparsecomm {

// An event: a message was received, the memory of a long one may be reused, or the connection to a peer is lost.
struct Completion {
    int kind = DATA; // of the message; SENT, DISCONNECTED or UNREADABLE
    int rank = -1;   // the peer
    Message message;
    uint64_t request = 0; // of the message whose memory may be reused
    std::string text;     // why the connection is lost
};

struct Traffic {
    uint64_t sent = 0, received = 0; // bytes, frames included
    double seconds = 0;              // with queued or unacknowledged bytes
    double round_trip = 0;           // seconds
    uint64_t retransmits = 0;        // segments
    int connections = 0;
};

constexpr size_t BUDGET = 1 << 20; // bytes written to or read from one stream before the next stream
// Bytes of a piece that a new or idle connection carries in one trip: ten segments with their headers.
constexpr uint32_t WINDOW = 13000;
constexpr double NEVER = std::numeric_limits<double>::infinity();

enum class Sent { DONE, IN_FLIGHT, BROKEN };

struct Outgoing { // a message to be sent
    Frame next;   // the header of the next piece
    const char *data = nullptr;
    std::unique_ptr<char[]> copy;    // of a short message
    uint64_t request = 0;            // for the completion SENT; 0: none
    uint64_t unwritten = UINT64_MAX; // pieces
};

struct Stream { // a connection
    int fd = -1;
    int peer = -1; // rank of the peer; -1 for an accepted connection until its hello
    uint32_t index = 0;
    bool connecting = false, outgoing = false;
    bool greeted = false; // the peer has said hello
    bool dropped = false; // closed, and soon deleted
    double deadline = 0;  // accepted: for the hello; outgoing: for new attempts
    double retry_at = 0;  // time of the next attempt; 0: none is due
    double pause = 5e-3;  // seconds before the next attempt
    // Reading. `head` receives the hello, then the headers of frames.
    char head[sizeof(Frame)];
    size_t have = 0; // bytes in `head`
    Frame frame;
    char *to = nullptr; // destination of the rest of the piece
    size_t left = 0;    // bytes of the rest of the piece
    // Writing.
    std::shared_ptr<Outgoing> message; // of the piece that is being written
    Frame header;
    size_t written = 0;        // bytes of header and piece
    bool has_follow_up = true; // an empty frame follows the last piece, or is not needed
    bool full = false;         // the system accepts no more bytes now
    std::string unanswered; // bytes written to an outgoing connection before its greeting; at most WINDOW
    bool said_goodbye = false, heard_goodbye = false;

    bool waits_for_greeting() const { return outgoing && !greeted; } // bytes may have to be repeated
};

struct Peer {
    sockaddr_storage address = {};
    socklen_t address_size = 0;
    std::string tickets; // MAX_STREAMS for hellos of the higher rank, then MAX_STREAMS for answers of the lower one
    uint64_t accepted = 0; // bit i: the hello of connection i was received
    int connections = 0;   // number of connections that the higher rank opens; 0: unknown
    Assembly assembly;
    bool lost = false; // DISCONNECTED or UNREADABLE was queued
    std::atomic<uint64_t> sent{0}, received{0};
    std::mutex lock; // of the members below
    std::deque<std::shared_ptr<Outgoing>> queue;
    std::vector<Stream *> streams; // for writing
    size_t turn = 0;
    uint64_t sequence = 0;
    bool broken = false; // nothing can be sent any more
    bool lossy = false;  // segments were lost
    const std::shared_ptr<Outgoing> nothing = std::make_shared<Outgoing>(); // an empty frame
    bool reached = false; // was ever connected
    std::string failure;  // why it cannot be connected
};

class Connections {
  public:
    // `limit`: maximum bytes in a piece; `streams`: connections to each peer, 0: chosen by the round trip.
    Connections(int rank, int size, size_t limit, int streams);
    ~Connections(); // does not wait; must not run in a forked process, which has no threads

    // Listen on an address such as "10.0.0.1", start the thread, and return the port.
    int listen(const std::string &address);
    // Set the tickets (TICKETS_BYTES) for connections with a rank, and its address, which is used only to connect to a
    // lower rank.
    void set_peer(int rank, const std::string &address, int port, const std::string &tickets);
    // Connect the ranks. A host that does not answer for `seconds` is dead.
    void start(double seconds);
    // Wait up to `seconds` until all ranks are connected or one cannot be; return whether all are.
    bool join(double seconds);
    // Return why a rank cannot be connected; "" if it is connected or the reason is unknown.
    std::string failure(int rank);
    bool is_connected(int rank);

    // Send a message. DONE: its memory may be reused. IN_FLIGHT: the completion SENT with `request` (not 0) follows.
    // BROKEN: nothing is sent, and a completion with the reason follows.
    Sent send(int to, int32_t kind, int64_t number, const char *data, size_t nbytes, uint64_t request);
    // Wait up to `seconds` for the next completion; return early after a signal.
    bool next(double seconds, Completion *to);
    size_t pending();
    Traffic traffic(int rank);
    int thread_id() const { return thread_id_; }
    // Say goodbye, wait until all peers have received everything, and end the thread. Give up after `seconds` without
    // progress. If unsent messages are in the memory of callers, give up after `seconds` even with progress.
    void close(double seconds);

  private:
    void start_thread();
    void run();
    void trim_accept_queue();
    void handle_events(Stream *s, uint32_t events);
    void do_due_work();
    int poll_timeout() const;
    int accept_connection();
    void accept();
    void close_listener_if_done();
    void close_listener();
    void connect_to(int rank, uint32_t index);
    void open_connection(Stream *s);
    void connect_finished(Stream *s);
    void connect_failed(Stream *s, int error);
    void retry(Stream *s);
    int choose_connections(Stream *s) const;
    const char *ticket(int rank, uint32_t index, bool of_connecting) const;
    bool say_hello(Stream *s);
    bool take_hello(Stream *s);
    void attach(Stream *s);
    void read_from(Stream *s);
    bool take_bytes(Stream *s, const char *data, size_t nbytes);
    bool take_header(Stream *s);
    void end_piece(Stream *s);
    void stream_ended(Stream *s, int error);
    void drop(Stream *s);
    void close_stream(Stream *s);
    void say_goodbye();
    bool borrows_memory();
    void await_acknowledgements(double seconds, double limit);
    void lose_peer(int rank, int kind, const std::string &why);
    void pump(Peer &p, size_t budget);
    bool next_piece(Peer &p, Stream *s);
    bool send_follow_up(Peer &p, Stream *s);
    ssize_t write(Peer &p, Stream *s);
    void set_events(Stream *s, bool writing);
    void push(Completion completion);
    void wait_for(double seconds, const std::function<bool()> &done);
    void notify_change();
    Stream *add();
    bool start_watching(Stream *s, int fd, uint32_t events);
    void configure(int fd) const;
    void close_files();

    const int rank_, size_;
    const size_t limit_;
    const int wanted_streams_;
    int epoll_ = -1, wake_up_ = -1, completion_event_ = -1, thread_id_ = 0;
    double silence_ = 0; // seconds without an answer after which a host is dead
    Stream *listener_ = nullptr;
    double close_listener_at_ = NEVER, listen_again_at_ = NEVER;
    std::deque<Stream *> strangers_; // accepted connections without a hello, oldest first
    std::vector<std::unique_ptr<Peer>> peers_; // indexed by rank
    std::vector<std::unique_ptr<Stream>> streams_;
    std::vector<char> buffer_;
    std::unique_ptr<std::thread> thread_;
    std::atomic<bool> joining_{false}, stop_{false}, closing_{false}; // joining: the tickets are known
    std::mutex inbox_lock_;
    std::deque<Completion> inbox_;
    bool waiting_ = false; // a caller waits for `completion_event_`
    std::mutex changes_lock_;
    std::condition_variable changed_;  // a peer was connected, has failed, or was sent everything
    std::atomic<uint64_t> changes_{0}; // their number; guarded by `changes_lock_`. Acquire no lock while holding it
    bool retrying_ = false;            // some streams wait for their next attempt to connect
    bool dropped_ = false;             // some streams are closed
};

} // namespace sparsecomm
