// Making connections: the listener, outgoing connections, and hellos.
#include "connections.hpp"
#include "sockets.hpp"

#include <algorithm>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

namespace sparsecomm {
namespace {

constexpr int AUTO_STREAMS = 48;              // maximum to a peer if chosen by the round trip
constexpr int MAX_SOCKETS = 256;              // maximum of extra connections to all peers
constexpr double TRIP_PER_STREAM = 1.5e-3;    // seconds of round trip for each connection
constexpr double LAN = 1e-3;                  // a shorter round trip needs one connection
constexpr double HELLO_TIME = 30;             // seconds for a stranger to say hello, and for a rank to try again
constexpr double MAX_PAUSE = 0.3;             // seconds between two attempts
constexpr size_t MAX_STRANGERS = 24;          // each uses a descriptor
constexpr int QUEUE_INTERVAL = 10;            // milliseconds between checks of the accept queue
constexpr int ACCEPTED_AT_ONCE = 64;          // before it is the turn of other connections
constexpr double NO_FILES = 1e-2;             // seconds until a process without free descriptors accepts again

} // namespace

int Connections::listen(const std::string &address) {
    sockaddr_storage where;
    socklen_t size = resolve(address, 0, &where);
    int fd = open_socket(where.ss_family);
    listener_ = add();
    if (!start_watching(listener_, fd, EPOLLIN))
        throw_errno("socket");
    if (bind(fd, reinterpret_cast<sockaddr *>(&where), size) || ::listen(fd, 4096) ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&where), &size))
        throw_errno(("listen on " + address).c_str());
    start_thread();
    return ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&where)->sin6_port
                                             : reinterpret_cast<sockaddr_in *>(&where)->sin_port);
}

void Connections::set_peer(int rank, const std::string &address, int port, const std::string &tickets) {
    Peer &p = *peers_.at(rank);
    if (tickets.size() != TICKETS_BYTES)
        throw std::runtime_error(std::to_string(tickets.size()) + " bytes of tickets");
    p.tickets = tickets;
    p.address_size = resolve(address, port, &p.address);
}

void Connections::start(double seconds) {
    silence_ = seconds;
    joining_ = true;
    eventfd_write(wake_up_, 1);
}

bool Connections::join(double seconds) {
    bool all = false;
    wait_for(seconds, [&] {
        all = true;
        for (int rank = 0; rank < size_; rank++) {
            all = all && is_connected(rank);
            if (!failure(rank).empty())
                return true;
        }
        return all;
    });
    return all;
}

bool Connections::is_connected(int rank) {
    std::lock_guard<std::mutex> hold(peers_[rank]->lock);
    return rank == rank_ || peers_[rank]->reached;
}

std::string Connections::failure(int rank) {
    std::lock_guard<std::mutex> hold(peers_[rank]->lock);
    return peers_[rank]->failure;
}

// -- outgoing connections, and hellos ---------------------------------------------------------------------------------

void Connections::connect_to(int rank, uint32_t index) {
    Stream *s = add();
    s->peer = rank, s->index = index, s->outgoing = true;
    s->deadline = now() + HELLO_TIME;
    open_connection(s);
}

void Connections::open_connection(Stream *s) {
    Peer &p = *peers_[s->peer];
    s->retry_at = 0;
    int fd = open_socket(p.address.ss_family), error = 0;
    {
        std::lock_guard<std::mutex> hold(p.lock); // `traffic` may read it
        s->connecting = start_watching(s, fd, EPOLLOUT);
        error = s->connecting ? 0 : errno;
    }
    if (!error) {
        configure(fd);
        error = ::connect(fd, reinterpret_cast<sockaddr *>(&p.address), p.address_size) ? errno : 0;
    }
    if (error && error != EINPROGRESS)
        connect_failed(s, error);
}

void Connections::connect_finished(Stream *s) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    Peer &p = *peers_[s->peer];
    if (!error && p.connections == 0)
        p.connections = choose_connections(s);
    if (error || !say_hello(s))
        return connect_failed(s, error);
    s->connecting = false;
    set_events(s, false);
    bool again;
    {
        std::lock_guard<std::mutex> hold(p.lock);
        s->full = false;
        again = p.reached;
        if (again && s->index == 0)
            pump(p, BUDGET);
    }
    if (again || s->index > 0)
        return; // an extra connection is used after the peer's hello: the peer may close it before
    attach(s);
    for (int i = 1; i < p.connections; i++)
        connect_to(s->peer, i);
}

