// Connections as they are made, read from, and closed. What is sent on them is in sending.cpp.
#include "connections.hpp"
#include "sockets.hpp"

#include <algorithm>
#include <csignal>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

namespace sparsecomm {
namespace {

constexpr size_t BUFFER = 1 << 18;            // bytes read at once
constexpr int AUTO_STREAMS = 48;              // to a peer, unless more are asked for
constexpr int MAX_SOCKETS = 256;              // of extra connections, to all peers
constexpr double STREAM_PER_SECONDS = 1.5e-3; // of round trip
constexpr double LAN = 1e-3;                  // a round trip of less needs one connection
constexpr double HELLO_TIME = 30;             // seconds that a stranger has to say hello, and a rank to try again
constexpr double MAX_PAUSE = 0.3;             // seconds between two attempts
constexpr size_t MAX_STRANGERS = 24;          // each takes a descriptor
constexpr int QUEUE_TICK = 10;                // milliseconds between two looks at the system's queue
constexpr int ACCEPTED_AT_ONCE = 64;          // until other connections have their turn
constexpr double NO_FILES = 1e-2;             // seconds until a process without free descriptors accepts again
constexpr double PATIENCE = 60; // times the seconds of `close`, for peers that take what they are sent, but slowly

} // namespace

// -- set-up ----------------------------------------------------------------------------------------------------------

Connections::Connections(int rank, int size, size_t limit, int streams)
    : rank_(rank), size_(size), limit_(std::clamp<size_t>(limit, MIN_PIECE, UINT32_MAX)), wanted_streams_(streams) {
    for (int i = 0; i < size; i++)
        peers_.push_back(std::make_unique<Peer>());
    if (size == 1)
        return;
    try {
        auto event_file = [] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); };
        epoll_ = opened("epoll_create1", [] { return epoll_create1(EPOLL_CLOEXEC); });
        wake_ = opened("eventfd", event_file);
        ready_ = opened("eventfd", event_file);
        epoll_event event = {EPOLLIN, {nullptr}};
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event))
            fail("epoll_ctl");
    } catch (...) {
        close_files();
        throw;
    }
}

Connections::~Connections() {
    close(0);
    for (auto &completion : inbox_)
        std::free(completion.message.memory);
    close_files();
}

void Connections::close_files() {
    for (int fd : {ready_, wake_, epoll_})
        close_file(fd);
}

int Connections::listen(const std::string &address) {
    sockaddr_storage where;
    socklen_t size = resolve(address, 0, &where);
    int fd = open_socket(where.ss_family);
    listener_ = add();
    if (!start_watching(listener_, fd, EPOLLIN))
        fail("socket"); // closed by the destructor
    if (bind(fd, reinterpret_cast<sockaddr *>(&where), size) || ::listen(fd, 4096) ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&where), &size))
        fail(("listen on " + address).c_str());
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
    silent_ = seconds;
    buffer_.resize(BUFFER);
    joining_ = true;
    eventfd_write(wake_, 1);
}

void Connections::start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // the thread takes no signals
    std::atomic<int> id{0};
    try {
        thread_ = std::make_unique<std::thread>([this, &id] {
            pthread_setname_np(pthread_self(), "sparsecomm");
            id = static_cast<int>(syscall(SYS_gettid));
            run();
        });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    while (!id)
        std::this_thread::yield();
    thread_id_ = id;
}

bool Connections::is_connected(int rank) {
    std::lock_guard<std::mutex> hold(peers_[rank]->lock);
    return rank == rank_ || peers_[rank]->reached;
}

std::string Connections::failure(int rank) {
    std::lock_guard<std::mutex> hold(peers_[rank]->lock);
    return peers_[rank]->failure;
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

// Wait until `done()`, which is asked after every change, for so many seconds.
void Connections::wait_for(double seconds, const std::function<bool()> &done) {
    auto until = std::chrono::steady_clock::now() +
                 std::chrono::milliseconds(static_cast<int64_t>(1e3 * std::clamp(seconds, 0.0, 1e8)));
    bool in_time = true;
    while (in_time) {
        uint64_t seen = changes_;
        if (done())
            return;
        std::unique_lock<std::mutex> hold(changes_lock_);
        in_time = changed_.wait_until(hold, until, [&] { return changes_ != seen; });
    }
}

void Connections::tell_change() {
    std::lock_guard<std::mutex> hold(changes_lock_);
    changes_++;
    changed_.notify_all();
}

Stream *Connections::add() {
    streams_.push_back(std::make_unique<Stream>());
    return streams_.back().get();
}

// Give the stream a socket, unless `fd` is -1, and wait for its events. Returns whether the system can, or sets errno.
bool Connections::start_watching(Stream *s, int fd, uint32_t events) {
    if (fd < 0)
        return false;
    epoll_event event = {events, {s}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event)) {
        int error = errno;
        close_file(fd);
        errno = error;
        return false;
    }
    s->fd = fd;
    return true;
}

