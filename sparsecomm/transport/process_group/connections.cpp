// Connections in general: the thread, reading, and closing. joining.cpp makes connections; sending.cpp writes to them.
#include "connections.hpp"
#include "sockets.hpp"

#include <algorithm>
#include <csignal>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>

namespace sparsecomm {
namespace {

constexpr size_t BUFFER = 1 << 18; // bytes read at once
constexpr double PATIENCE = 60;    // `close(seconds)` takes at most PATIENCE * seconds, even if peers still receive

} // namespace

// -- set-up -----------------------------------------------------------------------------------------------------------

Connections::Connections(int rank, int size, size_t limit, int streams)
    : rank_(rank), size_(size), limit_(std::clamp<size_t>(limit, MIN_PIECE, UINT32_MAX)), wanted_streams_(streams) {
    for (int i = 0; i < size; i++)
        peers_.push_back(std::make_unique<Peer>());
    if (size == 1)
        return;
    try {
        auto event_file = [] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); };
        epoll_ = open_or_throw("epoll_create1", [] { return epoll_create1(EPOLL_CLOEXEC); });
        wake_up_ = open_or_throw("eventfd", event_file);
        completion_event_ = open_or_throw("eventfd", event_file);
        epoll_event event = {EPOLLIN, {nullptr}};
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_up_, &event))
            throw_errno("epoll_ctl");
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
    for (int fd : {completion_event_, wake_up_, epoll_})
        close_file(fd);
}

void Connections::start_thread() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // the thread receives no signals
    std::atomic<int> id{0};
    buffer_.resize(BUFFER);
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

// Wait up to `seconds` until `done()`, which is called after every change.
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

void Connections::notify_change() {
    std::lock_guard<std::mutex> hold(changes_lock_);
    changes_++;
    changed_.notify_all();
}

Stream *Connections::add() {
    streams_.push_back(std::make_unique<Stream>());
    return streams_.back().get();
}

// Give the stream the socket `fd` and wait for its events. Return false and set errno if `fd` is -1 or this fails.
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

// A forked process may briefly hold the socket, too: without EPOLL_CTL_DEL, its events would continue.
void Connections::close_stream(Stream *s) {
    epoll_ctl(epoll_, EPOLL_CTL_DEL, s->fd, nullptr);
    close_file(s->fd);
    s->fd = -1;
}

void Connections::configure(int fd) const {
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    // Detect a dead host even while nothing is sent: probe it once a minute.
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 60);
    set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
    set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::clamp(1e3 * silence_, 1e3, 2e9)));
}

// -- the thread -------------------------------------------------------------------------------------------------------

void Connections::run() {
    trim_accept_queue();
    if (stop_)
        return;
    close_listener_if_done();
    for (int rank = 0; rank < rank_; rank++)
        connect_to(rank, 0);
    std::vector<epoll_event> events(64);
    while (!stop_) {
        int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), poll_timeout());
        for (int i = 0; i < count; i++) {
            eventfd_t nothing;
            Stream *s = static_cast<Stream *>(events[i].data.ptr);
            if (!s)
                eventfd_read(wake_up_, &nothing);
            else if (s->fd >= 0)
                handle_events(s, events[i].events);
        }
        do_due_work();
    }
}

// Return the milliseconds until `do_due_work` may have something to do; -1: never.
int Connections::poll_timeout() const {
    if (retrying_ || listen_again_at_ < NEVER)
        return 5;
    return strangers_.empty() && close_listener_at_ == NEVER ? -1 : 1000;
}

// Handle expired deadlines and due attempts, and delete dropped streams.
void Connections::do_due_work() {
    if (!listener_ && !retrying_ && !dropped_)
        return;
    double time = now();
    while (!strangers_.empty() && time > strangers_.front()->deadline)
        drop(strangers_.front());
    if (time > close_listener_at_)
        close_listener();
    if (time > listen_again_at_) {
        listen_again_at_ = NEVER;
        set_events(listener_, false);
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

void Connections::handle_events(Stream *s, uint32_t events) {
    if (s == listener_)
        return accept();
    if (s->connecting)
        return connect_finished(s);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR))
        read_from(s);
    if (s->fd >= 0 && events & EPOLLOUT && s->peer >= 0) {
        Peer &p = *peers_[s->peer];
        std::lock_guard<std::mutex> hold(p.lock);
        s->full = false;
        pump(p, BUDGET);
        if (!s->full)
            set_events(s, false);
    }
}

