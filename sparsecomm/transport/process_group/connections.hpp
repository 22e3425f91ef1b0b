// TCP connections between the ranks of a group, and the messages on them. Linux.
//
// Frames are described in frames.hpp. Of two ranks the higher one connects. Each connection carries frames both ways.
// Where the round trip is long, the higher rank opens more of them in the background: each has a window of its own, and
// a loss on one does not halve the others'. Which piece goes over which is the sender's choice.
//
// Strangers: anybody can connect to the listener. A connection belongs to the group once its first bytes are a hello
// with a valid ticket. Both ranks derive their tickets from secrets of the rendezvous, and the listener accepts each
// ticket once, so a hello that was overheard is worth nothing. At most MAX_STRANGERS accepted connections have not said
// hello; one more closes the oldest. Before the tickets are known, connections wait in the system's queue. It is kept
// from filling up, by closing the oldest, because TCP asks a full queue again only after a second. A rank may be a
// victim, too: it connects again, and repeats what it has written, until the listener has answered its hello. The
// listener closes when all connections are made.
//
// Threads: one thread of this module reads from all connections and waits for all. It never runs Python. A caller that
// sends writes what the system takes at once; the thread writes the rest. One caller at a time may wait in `next`.
// Who owns what:
//   - what is read, the assemblies of messages, the list of streams: the thread, without a lock;
//   - a peer's queue, its streams as places to write to: whoever holds the peer's `lock`;
//   - completions: whoever holds `inbox_lock_`; then they are the caller's. Locks are taken in this order.
// A message that is received belongs to the taker of its completion, who frees it. The memory of a long message to be
// sent belongs to this module until the completion SENT, or until `close` has returned.
//
// A forked process keeps none of the sockets: otherwise the peers of a dead rank would not see that it is dead.
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

// What has happened: a message has come, a long one is out, or a connection is of no use any more.
struct Completion {
    int kind = DATA; // of the message; SENT, DISCONNECTED or UNREADABLE
    int rank = -1;   // the peer
    Message message;
    uint64_t request = 0; // of the message that is out
    std::string text;     // how the connection has broken, or what has come that is no message
};

struct Traffic {
    uint64_t sent = 0, received = 0; // bytes, frames included
    double seconds = 0;              // for which the system had bytes to send, or waited until they were acknowledged
    double round_trip = 0;           // seconds
    uint64_t retransmits = 0;        // segments
    int connections = 0;
};

constexpr size_t BUDGET = 1 << 20; // bytes written, or read, until others have their turn
// Bytes of a piece that a fresh or an idle connection carries in one trip, which are ten segments with their headers.
constexpr uint32_t WINDOW = 13000;
constexpr double NEVER = std::numeric_limits<double>::infinity();

enum class Sent { DONE, UNDER_WAY, BROKEN };

struct Outgoing { // a message to be sent
    Frame next;   // the header of the next piece
    const char *data = nullptr;
    std::unique_ptr<char[]> copy;    // of a short one
    uint64_t request = 0;            // 0: nobody asks
    uint64_t unwritten = UINT64_MAX; // pieces, where somebody asks
};

struct Stream { // a connection
    int fd = -1;
    int peer = -1; // once it has said hello
    uint32_t index = 0;
    bool connecting = false, outgoing = false;
    bool greeted = false; // the other end has said hello
    bool dropped = false; // of no use any more, and soon deleted
    double deadline = 0;  // for the hello; of an outgoing connection, for new attempts
    double retry_at = 0;  // when to connect again; 0: not waiting for that
    double pause = 5e-3;  // seconds before the next attempt
    // Reading. `head` is that of a hello, and then of frames.
    char head[sizeof(Frame)];
    size_t have = 0; // bytes of it
    Frame frame;
    char *to = nullptr; // where the piece is to be read to
    size_t left = 0;    // bytes of the piece
    // Writing.
    std::shared_ptr<Outgoing> message; // a piece of it is being written
    Frame header;
    size_t written = 0; // bytes of header and piece
    bool followed = true; // a frame of nothing is behind the last piece, or may be done without
    bool full = false;  // the thread waits until it can be written to
    std::string unanswered; // what was written to an outgoing connection before its greeting; at most WINDOW bytes
    bool said_goodbye = false, heard_goodbye = false;
};