// Another process that is just being forked may have the socket, too: without this its events would go on.
void Connections::close_stream(Stream *s) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, s->fd, nullptr);
    close_file(s->fd);
    s->fd = -1;
}

void Connections::configure(int fd) const {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    // A host that is silent is dead, also while nothing is sent: it is asked once a minute.
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::clamp(1e3 * silent_, 1e3, 2e9)));
}

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
        std::lock_guard<std::mutex> hold(p.lock); // `traffic` may look at it
        s->connecting = start_watching(s, fd, EPOLLOUT);
        error = s->connecting ? 0 : errno;
    }
    if (!error) {
        configure(fd);
        error = ::connect(fd, reinterpret_cast<sockaddr *>(&p.address), p.address_size) ? errno : 0;
    }
    if (error && error != EINPROGRESS)
        unconnected(s, error);
}

// The listener may close a connection before it has read the hello, if strangers flood it: then try again. `error` is 0
// if the other end has closed it.
void Connections::unconnected(Stream *s, int error) {
    Peer &p = *peers_[s->peer];
    bool reached, broken;
    {
        std::lock_guard<std::mutex> hold(p.lock);
        reached = p.reached, broken = p.broken;
    }
    if ((error == 0 || error == ECONNRESET || error == EPIPE) && !broken && now() < s->deadline)
        return retry(s);
    std::string why = error ? text_of(error) : "connection closed by the other end";
    if (s->index == 0 && reached)
        return lose(s->peer, DISCONNECTED, why);
    if (s->index == 0) {
        std::lock_guard<std::mutex> hold(p.lock);
        p.failure = why;
    }
    drop(s);
    tell_change();
}

void Connections::retry(Stream *s) {
    std::lock_guard<std::mutex> hold(peers_[s->peer]->lock);
    close_stream(s);
    s->connecting = false, s->full = true; // nobody writes to it meanwhile
    s->have = 0;
    s->retry_at = now() + s->pause, s->pause = std::min(2 * s->pause, MAX_PAUSE);
    retrying_ = true;
}

void Connections::connected(Stream *s) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    Peer &p = *peers_[s->peer];
    if (!error && p.connections == 0)
        p.connections = choose_connections(s);
    if (error || !say_hello(s))
        return unconnected(s, error);
    s->connecting = false;
    watch(s, false);
    bool again;
    {
        std::lock_guard<std::mutex> hold(p.lock);
        s->full = false;
        again = p.reached;
        if (again && s->index == 0)
            pump(p, BUDGET);
    }
    if (again || s->index > 0)
        return; // others are used when the peer has said hello: until then it may close them, and nothing is lost
    attach(s);
    for (int i = 1; i < p.connections; i++)
        connect_to(s->peer, i);
}

// Return the number of connections with a peer, by the round trip of the first one.
int Connections::choose_connections(Stream *s) const {
    if (wanted_streams_ > 0)
        return std::min<int>(wanted_streams_, MAX_STREAMS);
    tcp_info info;
    if (!info_of(s->fd, &info))
        return 1;
    double round_trip = 1e-6 * info.tcpi_rtt;
    double more = round_trip < LAN ? 0 : round_trip / STREAM_PER_SECONDS;
    int count = static_cast<int>(std::min(1 + more, 1.0 * AUTO_STREAMS));
    return std::min(count, 1 + MAX_SOCKETS / (size_ - 1));
}

// Return the ticket for a connection with a rank, in the hello of the rank that connects, or in the answer.
const char *Connections::ticket(int rank, uint32_t index, bool of_connecting) const {
    return peers_[rank]->tickets.data() + TICKET_BYTES * (index + (of_connecting ? 0 : MAX_STREAMS));
}

// Say hello, and repeat what was written to an earlier connection in place of which this one is.
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

// Take the hello in `head`; return false if it is none.
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
    for (size_t i = 0; i < TICKET_BYTES; i++) // in a time that tells nothing
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
    tell_change();
    return true;
}