// Handle an outgoing connection that failed before its greeting; `error` is 0 if the other end has closed it. Under a
// flood of strangers, the listener may close a connection before it has read the hello: then try again.
void Connections::connect_failed(Stream *s, int error) {
    Peer &p = *peers_[s->peer];
    bool reached, broken;
    {
        std::lock_guard<std::mutex> hold(p.lock);
        reached = p.reached, broken = p.broken;
    }
    if ((error == 0 || error == ECONNRESET || error == EPIPE) && !broken && now() < s->deadline)
        return retry(s);
    std::string why = error ? error_text(error) : "connection closed by the other end";
    if (s->index == 0 && reached)
        return lose_peer(s->peer, DISCONNECTED, why);
    if (s->index == 0) {
        std::lock_guard<std::mutex> hold(p.lock);
        p.failure = why;
    }
    drop(s);
    notify_change();
}

void Connections::retry(Stream *s) {
    std::lock_guard<std::mutex> hold(peers_[s->peer]->lock);
    close_stream(s);
    s->connecting = false, s->full = true; // nothing is written to it meanwhile
    s->have = 0;
    s->retry_at = now() + s->pause, s->pause = std::min(2 * s->pause, MAX_PAUSE);
    retrying_ = true;
}

// Return the number of connections to open to a peer, by the round trip of the first one.
int Connections::choose_connections(Stream *s) const {
    if (wanted_streams_ > 0)
        return std::min<int>(wanted_streams_, MAX_STREAMS);
    tcp_info info;
    if (!get_tcp_info(s->fd, &info))
        return 1;
    double round_trip = 1e-6 * info.tcpi_rtt;
    double more = round_trip < LAN ? 0 : round_trip / TRIP_PER_STREAM;
    int count = static_cast<int>(std::min(1 + more, 1.0 * AUTO_STREAMS));
    return std::min(count, 1 + MAX_SOCKETS / (size_ - 1));
}

// Return the ticket of a connection with a rank, for the hello of the rank that connects or for the answer.
const char *Connections::ticket(int rank, uint32_t index, bool of_connecting) const {
    return peers_[rank]->tickets.data() + TICKET_BYTES * (index + (of_connecting ? 0 : MAX_STREAMS));
}

