// Carry Ethernet frames between links that have a rate, a delay, loss and a queue each way.
//
// Usage: relay RATE RTT JITTER LOSS QUEUE STALL EVERY SEED LINK...      bits per second, 0 to 1, else nanoseconds
//   LINK = PID:DEVICE:HOST[,HOST...]   a TAP device of this name in the network namespace of process PID; the hosts
//                                      with these numbers are behind it. "=" before it: a link without limits
// The last byte of a frame's hardware address is the number of its host. Frames to unknown numbers are dropped.
//
//   host -> TAP -> up queue -> wire: RTT/2 +- jitter -> down queue -> TAP -> host
//                  (sender's)  loss                     (receiver's)
//
// A queue is drained at the rate, and drops packets that would wait longer than QUEUE. A link stalls for STALL, after
// EVERY on average.
//
// A frame of the kernel may be a train of up to 64 KB of TCP (virtio-net's offload), so that the relay copies once for
// 44 packets of the wire. Each packet of a train takes its time on the link, and is lost or dropped by itself. A train
// is cut where a packet is missing.
//
// Time is virtual: each frame carries the time at which it is due, and the relay counts how late it delivers frames. It
// answers a line on standard input with a line of JSON with all counters, and ends when standard input ends.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

using Nanoseconds = int64_t;
constexpr Nanoseconds NEVER = INT64_MAX;

struct Virtio {  // struct Virtio of <linux/virtio_net.h>, which is not C++
    uint8_t flags, gso_type;
    uint16_t hdr_len, gso_size, csum_start, csum_offset;
};
constexpr uint8_t GSO_NONE = 0, GSO_TCPV4 = 1, GSO_ECN = 0x80;

constexpr uint32_t VIRTIO = sizeof(Virtio), ETHERNET = 14, LONGEST = VIRTIO + ETHERNET + 65536;
constexpr uint64_t COMMANDS = ~0ull;  // epoll's mark of standard input

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "relay: %s: %s\n", what.c_str(), std::strerror(errno));
    std::exit(1);
}

Nanoseconds now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

// ------------------------------------------------------------------------------------------------------------- frames

struct Frame {
    Frame* next;
    Nanoseconds due;   // on the wire: arrival of its last bit at the receiver's link; behind the wire: its delivery
    uint32_t length;   // bytes that follow: virtio's header, and the frame
    uint32_t packets;  // 1, or the number of packets of a train
    uint32_t wire;     // bytes on the link, with the headers of every packet
    uint8_t to;        // the receiver's link
    uint8_t size_class;
    uint8_t* bytes() { return reinterpret_cast<uint8_t*>(this + 1); }
    Virtio* header() { return reinterpret_cast<Virtio*>(bytes()); }
    uint8_t* ethernet() { return bytes() + VIRTIO; }
};

// Unused frames by powers of two, so that nothing is allocated once the queues have been full.
class Pool {
  public:
    Frame* take(uint32_t length) {
        const int size_class = class_of(length);
        Frame* frame = free_[size_class];
        if (frame) {
            free_[size_class] = frame->next;
        } else {
            frame = static_cast<Frame*>(std::malloc(sizeof(Frame) + (256u << size_class)));
            if (!frame) fail("memory");
        }
        frame->size_class = static_cast<uint8_t>(size_class);
        return frame;
    }
    void give(Frame* frame) {
        frame->next = free_[frame->size_class];
        free_[frame->size_class] = frame;
    }
    // Frames are read into the largest size. Move a frame to a smaller size, unless it fills half of the largest.
    Frame* fitted(Frame* frame) {
        if (2 * frame->length > (256u << frame->size_class)) return frame;
        Frame* small = take(frame->length);
        const uint8_t size_class = small->size_class;
        std::memcpy(small, frame, sizeof(Frame) + frame->length);
        small->size_class = size_class;
        give(frame);
        return small;
    }