void Connections::attach(Stream *s) {
    Peer &p = *peers_[s->peer];
    {
        std::lock_guard<std::mutex> hold(p.lock);
        if (p.broken)
            return;
        p.streams.push_back(s);
        if (p.streams.size() == 2) // from now on none takes more than is about to leave: others may be quicker
            set_option(p.streams[0]->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 2 * WINDOW);
        if (p.streams.size() >= 2)
            set_option(s->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, 2 * WINDOW);
        p.reached = true;
        pump(p, BUDGET);
    }
    tell_change();
}

// -- the thread ------------------------------------------------------------------------------------------------------

// Until the tickets are known, close the oldest connections that the system has queued whenever its queue is half full.
void Connections::shorten_queue() {
    tcp_info info; // of a listener: connections in the queue, and how many it holds
    while (!stop_ && !joining_) {
        pollfd woken = {wake_, POLLIN, 0};
        poll(&woken, 1, QUEUE_TICK);
        uint32_t surplus = 0;
        if (info_of(listener_->fd, &info) && info.tcpi_unacked > info.tcpi_sacked / 2)
            surplus = info.tcpi_unacked - info.tcpi_sacked / 4;
        for (; surplus > 0; surplus--)
            close_file(accept_one());
    }
}

int Connections::accept_one() {
    return open_file([&] { return accept4(listener_->fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
}

void Connections::run() {
    shorten_queue();
    if (stop_)
        return;
    close_listener_if_done();
    for (int rank = 0; rank < rank_; rank++)
        connect_to(rank, 0);
    std::vector<epoll_event> events(64);
    while (!stop_) {
        int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), tick());
        for (int i = 0; i < count; i++) {
            eventfd_t nothing;
            Stream *s = static_cast<Stream *>(events[i].data.ptr);
            if (!s)
                eventfd_read(wake_, &nothing);
            else if (s->fd >= 0)
                handle(s, events[i].events);
        }
        tend();
    }
}

// Return the milliseconds after which `tend` has something to do; -1: never.
int Connections::tick() const {
    if (retrying_ || listen_again_at_ < NEVER)
        return 5;
    return strangers_.empty() && close_listener_at_ == NEVER ? -1 : 1000;
}

// Do what is due by now, and forget streams that are closed.
void Connections::tend() {
    if (!listener_ && !retrying_ && !dropped_)
        return;
    double time = now();
    while (!strangers_.empty() && time > strangers_.front()->deadline)
        drop(strangers_.front());
    if (time > close_listener_at_)
        close_listener();
    if (time > listen_again_at_) {
        listen_again_at_ = NEVER;
        watch(listener_, false);
    }
    if (retrying_) {
        retrying_ = false;
        for (auto &s : streams_) {
            if (s->retry_at && time >= s->retry_at)
                open_connection(s.get());
            retrying_ = retrying_ || s->retry_at;
        }
    }
    if (dropped_)
        streams_.erase(std::remove_if(streams_.begin(), streams_.end(), [](auto &s) { return s->dropped; }),
                       streams_.end());
    dropped_ = false;
}

void Connections::handle(Stream *s, uint32_t events) {
    if (s == listener_)
        return accept();
    if (s->connecting)
        return connected(s);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_from(s);
    if (s->fd >= 0 && events & EPOLLOUT && s->peer >= 0) {
        Peer &p = *peers_[s->peer];
        std::lock_guard<std::mutex> hold(p.lock);
        s->full = false;
        pump(p, BUDGET);
        if (!s->full)
            watch(s, false);
    }
}

void Connections::accept() {
    for (int i = 0; i < ACCEPTED_AT_ONCE && listener_; i++) {
        int fd = accept_one();
        bool no_files = fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM);
        if (no_files && strangers_.empty()) { // others may close some
            epoll_event nothing = {0, {listener_}};
            epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_->fd, &nothing);
            listen_again_at_ = now() + NO_FILES;
            return;
        }
        if (no_files || (fd >= 0 && strangers_.size() == MAX_STRANGERS))
            turn_away_oldest();
        if (no_files)
            continue;
        if (fd < 0)
            return;
        if (!listener_) // the oldest has made all connections complete
            return close_file(fd);
        Stream *s = add();
        if (!start_watching(s, fd, EPOLLIN)) {
            drop(s);
            continue;
        }
        s->deadline = now() + HELLO_TIME;
        strangers_.push_back(s);
        read_from(s); // in most cases the hello is there
    }
}

void Connections::turn_away_oldest() {
    Stream *oldest = strangers_.front();
    read_from(oldest); // its hello may have come just now
    if (!oldest->greeted)
        drop(oldest);
}