struct Peer {
    sockaddr_storage address = {};
    socklen_t address_size = 0;
    std::string tickets; // MAX_STREAMS for the hellos of the higher rank, then as many for those of the lower one
    uint64_t accepted = 0; // bit i: the hello of connection i has come
    int connections = 0;   // number of connections that the higher rank opens; 0: not known yet
    Assembly assembly;
    bool lost = false;
    std::atomic<uint64_t> sent{0}, received{0};
    std::mutex lock; // of what follows
    std::deque<std::shared_ptr<Outgoing>> queue;
    std::vector<Stream *> streams; // that can be written to
    size_t turn = 0;
    uint64_t sequence = 0;
    bool broken = false; // nothing can be sent any more
    bool lossy = false;  // segments have been lost
    const std::shared_ptr<Outgoing> nothing = std::make_shared<Outgoing>(); // to follow what was written
    bool reached = false; // there has been a connection
    std::string failure; // why there is none
};

class Connections {
  public:
    // `limit`: bytes in a piece; `streams`: connections to each peer, 0: as the round trip asks for.
    Connections(int rank, int size, size_t limit, int streams);
    ~Connections(); // waits for nothing; never in a forked process, which has none of the threads

    // Listen on an address, such as "10.0.0.1", and start the thread; return the port.
    int listen(const std::string &address);
    // Set the address of a lower rank, and the tickets for the connections with any: TICKETS_BYTES.
    void set_peer(int rank, const std::string &address, int port, const std::string &tickets);
    // Connect the ranks. `seconds`: after so many a silent host is dead.
    void start(double seconds);
    // Wait until all are connected, or one cannot be, for so many seconds.
    bool join(double seconds);
    // Why there is no connection to a rank; "" if there is one, or nothing is known.
    std::string failure(int rank);
    bool is_connected(int rank);

    // Send a message; DONE: its memory may be reused. Otherwise SENT tells, for `request`, which is not 0.
    Sent send(int to, int32_t kind, int64_t number, const char *data, size_t nbytes, uint64_t request);
    // Take the next completion, within so many seconds. Returns early after a signal.
    bool next(double seconds, Completion *to);
    size_t pending();
    Traffic traffic(int rank);
    int thread_id() const { return thread_id_; }
    // Say goodbye, and end the thread. Waits until all peers have what was sent to them, or take nothing for so many
    // seconds; for messages that are in their callers' memory, so long at all.
    void close(double seconds);

  private:
    void start_thread();
    void run();
    void shorten_queue();
    void handle(Stream *s, uint32_t events);
    void tend();
    int tick() const;
    int accept_one();
    void accept();
    void turn_away_oldest();
    void close_listener_if_done();
    void close_listener();
    void connect_to(int rank, uint32_t index);
    void open_connection(Stream *s);
    void connected(Stream *s);
    void unconnected(Stream *s, int error);
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
    void end_of(Stream *s, int error);
    void drop(Stream *s);
    void close_stream(Stream *s);
    bool has_streams(int rank);
    void say_goodbye();
    bool lends();
    void part(double seconds, double limit);
    void lose(int rank, int kind, const std::string &why);
    void pump(Peer &p, size_t budget);
    bool next_piece(Peer &p, Stream *s);
    bool follow(Peer &p, Stream *s);
    ssize_t write(Peer &p, Stream *s);
    void watch(Stream *s, bool writing);
    void push(Completion completion);
    void wait_for(double seconds, const std::function<bool()> &done);
    void tell_change();
    Stream *add();
    bool start_watching(Stream *s, int fd, uint32_t events);
    void configure(int fd) const;
    void close_files();

    const int rank_, size_;
    const size_t limit_;
    const int wanted_streams_;
    int epoll_ = -1, wake_ = -1, ready_ = -1, thread_id_ = 0;
    double silent_ = 0;
    Stream *listener_ = nullptr;
    double close_listener_at_ = NEVER, listen_again_at_ = NEVER;
    std::deque<Stream *> strangers_; // accepted, and have not said hello; oldest first
    std::vector<std::unique_ptr<Peer>> peers_; // by rank
    std::vector<std::unique_ptr<Stream>> streams_;
    std::vector<char> buffer_;
    std::unique_ptr<std::thread> thread_;
    std::atomic<bool> joining_{false}, stop_{false}, closing_{false}; // joining: the tickets are known
    std::mutex inbox_lock_;
    std::deque<Completion> inbox_;
    bool waiting_ = false; // a caller waits for `ready_`
    std::mutex changes_lock_;
    std::condition_variable changed_; // a peer has been connected, or has failed, or has been sent all
    std::atomic<uint64_t> changes_{0}; // how often; counted with `changes_lock_`, under which no other lock is taken
    bool retrying_ = false;            // some of `streams_` wait to connect again
    bool dropped_ = false;             // some of `streams_` are closed
};

} // namespace sparsecomm