  private:
    static int class_of(uint32_t length) {
        int size_class = 0;
        while ((256u << size_class) < length) size_class++;
        return size_class;
    }
    Frame* free_[12] = {};
};

struct Queue {
    Frame *first = nullptr, *last = nullptr;
    void push(Frame* frame) {
        frame->next = nullptr;
        (first ? last->next : first) = frame;
        last = frame;
    }
    Frame* pop() {
        Frame* frame = first;
        first = frame->next;
        return frame;
    }
};

uint16_t read16(const uint8_t* at) { return static_cast<uint16_t>(at[0] << 8 | at[1]); }
void write16(uint8_t* at, uint32_t value) {
    at[0] = static_cast<uint8_t>(value >> 8);
    at[1] = static_cast<uint8_t>(value);
}
uint32_t read32(const uint8_t* at) { return static_cast<uint32_t>(read16(at)) << 16 | read16(at + 2); }
void write32(uint8_t* at, uint32_t value) { write16(at, value >> 16), write16(at + 2, value); }

uint32_t ones_sum(const uint8_t* at, int bytes, uint32_t sum) {
    for (int i = 0; i < bytes; i += 2) sum += read16(at + i);
    while (sum >> 16) sum = (sum & 0xffff) + (sum >> 16);
    return sum;
}

// Offsets of the parts of a train, in bytes from the beginning of the Ethernet frame.
struct Train {
    uint32_t ip, tcp, payload, payload_length, segment;
};

bool is_train(Frame* frame, Train* train) {
    const Virtio* header = frame->header();
    if ((header->gso_type & ~GSO_ECN) != GSO_TCPV4 || !header->gso_size) return false;
    const uint32_t length = frame->length - VIRTIO;
    const uint8_t* bytes = frame->ethernet();
    train->ip = ETHERNET;
    train->tcp = train->ip + 4u * (bytes[train->ip] & 15);
    if (train->tcp + 20 > length) return false;
    train->payload = train->tcp + 4u * (bytes[train->tcp + 12] >> 4);
    if (train->payload >= length) return false;
    train->payload_length = length - train->payload;
    train->segment = header->gso_size;
    return true;
}

// Return packets `begin` to `end` of a train of `packets` as a new frame.
Frame* cut(Pool& pool, Frame* frame, const Train& train, uint32_t begin, uint32_t end, uint32_t packets) {
    const uint32_t from = begin * train.segment, to = std::min(train.payload_length, end * train.segment);
    const uint32_t length = VIRTIO + train.payload + to - from;
    Frame* part = pool.take(length);
    const uint8_t size_class = part->size_class;
    std::memcpy(part, frame, sizeof(Frame) + VIRTIO + train.payload);
    part->size_class = size_class;
    part->length = length;
    part->packets = end - begin;
    std::memcpy(part->ethernet() + train.payload, frame->ethernet() + train.payload + from, to - from);

    uint8_t *ip = part->ethernet() + train.ip, *tcp = part->ethernet() + train.tcp;
    if (part->packets == 1) part->header()->gso_type = GSO_NONE, part->header()->gso_size = 0;
    const uint32_t tcp_length = train.payload - train.tcp + to - from;
    write16(ip + 2, train.tcp - train.ip + tcp_length);
    write16(ip + 4, read16(ip + 4) + begin);
    write16(ip + 10, 0);
    write16(ip + 10, ~ones_sum(ip, static_cast<int>(train.tcp - train.ip), 0));
    write32(tcp + 4, read32(tcp + 4) + from);
    if (begin) tcp[13] &= static_cast<uint8_t>(~0x80);        // CWR belongs to the first
    if (end < packets) tcp[13] &= static_cast<uint8_t>(~0x09);  // FIN and PSH to the last
    write16(tcp + 16, ones_sum(ip + 12, 8, 6 + tcp_length));    // the kernel adds the rest, if it checks the sum
    return part;
}

// -------------------------------------------------------------------------------------------------------------- links