// Say hello, and repeat the bytes that were written to an earlier attempt of this connection.
bool Connections::say_hello(Stream *s) {
    Peer &p = *peers_[s->peer];
    Hello hello;
    std::memcpy(hello.magic, HELLO_MAGIC, sizeof hello.magic);
    std::memcpy(hello.ticket, ticket(s->peer, s->index, s->outgoing), TICKET_BYTES);
    hello.rank = rank_, hello.stream = s->index, hello.streams = p.connections;
    std::lock_guard<std::mutex> hold(p.lock);
    std::string bytes(reinterpret_cast<char *>(&hello), sizeof hello);
    bytes += s->unanswered;
    return ::send(s->fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}

// Check the hello in `head`; return false if it is invalid.
bool Connections::take_hello(Stream *s) {
    Hello hello;
    std::memcpy(&hello, s->head, sizeof hello);
    uint32_t rank = hello.rank, index = hello.stream, size = size_, own = rank_;
    if (std::memcmp(hello.magic, HELLO_MAGIC, sizeof hello.magic) || index >= MAX_STREAMS)
        return false;
    if (s->outgoing ? rank != static_cast<uint32_t>(s->peer) || index != s->index : rank <= own || rank >= size)
        return false;
    Peer &p = *peers_[rank];
    const char *expected = ticket(rank, index, !s->outgoing);
    unsigned difference = 0;
    for (size_t i = 0; i < TICKET_BYTES; i++) // in constant time
        difference |= static_cast<unsigned char>(hello.ticket[i] ^ expected[i]);
    if (difference || p.lost || p.accepted >> index & 1)
        return false;
    p.accepted |= uint64_t{1} << index;
    if (s->outgoing) {
        std::lock_guard<std::mutex> hold(p.lock);
        s->greeted = true;
        s->unanswered.clear(), s->unanswered.shrink_to_fit();
        if (index == 0) {
            s->full = false;
            pump(p, BUDGET);
        }
    } else {
        s->greeted = true;
        strangers_.erase(std::find(strangers_.begin(), strangers_.end(), s));
        configure(s->fd);
        s->peer = rank, s->index = index;
        if (index == 0)
            p.connections = hello.streams;
        if (!say_hello(s))
            return false;
    }
    if (!s->outgoing || index > 0)
        attach(s);
    close_listener_if_done();
    notify_change();
    return true;
}

void Connections::attach(Stream *s) {
    Peer &p = *peers_[s->peer];
    {
        std::lock_guard<std::mutex> hold(p.lock);
        if (p.broken)
            return;
        p.streams.push_back(s);
        if (p.streams.size() == 2) // queue only bytes that leave soon: another stream may be faster
            set_option(p.streams[0]->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 2 * WINDOW);
        if (p.streams.size() >= 2)
            set_option(s->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 2 * WINDOW);
        p.reached = true;
        pump(p, BUDGET);
    }
    notify_change();
}

// -- the listener -----------------------------------------------------------------------------------------------------

// Until the tickets are known, close the oldest connections in the accept queue whenever it is half full.
void Connections::trim_accept_queue() {
    tcp_info info; // of a listener: tcpi_unacked is the length of its queue, tcpi_sacked the maximum length
    while (!stop_ && !joining_) {
        pollfd woken = {wake_up_, POLLIN, 0};
        poll(&woken, 1, QUEUE_INTERVAL);
        uint32_t surplus = 0;
        if (get_tcp_info(listener_->fd, &info) && info.tcpi_unacked > info.tcpi_sacked / 2)
            surplus = info.tcpi_unacked - info.tcpi_sacked / 4;
        for (; surplus > 0; surplus--)
            close_file(accept_connection());
    }
}

int Connections::accept_connection() {
    return open_file([&] { return accept4(listener_->fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
}

void Connections::accept() {
    for (int i = 0; i < ACCEPTED_AT_ONCE && listener_; i++) {
        int fd = accept_connection();
        bool no_files = fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
        if (no_files && strangers_.empty()) { // wait until other descriptors are closed
            epoll_event nothing = {0, {listener_}};
            epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_->fd, &nothing);
            listen_again_at_ = now() + NO_FILES;
            return;
        }
        if (no_files || (fd >= 0 && strangers_.size() == MAX_STRANGERS)) {
            Stream *oldest = strangers_.front();
            read_from(oldest); // its hello may have just arrived
            if (!oldest->greeted)
                drop(oldest);
        }
        if (no_files)
            continue;
        if (fd < 0)
            return;
        if (!listener_) // the oldest stranger completed all connections
            return close_file(fd);
        Stream *s = add();
        if (!start_watching(s, fd, EPOLLIN)) {
            drop(s);
            continue;
        }
        s->deadline = now() + HELLO_TIME;
        strangers_.push_back(s);
        read_from(s); // in most cases the hello has arrived
    }
}

// Close the listener when all higher ranks have made all their connections. A rank may fail to make its extra
// connections, so wait for them at most HELLO_TIME after every rank has made its first one.
void Connections::close_listener_if_done() {
    if (!listener_)
        return;
    bool done = true;
    for (int rank = rank_ + 1; rank < size_; rank++) {
        Peer &p = *peers_[rank];
        if (!p.lost && !(p.accepted & 1))
            return;
        done = done && (p.lost || __builtin_popcountll(p.accepted) >= p.connections);
    }
    if (done)
        close_listener();
    else if (close_listener_at_ == NEVER)
        close_listener_at_ = now() + HELLO_TIME;
}

void Connections::close_listener() {
    while (!strangers_.empty())
        drop(strangers_.front());
    drop(listener_);
    listener_ = nullptr;
    close_listener_at_ = listen_again_at_ = NEVER;
}

} // namespace sparsecomm