// -- reading ----------------------------------------------------------------------------------------------------------

void Connections::read_from(Stream *s) {
    for (size_t taken = 0; taken < BUDGET;) {
        bool direct = s->left >= BUFFER / 4; // a long piece is read to its destination
        ssize_t got = recv(s->fd, direct ? s->to : buffer_.data(), direct ? s->left : BUFFER, MSG_DONTWAIT);
        if (got <= 0) {
            if (got < 0 && (errno == EAGAIN || errno == EINTR))
                return;
            return stream_ended(s, got < 0 ? errno : 0);
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
            return; // nothing more has arrived
    }
}

// Return false if the stream was closed.
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
                        s->peer >= 0 ? stream_ended(s, EPROTO) : drop(s);
                    return false;
                }
            }
            if (is_hello && s->peer >= 0 && !s->outgoing) // the peer was not known before
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
        fault = describe(s->frame) + ", for which there is no memory";
    }
    if (!fault.empty()) {
        lose_peer(s->peer, UNREADABLE, fault);
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
        push({message.kind, s->peer, message, 0, ""});
    });
}

// Handle the end of a stream; `error` is 0 if the peer has closed it.
void Connections::stream_ended(Stream *s, int error) {
    int rank = s->peer;
    if (rank < 0 || peers_[rank]->lost || peers_[rank]->assembly.is_complete())
        return drop(s);
    if (s->waits_for_greeting())
        return connect_failed(s, error);
    if (s->heard_goodbye) { // nothing is lost, and other streams may still bring messages
        drop(s);
        if (std::any_of(streams_.begin(), streams_.end(),
                        [&](auto &other) { return other->peer == rank && other->fd >= 0 && !other->connecting; }))
            return;
    }
    lose_peer(rank, DISCONNECTED, error ? error_text(error) : "connection closed by the other end");
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
    notify_change();
}

void Connections::lose_peer(int rank, int kind, const std::string &why) {
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
    push({kind, rank, {}, 0, why});
    close_listener_if_done();
    notify_change();
}

// -- closing ----------------------------------------------------------------------------------------------------------

void Connections::close(double seconds) {
    double limit = now() + PATIENCE * seconds;
    if (thread_) {
        say_goodbye();
        auto is_out = [](Peer &p) {
            std::lock_guard<std::mutex> hold(p.lock);
            auto is_done = [](Stream *s) { return s->said_goodbye && !s->message && !s->waits_for_greeting(); };
            return p.broken || std::all_of(p.streams.begin(), p.streams.end(), is_done);
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
        } while (!all_out() && !borrows_memory() && written() != before && now() < limit);
        stop_ = true;
        eventfd_write(wake_up_, 1);
        thread_->join();
        thread_.reset();
        await_acknowledgements(seconds, limit);
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

// Return whether bytes still to be written are in the memory of callers.
bool Connections::borrows_memory() {
    return std::any_of(peers_.begin(), peers_.end(), [](auto &p) {
        std::lock_guard<std::mutex> hold(p->lock);
        auto is_lent = [](auto &message) { return message && message->request; };
        return !p->broken && (std::any_of(p->queue.begin(), p->queue.end(), is_lent) ||
                              std::any_of(p->streams.begin(), p->streams.end(),
                                          [&](Stream *s) { return is_lent(s->message); }));
    });
}

// After the end of the thread, wait until the peers have acknowledged everything, as `close` describes. Read and
// discard bytes that arrive: if they reached a closed connection, the system would discard unsent bytes.
void Connections::await_acknowledgements(double seconds, double limit) {
    for (auto &s : streams_) {
        if (s->peer < 0 || s->connecting || s->fd < 0)
            continue;
        if (s->index > 0 && s->waits_for_greeting()) // the peer may have read the hello: send it a goodbye, too
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