struct Settings {
    double ns_per_byte;
    Nanoseconds delay, jitter, queue, stall;
    double loss, stall_every;
};

struct Link {
    int fd = -1;
    bool limited = true;
    Nanoseconds up_free = 0, down_free = 0;
    Queue wire, down;  // ordered by arrival at the receiver's link, and by delivery
    std::mt19937_64 losses, times;  // two, so that losses do not depend on the duration of a run
    uint64_t until_loss = 0;  // packets that pass before the next lost one
    Nanoseconds last_arrival = 0;
    Nanoseconds stall_at = NEVER;
    // The delay moves linearly from one random value to the next.
    Nanoseconds knot_at = 0, knot_length = 0;
    double knot_from = 0, knot_to = 0;
};

struct Counters {
    uint64_t packets = 0, bytes = 0, lost = 0, dropped_up = 0, dropped_down = 0, refused = 0;
    uint64_t late[24] = {};  // packets delivered less than 2^i us late; the last entry counts all others
};

class Relay {
  public:
    Relay(const Settings& settings, uint64_t seed, std::vector<Link> links, const int (&link_of)[256])
        : settings_(settings), links_(std::move(links)) {
        std::copy(std::begin(link_of), std::end(link_of), link_of_);
        for (size_t i = 0; i < links_.size(); i++) {
            links_[i].losses.seed(2000 * seed + 2 * i);
            links_[i].times.seed(2000 * seed + 2 * i + 1);
            links_[i].until_loss = draw_loss(links_[i]);
            links_[i].knot_at = now();
            if (settings_.stall) links_[i].stall_at = now() + draw_calm(links_[i]);
        }
        // Frames that are read from now on arrive at least this long after they are read, unless there is a stall.
        if (!settings_.stall) lookahead_ = settings_.delay - settings_.jitter;
        // Waking up for each packet costs more than carrying it. While there is traffic, the relay therefore wakes up
        // at regular ticks. It treats frames as if they had arrived half a tick ago, and delivers frames that are due
        // within half a tick. A tick of 1/160 of the round trip does not change what the hosts measure.
        tick_ = std::min<Nanoseconds>(250'000, settings_.delay / 80);
        if (tick_ < 50'000) tick_ = 0;
        lookahead_ -= tick_ / 2;
    }

    [[noreturn]] void run();

  private:
    static double uniform(std::mt19937_64& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

    uint64_t draw_loss(Link& link) {
        if (settings_.loss <= 0) return UINT64_MAX;
        return static_cast<uint64_t>(std::log1p(-uniform(link.losses)) / std::log1p(-settings_.loss));
    }

    Nanoseconds draw_calm(Link& link) {
        return static_cast<Nanoseconds>(-std::log1p(-uniform(link.times)) * settings_.stall_every);
    }

    // A link that stalls is free again when the stall ends.
    void stall(Link& link, Nanoseconds t) {
        while (t >= link.stall_at) {
            const Nanoseconds end = link.stall_at + settings_.stall;
            link.up_free = std::max(link.up_free, end);
            link.down_free = std::max(link.down_free, end);
            link.stall_at = end + draw_calm(link);
        }
    }

    Nanoseconds delay_at(Link& link, Nanoseconds t) {
        if (!settings_.jitter) return settings_.delay;
        // The delay changes by at most 2 x jitter in at least 4 x jitter, so no packet overtakes another one.
        while (t >= link.knot_at + link.knot_length) {
            link.knot_at = std::max(link.knot_at + link.knot_length, t - 4 * settings_.jitter);
            link.knot_length = 4 * settings_.jitter;
            link.knot_from = link.knot_to;
            link.knot_to = (2 * uniform(link.times) - 1) * static_cast<double>(settings_.jitter);
        }
        const double along = static_cast<double>(t - link.knot_at) / static_cast<double>(link.knot_length);
        return settings_.delay + static_cast<Nanoseconds>(link.knot_from + along * (link.knot_to - link.knot_from));
    }

    Nanoseconds time_of(uint32_t bytes) const {
        return static_cast<Nanoseconds>(static_cast<double>(bytes) * settings_.ns_per_byte);
    }

    bool read_one(size_t from, Nanoseconds early);
    void send_up(Link& link, Frame* frame, Nanoseconds t);
    void arrive(Frame* frame);
    Nanoseconds move(Nanoseconds t, Nanoseconds early);
    void deliver(Link& link, Frame* frame);
    void answer();

    Settings settings_;
    std::vector<Link> links_;
    int link_of_[256];
    Nanoseconds lookahead_ = 0, tick_ = 0;
    bool busy_ = false;  // a frame has been read or delivered since the last wait
    Pool pool_;
    Frame* spare_ = nullptr;
    Counters counters_;
};

// Read a frame from the hosts of a link, as if it had arrived `early` ago. Return false if there is none.
bool Relay::read_one(size_t from, Nanoseconds early) {
    Link& link = links_[from];
    if (!spare_) spare_ = pool_.take(LONGEST);
    const ssize_t length = read(link.fd, spare_->bytes(), LONGEST);
    if (length < 0) {
        if (errno == EAGAIN || errno == EINTR) return false;
        fail("read from a TAP device");
    }
    const uint8_t* bytes = spare_->ethernet();
    if (length < ssize_t{VIRTIO + ETHERNET} || bytes[0] & 1) return true;
    const int to = link_of_[bytes[5]];
    if (to < 0 || to == static_cast<int>(from)) return true;
    spare_->length = static_cast<uint32_t>(length);
    spare_->packets = 1;
    spare_->to = static_cast<uint8_t>(to);
    if (!link.limited || !links_[static_cast<size_t>(to)].limited) {
        deliver(links_[static_cast<size_t>(to)], spare_);
        return true;
    }
    Frame* frame = pool_.fitted(std::exchange(spare_, nullptr));
    send_up(link, frame, now() - early);
    busy_ = true;
    return true;
}

// Put a frame on its sender's link, without the packets that the queue drops or the wire loses.
void Relay::send_up(Link& link, Frame* frame, Nanoseconds t) {
    Train train{};
    const bool cuttable = is_train(frame, &train);
    const uint32_t length = frame->length - VIRTIO;
    const uint32_t packets = cuttable ? (train.payload_length + train.segment - 1) / train.segment : 1;
    const uint32_t each = cuttable ? train.payload + train.segment : length;
    stall(link, t);
    link.up_free = std::max(link.up_free, t);

    uint32_t admitted = packets;
    const Nanoseconds room = t + settings_.queue - link.up_free;
    if (room < 0) {
        admitted = 0;
    } else if (packets > 1) {
        const double fitting = 1 + static_cast<double>(room) / (each * settings_.ns_per_byte);
        admitted = static_cast<uint32_t>(std::min<double>(packets, fitting));
    }
    counters_.dropped_up += packets - admitted;

    bool whole = true;
    for (uint32_t begin = 0; begin < admitted;) {
        const uint32_t passing = static_cast<uint32_t>(std::min<uint64_t>(admitted - begin, link.until_loss));
        const uint32_t end = begin + passing;
        link.until_loss -= passing;
        if (passing) {
            uint32_t wire = each * passing;
            if (cuttable && end == packets) {  // the last packet of a train is shorter
                wire = train.payload * passing + train.payload_length - begin * train.segment;
            }
            Frame* part = frame;
            if (passing < packets) {
                part = cut(pool_, frame, train, begin, end, packets);
            } else {
                whole = false;  // the part before the loss is on its way
            }
            part->packets = passing;
            part->wire = wire;
            link.up_free += time_of(wire);
            part->due = link.last_arrival = std::max(link.last_arrival, link.up_free + delay_at(link, link.up_free));
            link.wire.push(part);
        }
        begin = end;
        if (begin < admitted) {  // the next packet is lost, but takes its time on the link
            link.up_free += time_of(each);
            link.until_loss = draw_loss(link);
            counters_.lost++;
            begin++;
        }
    }
    if (whole) pool_.give(frame);
}

// Schedule the delivery of a frame that has arrived at its receiver's link, or drop it.
void Relay::arrive(Frame* frame) {
    Link& link = links_[frame->to];
    stall(link, frame->due);
    // The packets of a train arrived one after another, at the rate; the last one arrives now.
    const Nanoseconds duration = time_of(frame->wire), packet = duration / frame->packets;
    const Nanoseconds start = std::max(link.down_free, frame->due - duration + packet);
    const Nanoseconds room = frame->due + settings_.queue - start;
    if (room < 0) {
        counters_.dropped_down += frame->packets;
        pool_.give(frame);
        return;
    }
    if (duration > room + packet) {
        Train train{};
        is_train(frame, &train);
        const uint32_t kept = std::max(1u, static_cast<uint32_t>(room / packet));
        if (kept < frame->packets) {
            Frame* part = cut(pool_, frame, train, 0, kept, frame->packets);
            counters_.dropped_down += frame->packets - kept;
            part->wire = frame->wire / frame->packets * kept;
            pool_.give(frame);
            frame = part;
        }
    }
    link.down_free = start + time_of(frame->wire);
    frame->due = std::max(link.down_free, frame->due);
    link.down.push(frame);
}

// Move all frames to where they are at time t, and deliver frames that are due until `early` later. Return when the
// next frame is due.
Nanoseconds Relay::move(Nanoseconds t, Nanoseconds early) {
    Nanoseconds next = NEVER;
    for (;;) {
        Link* first = nullptr;
        for (Link& link : links_) {
            if (link.wire.first && (!first || link.wire.first->due < first->wire.first->due)) first = &link;
        }
        if (!first) break;
        if (first->wire.first->due > t + lookahead_) {
            next = first->wire.first->due - lookahead_;
            break;
        }
        arrive(first->wire.pop());
    }
    for (Link& link : links_) {
        while (link.down.first && link.down.first->due <= t + early) {
            Frame* frame = link.down.pop();
            busy_ = true;
            const Nanoseconds late = now() - frame->due;
            int i = 0;
            while (i < 23 && late >= (1000ll << i)) i++;
            counters_.late[i] += frame->packets;
            counters_.packets += frame->packets;
            counters_.bytes += frame->wire;
            deliver(link, frame);
            pool_.give(frame);
        }
        if (link.down.first) next = std::min(next, link.down.first->due);
    }
    return next;
}

void Relay::deliver(Link& link, Frame* frame) {
    if (write(link.fd, frame->bytes(), frame->length) < 0) counters_.refused += frame->packets;
}

// Answer a line of standard input with the counters since the beginning.
void Relay::answer() {
    char line[256];
    if (read(0, line, sizeof line) <= 0) std::exit(0);
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    const double cpu = static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                       1e-6 * static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
    std::printf("{\"time\": %.6f, \"cpu\": %.6f, \"packets\": %llu, \"bytes\": %llu, \"lost\": %llu, "
                "\"dropped_up\": %llu, \"dropped_down\": %llu, \"refused\": %llu, \"late\": [",
                1e-9 * static_cast<double>(now()), cpu, (unsigned long long)counters_.packets,
                (unsigned long long)counters_.bytes, (unsigned long long)counters_.lost,
                (unsigned long long)counters_.dropped_up, (unsigned long long)counters_.dropped_down,
                (unsigned long long)counters_.refused);
    for (int i = 0; i < 24; i++) std::printf(i ? ", %llu" : "%llu", (unsigned long long)counters_.late[i]);
    std::printf("]}\n");
    std::fflush(stdout);
}

void Relay::run() {
    const int poll = epoll_create1(EPOLL_CLOEXEC);
    const auto watch = [&](int fd, uint64_t mark) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = mark;
        if (epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event)) fail("epoll");
    };
    watch(0, COMMANDS);
    for (size_t i = 0; i < links_.size(); i++) watch(links_[i].fd, i);
    std::printf("ready\n");
    std::fflush(stdout);
    epoll_event events[64];
    Nanoseconds early = 0;
    for (;;) {
        const Nanoseconds next = move(now(), early);
        early = 0;
        Nanoseconds wait = next == NEVER ? 0 : std::max<Nanoseconds>(next - now(), 0);
        if (busy_ && tick_) {
            const timespec tick = {0, tick_};
            clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, nullptr);
            early = tick_ / 2;
            wait = 0;
        }
        const bool forever = next == NEVER && !early;
        busy_ = false;
        timespec timeout = {wait / 1'000'000'000, wait % 1'000'000'000};
        const long ready = syscall(SYS_epoll_pwait2, poll, events, 64, forever ? nullptr : &timeout, nullptr, 8);
        if (ready < 0 && errno != EINTR) fail("epoll_pwait2 (Linux 5.11 has it)");
        for (long i = 0; i < ready; i++) {
            if (events[i].data.u64 == COMMANDS) {
                answer();
                continue;
            }
            for (int count = 0; count < 256 && read_one(events[i].data.u64, early); count++) {
            }
        }
    }
}

