// Connections as they are made, read from, and closed. What is sent on them is in sending.cpp.
#include "connections.hpp"
#include "sockets.hpp"

#include <algorithm>
#include <csignal>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

namespace sparsecomm {
namespace {

constexpr size_t BUFFER = 1 << 18;            // bytes read at once
constexpr int MAX_STREAMS = 48;               // to a peer
constexpr int MAX_SOCKETS = 256;              // of extra connections, to all peers
constexpr double STREAM_PER_SECONDS = 1.5e-3; // of round trip
constexpr double LAN = 1e-3;                  // a round trip of less needs one connection
constexpr double HELLO_TIME = 30;             // seconds that a stranger has to say hello
constexpr size_t MAX_STRANGERS = 1024;
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

int Connections::listen(const std::string &address, const std::string &token) {
    sockaddr_storage where;
    socklen_t size = resolve(address, 0, &where);
    int fd = open_socket(where.ss_family);
    if (fd < 0 || (listener_ = add(fd, EPOLLIN)) == nullptr)
        fail("socket");
    token_ = token;
    if (bind(fd, reinterpret_cast<sockaddr *>(&where), size) || ::listen(fd, 4096) ||
        getsockname(fd, reinterpret_cast<sockaddr *>(&where), &size))
        fail(("listen on " + address).c_str());
    return ntohs(where.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6 *>(&where)->sin6_port
                                             : reinterpret_cast<sockaddr_in *>(&where)->sin_port);
}

void Connections::set_peer(int rank, const std::string &address, int port, const std::string &token) {
    Peer &p = *peers_.at(rank);
    p.token = token;
    p.address_size = resolve(address, port, &p.address);
}

void Connections::start(double seconds) {
    silent_ = seconds;
    buffer_.resize(BUFFER);
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

// Wait for events of a socket; return its stream, or nullptr, with errno, if the system cannot: then it is closed.
Stream *Connections::add(int fd, uint32_t events) {
    auto s = std::make_unique<Stream>();
    s->fd = fd;
    epoll_event event = {events, {s.get()}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event)) {
        int error = errno;
        close_file(fd);
        errno = error;
        return nullptr;
    }
    streams_.push_back(std::move(s));
    return streams_.back().get();
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
    Peer &p = *peers_[rank];
    int fd = open_socket(p.address.ss_family);
    Stream *s = fd < 0 ? nullptr : add(fd, EPOLLOUT);
    int error = s ? 0 : errno;
    if (s) {
        s->peer = rank, s->index = index, s->connecting = s->outgoing = true;
        configure(fd);
        error = ::connect(fd, reinterpret_cast<sockaddr *>(&p.address), p.address_size) ? errno : 0;
    }
    if (error && error != EINPROGRESS) {
        Stream none;
        none.peer = rank, none.index = index;
        unconnected(s ? s : &none, error);
    }
}

void Connections::unconnected(Stream *s, int error) {
    if (s->index == 0) {
        std::lock_guard<std::mutex> hold(peers_[s->peer]->lock);
        peers_[s->peer]->failure = text_of(error);
    }
    drop(s);
    tell_change();
}

void Connections::connected(Stream *s) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(s->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error || !say_hello(s))
        return unconnected(s, error ? error : ECONNRESET);
    s->connecting = false;
    watch(s, false);
    if (s->index > 0)
        return; // it is used when the peer has said hello: until then the peer may close it, and nothing is lost
    attach(s);
    int count = wanted_streams_;
    tcp_info info;
    if (count == 0 && info_of(s->fd, &info)) {
        double round_trip = 1e-6 * info.tcpi_rtt;
        double more = round_trip < LAN ? 0 : round_trip / STREAM_PER_SECONDS;
        count = static_cast<int>(std::min(1 + more, 1.0 * MAX_STREAMS));
        count = std::min(count, 1 + MAX_SOCKETS / (size_ - 1));
    }
    for (int i = 1; i < count; i++)
        connect_to(s->peer, i);
}

bool Connections::say_hello(Stream *s) {
    Hello hello;
    std::memcpy(hello.magic, HELLO_MAGIC, sizeof hello.magic);
    std::memcpy(hello.token, peers_[s->peer]->token.data(), TOKEN_BYTES);
    hello.rank = rank_, hello.stream = s->index;
    return ::send(s->fd, &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello;
}

// Take the hello in `head`; return false if it is none.
bool Connections::take_hello(Stream *s) {
    Hello hello;
    std::memcpy(&hello, s->head, sizeof hello);
    unsigned difference = 0;
    for (size_t i = 0; i < TOKEN_BYTES; i++)
        difference |= static_cast<unsigned char>(hello.token[i] ^ token_[i]);
    if (difference || std::memcmp(hello.magic, HELLO_MAGIC, sizeof hello.magic))
        return false;
    if (s->outgoing) {
        if (hello.rank != static_cast<uint32_t>(s->peer) || hello.stream != s->index)
            return false;
    } else if (hello.rank <= static_cast<uint32_t>(rank_) || hello.rank >= static_cast<uint32_t>(size_)) {
        return false;
    }
    if (peers_[hello.rank]->lost)
        return false;
    s->greeted = true;
    if (!s->outgoing) {
        s->peer = hello.rank, s->index = hello.stream;
        if (!say_hello(s))
            return false;
    }
    if (!s->outgoing || s->index > 0)
        attach(s);
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

void Connections::run() {
    for (int rank = 0; rank < rank_; rank++)
        connect_to(rank, 0);
    std::vector<epoll_event> events(64);
    while (!stop_) {
        int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), strangers_ ? 1000 : -1);
        for (int i = 0; i < count; i++)
            if (Stream *s = static_cast<Stream *>(events[i].data.ptr); s && s->fd >= 0)
                handle(s, events[i].events);
        if (strangers_ == 0 && !dropped_)
            continue;
        double time = now();
        strangers_ = 0;
        for (auto &s : streams_) {
            if (s->deadline && !s->greeted && s->fd >= 0)
                time > s->deadline ? drop(s.get()) : void(strangers_++);
        }
        dropped_ = false;
        streams_.erase(std::remove_if(streams_.begin(), streams_.end(), [](auto &s) { return s->fd < 0; }),
                       streams_.end());
    }
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
    int fd = open_file([&] { return accept4(listener_->fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); });
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) // others may close some: look again in a moment
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return;
    }
    if (++strangers_ > MAX_STRANGERS)
        return close_file(fd);
    configure(fd);
    if (Stream *s = add(fd, EPOLLIN))
        s->deadline = now() + HELLO_TIME;
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
    if (s->heard_goodbye || (s->index > 0 && !s->greeted)) { // nothing is lost by it, and more may come on others
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
    if (s->fd < 0)
        return;
    dropped_ = true;
    if (s->peer < 0)
        return close_stream(s);
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
                                           [](Stream *s) { return s->said_goodbye && !s->message; });
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