// Close the listener when all higher ranks have made all their connections. A rank may fail to make one but the first:
// it is not waited for.
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

void Connections::read_from(Stream *s) {
    for (size_t taken = 0; taken < BUDGET;) {
        bool direct = s->left >= BUFFER / 4; // into its place, if there is much
        ssize_t got = recv(s->fd, direct ? s->to : buffer_.data(), direct ? s->left : BUFFER, MSG_DONTWAIT);
        if (got <= 0) {
            if (got < 0 && (errno == EAGAIN || errno == EINTR))
                return;
            return end_of(s, got < 0 ? errno : 0);
        }
        taken += got;
        if (s->peer >= 0)
            peers_[s->peer]->received += got;
        if (direct) {
            s->to += got, s->left -= got;
            if (s->left == 0)
                end_piece(s);
        } else if (!take_bytes(s, buffer_.data(), got)) {
            return;
        }
        if (!direct && static_cast<size_t>(got) < BUFFER)
            return; // there is no more now
    }
}

// Take what has been read; return false if the stream is of no use any more.
bool Connections::take_bytes(Stream *s, const char *data, size_t nbytes) {
    while (nbytes) {
        size_t take;
        if (s->left) {
            take = std::min(nbytes, s->left);
            std::memcpy(s->to, data, take);
            s->to += take, s->left -= take;
            if (s->left == 0)
                end_piece(s);
        } else {
            bool is_hello = !s->greeted;
            size_t size = is_hello ? sizeof(Hello) : sizeof(Frame);
            take = std::min(nbytes, size - s->have);
            std::memcpy(s->head + s->have, data, take);
            if ((s->have += take) == size) {
                s->have = 0;
                if (!(is_hello ? take_hello(s) : take_header(s))) {
                    if (s->fd >= 0)
                        s->peer >= 0 ? end_of(s, EPROTO) : drop(s);
                    return false;
                }
            }
            if (is_hello && s->peer >= 0 && !s->outgoing) // who it is was not known yet
                peers_[s->peer]->received += nbytes;
        }
        data += take, nbytes -= take;
    }
    return true;
}

bool Connections::take_header(Stream *s) {
    std::memcpy(&s->frame, s->head, sizeof(Frame));
    std::string fault;
    try {
        fault = peers_[s->peer]->assembly.begin(s->frame, &s->to);
    } catch (const std::bad_alloc &) {
        fault = described(s->frame) + ", for which there is no memory";
    }
    if (!fault.empty()) {
        lose(s->peer, UNREADABLE, fault);
        return false;
    }
    s->heard_goodbye = s->heard_goodbye || s->frame.kind == GOODBYE;
    s->left = s->frame.length;
    if (s->left == 0)
        end_piece(s);
    return true;
}

void Connections::end_piece(Stream *s) {
    peers_[s->peer]->assembly.end(s->frame, [&](const Message &message) {
        Completion completion;
        completion.kind = message.kind, completion.rank = s->peer, completion.message = message;
        push(std::move(completion));
    });
}

// The stream has ended; `error`: 0 if the peer has closed it.
void Connections::end_of(Stream *s, int error) {
    int rank = s->peer;
    if (rank < 0 || peers_[rank]->lost || peers_[rank]->assembly.is_complete())
        return drop(s);
    if (s->outgoing && !s->greeted)
        return unconnected(s, error);
    if (s->heard_goodbye) { // nothing is lost by it, and more may come on others
        drop(s);
        if (has_streams(rank))
            return;
    }
    lose(rank, DISCONNECTED, error ? text_of(error) : "connection closed by the other end");
}

bool Connections::has_streams(int rank) {
    return std::any_of(streams_.begin(), streams_.end(),
                       [&](auto &s) { return s->peer == rank && s->fd >= 0 && !s->connecting; });
}

void Connections::drop(Stream *s) {
    if (s->dropped)
        return;
    s->dropped = dropped_ = true;
    s->retry_at = 0;
    if (s->peer < 0) {
        strangers_.erase(std::remove(strangers_.begin(), strangers_.end(), s), strangers_.end());
        return close_stream(s);
    }
    {
        Peer &p = *peers_[s->peer];
        std::lock_guard<std::mutex> hold(p.lock);
        p.streams.erase(std::remove(p.streams.begin(), p.streams.end(), s), p.streams.end());
        p.broken = p.broken || (p.reached && (p.streams.empty() || s->message));
        s->message = nullptr;
        close_stream(s);
    }
    tell_change();
}