// Create a TAP device in the network namespace of a process.
int make_tap(const std::string& pid, const std::string& name) {
    const std::string path = "/proc/" + pid + "/ns/net";
    const int space = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET)) fail(path);
    close(space);
    const int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) fail("/dev/net/tun");
    ifreq request{};
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    std::snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name.c_str());
    if (ioctl(fd, TUNSETIFF, &request)) fail("TUNSETIFF");
    int header = VIRTIO;
    if (ioctl(fd, TUNSETVNETHDRSZ, &header)) fail("TUNSETVNETHDRSZ");
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)) fail("TUNSETOFFLOAD");
    return fd;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 10) {
        std::fprintf(stderr, "relay: expected RATE RTT JITTER LOSS QUEUE STALL EVERY SEED LINK...\n");
        return 2;
    }
    Settings settings{};
    settings.ns_per_byte = 8e9 / std::atof(argv[1]);
    settings.delay = static_cast<Nanoseconds>(std::atof(argv[2]) / 2);
    settings.jitter = static_cast<Nanoseconds>(std::atof(argv[3]));
    settings.loss = std::atof(argv[4]);
    settings.queue = static_cast<Nanoseconds>(std::atof(argv[5]));
    settings.stall = static_cast<Nanoseconds>(std::atof(argv[6]));
    settings.stall_every = std::atof(argv[7]);

    int link_of[256];
    std::fill(std::begin(link_of), std::end(link_of), -1);
    std::vector<Link> links;
    for (int i = 9; i < argc; i++) {
        std::string text = argv[i];
        Link link;
        link.limited = text[0] != '=';
        if (!link.limited) text.erase(0, 1);
        const size_t device = text.find(':'), hosts = text.rfind(':');
        link.fd = make_tap(text.substr(0, device), text.substr(device + 1, hosts - device - 1));
        for (size_t at = hosts; at != std::string::npos; at = text.find(',', at + 1)) {
            link_of[std::atoi(text.c_str() + at + 1) & 255] = i - 9;
        }
        links.push_back(std::move(link));
    }
    // Sleep for exact times, and run first when a frame is due.
    prctl(PR_SET_TIMERSLACK, 1);
    sched_param first{};
    first.sched_priority = 1;
    if (sched_setscheduler(0, SCHED_FIFO, &first)) setpriority(PRIO_PROCESS, 0, -20);
    Relay(settings, std::strtoull(argv[8], nullptr, 10), std::move(links), link_of).run();
}
