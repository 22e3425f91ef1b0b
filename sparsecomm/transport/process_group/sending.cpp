// Sending messages over the connections of each peer in turn, and the queue of completions.
#include "connections.hpp"
#include "sockets.hpp"

#include <algorithm>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>

namespace sparsecomm {
namespace {

constexpr size_t COPIED = 1 << 16;       // maximum bytes of a message that is copied if it cannot be written at once
constexpr uint32_t LONG_PIECE = 1 << 16; // bytes in a piece of a message that fills many windows

} // namespace

Sent Connections::send(int to, int32_t kind, int64_t number, const char *data, size_t nbytes, uint64_t request) {
    Peer &p = *peers_.at(to);
    auto message = std::make_shared<Outgoing>();
    std::lock_guard<std::mutex> hold(p.lock);
    if (p.broken || closing_)
        return Sent::BROKEN;
    uint64_t piece = std::max<uint64_t>(nbytes, 1);
    if (p.streams.size() > 1) // a short message over several connections arrives after one trip
        piece = nbytes > 4 * p.streams.size() * WINDOW ? LONG_PIECE : WINDOW;
    piece = std::min<uint64_t>(piece, limit_);
    uint64_t pieces = std::max<uint64_t>((nbytes + piece - 1) / piece, 1);
    uint32_t length = static_cast<uint32_t>(std::min<uint64_t>(nbytes, piece));
    message->next = {FRAME_MAGIC, kind, number, p.sequence, nbytes, 0, static_cast<uint32_t>(piece), length};
    message->data = data, message->unwritten = pieces;
    if (nbytes <= COPIED)
        message->copy.reset(new char[nbytes]); // here, because nothing may throw once the message is queued
    p.queue.push_back(message);
    p.sequence++;
    pump(p, BUDGET);
    if (message->unwritten == 0)
        return Sent::DONE;
    if (message->copy) {
        std::memcpy(message->copy.get(), data, nbytes);
        message->data = message->copy.get();
        return Sent::DONE;
    }
    message->request = request;
    return Sent::IN_FLIGHT;
}

// -- with the peer's lock held ----------------------------------------------------------------------------------------

// Give the stream the next piece of the queue; return false if there is none.
bool Connections::next_piece(Peer &p, Stream *s) {
    if (s->said_goodbye)
        return false;
    if (p.queue.empty())
        return send_follow_up(p, s);
    s->has_follow_up = false;
    std::shared_ptr<Outgoing> &message = p.queue.front();
    s->message = message, s->header = message->next, s->written = 0;
    if (message->next.kind == GOODBYE) { // goes over each connection, after the messages before it
        s->said_goodbye = true;
        return true;
    }
    Frame &next = message->next;
    next.offset += next.length;
    next.length = static_cast<uint32_t>(std::min<uint64_t>(next.total - next.offset, next.piece));
    if (next.offset == next.total)
        p.queue.pop_front(); // `s` has its last piece
    return true;
}

// Give the stream an empty frame after its last piece if the path is long and loses segments. TCP detects a lost
// segment after one round trip if data follows it, otherwise by a timer after two or more (RFC 8985, Section 7).
bool Connections::send_follow_up(Peer &p, Stream *s) {
    if (s->has_follow_up || p.streams.size() == 1)
        return false;
    s->has_follow_up = true;
    tcp_info info;
    if (!p.lossy && get_tcp_info(s->fd, &info))
        p.lossy = info.tcpi_total_retrans > 0;
    if (!p.lossy)
        return false;
    s->message = p.nothing, s->header = {FRAME_MAGIC, NOTHING, 0, 0, 0, 0, 1, 0}, s->written = 0;
    return true;
}

// Write as much of the stream's piece as the system accepts; return the bytes, or -1 with errno. Before the peer has
// answered the hello, write at most WINDOW bytes, and store them for another attempt.
ssize_t Connections::write(Peer &p, Stream *s) {
    bool may_repeat = s->waits_for_greeting();
    size_t room = may_repeat ? WINDOW - s->unanswered.size() : std::numeric_limits<size_t>::max();
    if (room == 0) {
        errno = EAGAIN;
        return -1;
    }
    size_t length = s->header.length, done = s->written > sizeof(Frame) ? s->written - sizeof(Frame) : 0;
    size_t of_header = std::min(s->written, sizeof(Frame));
    iovec parts[2] = {{reinterpret_cast<char *>(&s->header) + of_header, sizeof(Frame) - of_header},
                      {const_cast<char *>(s->message->data) + s->header.offset + done, length - done}};
    parts[0].iov_len = std::min(parts[0].iov_len, room);
    parts[1].iov_len = std::min(parts[1].iov_len, room - parts[0].iov_len);
    msghdr what = {};
    what.msg_iov = parts, what.msg_iovlen = length > done ? 2 : 1;
    ssize_t written = sendmsg(s->fd, &what, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (written <= 0)
        return written;
    if (may_repeat) {
        size_t from_header = std::min<size_t>(written, parts[0].iov_len);
        s->unanswered.append(static_cast<char *>(parts[0].iov_base), from_header);
        s->unanswered.append(static_cast<char *>(parts[1].iov_base), written - from_header);
    }
    s->written += written;
    p.sent += written;
    if (s->written == sizeof(Frame) + length) {
        std::shared_ptr<Outgoing> message = std::move(s->message);
        if (--message->unwritten == 0 && message->request)
            push({SENT, s->peer, {}, message->request, ""});
    }
    return written;
}

// Write as much as the system accepts to all streams in turn, up to about `budget` bytes.
void Connections::pump(Peer &p, size_t budget) {
    size_t taken = 0, idle = 0, count = p.streams.size();
    while (idle < count && !p.broken) {
        Stream *s = p.streams[p.turn++ % count];
        if (s->full || (!s->message && !next_piece(p, s))) {
            idle++;
            continue;
        }
        ssize_t written = write(p, s);
        if (written < 0 && (errno == ECONNRESET || errno == EPIPE) && s->waits_for_greeting()) {
            s->full = true; // the thread notices this when reading, and connects again
            idle++;
        } else if (written < 0 && errno != EAGAIN && errno != EINTR) { // the thread reads the rest, then the reason
            shutdown(s->fd, SHUT_RDWR);
            p.broken = true;
            p.queue.clear();
        } else if (written <= 0 || s->message || (taken += written) > budget) {
            s->full = true;
            set_events(s, !s->waits_for_greeting() || s->unanswered.size() < WINDOW);
            taken = 0;
            idle++;
        } else {
            idle = 0;
        }
    }
    if (closing_ && (p.broken || p.queue.empty() || p.queue.front()->next.kind == GOODBYE))
        notify_change();
}

void Connections::set_events(Stream *s, bool writing) {
    epoll_event event = {writing ? EPOLLIN | EPOLLOUT : EPOLLIN, {s}};
    epoll_ctl(epoll_, EPOLL_CTL_MOD, s->fd, &event);
}

// -- completions -----------------------------------------------------------------------------------------------------

void Connections::push(Completion completion) {
    bool wake;
    {
        std::lock_guard<std::mutex> hold(inbox_lock_);
        inbox_.push_back(std::move(completion));
        wake = waiting_;
        waiting_ = false;
    }
    if (wake)
        eventfd_write(completion_event_, 1);
}

bool Connections::next(double seconds, Completion *to) {
    for (bool again : {true, false}) {
        {
            std::lock_guard<std::mutex> hold(inbox_lock_);
            waiting_ = false;
            if (!inbox_.empty()) {
                *to = std::move(inbox_.front());
                inbox_.pop_front();
                return true;
            }
            if (seconds <= 0 || !again || completion_event_ < 0)
                return false;
            waiting_ = true;
        }
        pollfd ready = {completion_event_, POLLIN, 0};
        timespec time = {static_cast<time_t>(std::min(seconds, 1e8)), 0};
        time.tv_nsec = static_cast<long>(1e9 * (std::min(seconds, 1e8) - time.tv_sec));
        if (ppoll(&ready, 1, &time, nullptr) > 0) {
            eventfd_t count;
            eventfd_read(completion_event_, &count);
        }
    }
    return false;
}

size_t Connections::pending() {
    std::lock_guard<std::mutex> hold(inbox_lock_);
    return inbox_.size();
}

Traffic Connections::traffic(int rank) {
    Peer &p = *peers_.at(rank);
    Traffic found;
    std::lock_guard<std::mutex> hold(p.lock);
    found.sent = p.sent, found.received = p.received;
    for (Stream *s : p.streams) {
        tcp_info info;
        if (!get_tcp_info(s->fd, &info))
            continue;
        double round_trip = 1e-6 * (info.tcpi_min_rtt && info.tcpi_min_rtt != ~0u ? info.tcpi_min_rtt : info.tcpi_rtt);
        found.round_trip = found.connections++ ? std::min(found.round_trip, round_trip) : round_trip;
        found.retransmits += info.tcpi_total_retrans;
        found.seconds = std::max(found.seconds, 1e-6 * info.tcpi_busy_time);
    }
    return found;
}

} // namespace sparsecomm