void Connections::lose(int rank, int kind, const std::string &why) {
    Peer &p = *peers_[rank];
    if (p.lost)
        return;
    p.lost = true;
    for (auto &s : streams_)
        if (s->peer == rank)
            drop(s.get());
    p.assembly.clear();
    {
        std::lock_guard<std::mutex> hold(p.lock);
        p.broken = true;
        p.queue.clear();
        if (!p.reached)
            p.failure = why;
    }
    Completion completion;
    completion.kind = kind, completion.rank = rank, completion.text = why;
    push(std::move(completion));
    close_listener_if_done();
    tell_change();
}

// -- the end ---------------------------------------------------------------------------------------------------------

void Connections::close(double seconds) {
    double limit = now() + PATIENCE * seconds;
    if (thread_) {
        say_goodbye();
        auto is_out = [](Peer &p) {
            std::lock_guard<std::mutex> hold(p.lock);
            return p.broken || std::all_of(p.streams.begin(), p.streams.end(),
                                           [](Stream *s) {
                                               bool unanswered = s->outgoing && !s->greeted; // may have to be repeated
                                               return s->said_goodbye && !s->message && !unanswered;
                                           });
        };
        auto all_out = [&] { return std::all_of(peers_.begin(), peers_.end(), [&](auto &p) { return is_out(*p); }); };
        auto written = [&] {
            uint64_t bytes = 0;
            for (auto &p : peers_)
                bytes += p->sent;
            return bytes;
        };
        uint64_t before;
        do {
            before = written();
            wait_for(seconds, all_out);
        } while (!all_out() && !lends() && written() != before && now() < limit);
        stop_ = true;
        eventfd_write(wake_, 1);
        thread_->join();
        thread_.reset();
        part(seconds, limit);
    }
    for (auto &peer : peers_) {
        std::lock_guard<std::mutex> hold(peer->lock);
        peer->broken = true, peer->streams.clear(), peer->queue.clear();
    }
    for (auto &s : streams_)
        if (s->fd >= 0)
            close_stream(s.get());
    streams_.clear();
    strangers_.clear();
    listener_ = nullptr;
}

void Connections::say_goodbye() {
    closing_ = true;
    for (auto &peer : peers_) {
        auto message = std::make_shared<Outgoing>();
        std::lock_guard<std::mutex> hold(peer->lock);
        message->next = {FRAME_MAGIC, GOODBYE, 0, peer->sequence, 0, 0, 1, 0};
        peer->queue.push_back(message);
        peer->sequence++;
        pump(*peer, BUDGET);
    }
}

// Whether some of what is to be written is in the memory of callers.
bool Connections::lends() {
    return std::any_of(peers_.begin(), peers_.end(), [](auto &p) {
        std::lock_guard<std::mutex> hold(p->lock);
        auto is_lent = [](auto &message) { return message && message->request; };
        return !p->broken && (std::any_of(p->queue.begin(), p->queue.end(), is_lent) ||
                              std::any_of(p->streams.begin(), p->streams.end(),
                                          [&](Stream *s) { return is_lent(s->message); }));
    });
}

// Wait until the peers have what was written, as `close` says. The thread has ended. What comes meanwhile is read, and
// is nobody's: to bytes for a closed connection the system answers by forgetting what it was still to send.
void Connections::part(double seconds, double limit) {
    for (auto &s : streams_) {
        if (s->peer < 0 || s->connecting || s->fd < 0)
            continue;
        if (s->outgoing && s->index > 0 && !s->greeted) // the peer may have heard the hello: it hears a goodbye, too
            attach(s.get());
        shutdown(s->fd, SHUT_WR);
    }
    double deadline = now() + seconds, nap = 1e-4;
    for (int64_t fewest = INT64_MAX;; nap = std::min(1.5 * nap, 5e-3)) {
        int64_t left = 0;
        for (auto &s : streams_) {
            if (s->peer < 0 || s->connecting || s->fd < 0)
                continue;
            left += unacknowledged(s->fd);
            for (size_t taken = 0; taken < BUDGET;) {
                ssize_t got = recv(s->fd, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
                if (got <= 0)
                    break;
                taken += got;
            }
        }
        if (left < fewest)
            fewest = left, deadline = now() + seconds;
        if (left == 0 || now() >= std::min(deadline, limit))
            return;
        std::this_thread::sleep_for(std::chrono::duration<double>(nap));
    }
}

} // namespace sparsecomm
