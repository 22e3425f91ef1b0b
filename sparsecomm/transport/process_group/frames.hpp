// What travels on a connection, and how a peer's messages are put together again. No input or output here.
//
// Both ends of a connection say hello first: 32 bytes, with a ticket that is good for one connection in one direction.
// Then come frames: a header of 48 bytes, a piece of a message.
// A message is one piece, or several, of equal lengths but for the last one; its pieces may travel on different
// connections, in any order. Messages to a peer are numbered, and are delivered in the order of their numbers.
// All numbers are as in the memory of the sender: an end with another order of bytes finds no magic number.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>

namespace sparsecomm {

// Kinds of messages; those from 0 on are control messages. What has happened, where it is no message, has a kind, too.
// NOTHING is no message: see Connections::follow.
enum Kind : int32_t { DATA = -1, GOODBYE = -2, SENT = -3, DISCONNECTED = -4, UNREADABLE = -5, NOTHING = -6 };

constexpr size_t TICKET_BYTES = 16;
constexpr uint32_t MAX_STREAMS = 64; // connections of two ranks
constexpr size_t TICKETS_BYTES = 2 * MAX_STREAMS * TICKET_BYTES; // of two ranks, for both directions
constexpr uint32_t FRAME_MAGIC = 0x53435031;
constexpr char HELLO_MAGIC[9] = "sparsec2";
constexpr int64_t MAX_NUMBER = int64_t{1} << 62;
constexpr uint64_t MAX_BYTES = uint64_t{1} << 48;   // of a message
constexpr uint64_t MAX_CONTROL = uint64_t{1} << 17; // of a message that is no data
constexpr uint64_t MAX_AHEAD = uint64_t{1} << 24;   // messages that may come before an earlier one is complete
constexpr uint32_t MIN_PIECE = 64;                  // bytes in each of several pieces

struct Hello {
    char magic[8];
    char ticket[TICKET_BYTES]; // known only to the two ranks; the listener accepts it once
    uint32_t rank;             // of the sender
    uint16_t stream;           // index of this connection, among those of the two ranks
    uint16_t streams;          // number of connections that the sender opens, in the hello of the first
};

struct Frame {
    uint32_t magic;
    int32_t kind;
    int64_t number;    // of the call
    uint64_t sequence; // of the message
    uint64_t total;    // bytes in the message
    uint64_t offset;   // of the piece
    uint32_t piece;    // bytes in each piece but the last one
    uint32_t length;   // bytes in this one
};

static_assert(sizeof(Hello) == 32 && sizeof(Frame) == 48);

inline bool is_valid(const Frame &f) {
    bool data = f.kind == DATA, empty = f.kind == GOODBYE || f.kind == NOTHING;
    return f.magic == FRAME_MAGIC && (data || empty || (f.kind >= 0 && f.kind <= 255)) && f.number >= 0 &&
           f.number < MAX_NUMBER && f.total <= (data ? MAX_BYTES : empty ? 0 : MAX_CONTROL) &&
           f.offset <= f.total && f.length == (f.total - f.offset < f.piece ? f.total - f.offset : f.piece) &&
           (f.total <= f.piece ? f.offset == 0 : f.piece >= MIN_PIECE && f.length > 0 && f.offset % f.piece == 0);
}

inline std::string described(const Frame &f) {
    return "a message of kind " + std::to_string(f.kind) + " for call " + std::to_string(f.number) + " with " +
           std::to_string(f.total) + " bytes (number " + std::to_string(f.sequence) + "), of which " +
           std::to_string(f.length) + " follow from byte " + std::to_string(f.offset) + " on";
}

// A message that has come, in memory of malloc.
struct Message {
    int32_t kind = DATA;
    int64_t number = 0;
    char *memory = nullptr;
    uint64_t total = 0;
};

// The messages of one peer that have come in part, or before an earlier one.
class Assembly {
  public:
    Assembly() = default;
    Assembly(const Assembly &) = delete;
    ~Assembly() { clear(); }

    // Forget what has come in part: nothing more comes.
    void clear() {
        for (auto &[sequence, partial] : partial_)
            std::free(partial.message.memory);
        partial_.clear();
    }

    // Take note that a piece follows, and say where it is to be read to. Returns what is wrong with it; empty: nothing.
    // The system provides memory as bytes come, so that a length alone takes none; nor does a number of pieces.
    std::string begin(const Frame &f, char **to) {
        *to = nullptr;
        if (!is_valid(f))
            return described(f);
        if (f.kind == NOTHING)
            return "";
        if (f.kind == GOODBYE && goodbye_)
            return ""; // it comes on every connection
        if (f.sequence < next_ || f.sequence - next_ > MAX_AHEAD || (goodbye_ && f.sequence > last_))
            return described(f);
        auto [found, is_new] = partial_.try_emplace(f.sequence);
        Partial &p = found->second;
        if (is_new) {
            p.message = {f.kind, f.number, static_cast<char *>(std::malloc(f.total ? f.total : 1)), f.total};
            p.piece = f.piece;
            if (p.message.memory == nullptr) {
                partial_.erase(found);
                return "a message of " + std::to_string(f.total) + " bytes, more than there is memory for";
            }
        } else if (f.kind != p.message.kind || f.number != p.message.number || f.total != p.message.total ||
                   f.piece != p.piece) {
            return described(f) + ", of which another piece was different";
        }
        if (!p.mark(f.piece ? f.offset / f.piece : 0))
            return described(f) + ", which has come already";
        *to = p.message.memory + f.offset;
        return "";
    }

    // Take note that a piece is complete, and call `deliver` with each message whose turn has come by that.
    template <typename Deliver> void end(const Frame &f, const Deliver &deliver) {
        if (f.kind == NOTHING || (f.kind == GOODBYE && goodbye_))
            return;
        if (f.kind == GOODBYE)
            goodbye_ = true, last_ = f.sequence;
        Partial &p = partial_.at(f.sequence);
        p.received += f.length;
        p.complete = p.received == p.message.total;
        for (auto it = partial_.begin(); it != partial_.end() && it->first == next_ && it->second.complete; ++next_) {
            Message message = it->second.message;
            it = partial_.erase(it);
            deliver(message);
        }
    }

    bool is_complete() const { return goodbye_ && next_ > last_; } // all has come that will

  private:
    struct Partial {
        Message message;
        uint64_t received = 0;
        uint32_t piece = 0;
        bool complete = false;
        uint64_t begun = 0;       // so many pieces, from the first one on,
        std::set<uint64_t> ahead; // and these

        // Take note that a piece begins; return whether it is the first time.
        bool mark(uint64_t index) {
            if (index != begun)
                return index > begun && ahead.insert(index).second;
            for (begun++; !ahead.empty() && *ahead.begin() == begun; begun++)
                ahead.erase(ahead.begin());
            return true;
        }
    };
    std::map<uint64_t, Partial> partial_; // by sequence
    uint64_t next_ = 0;                   // the one whose turn it is
    uint64_t last_ = 0;                   // that of the goodbye
    bool goodbye_ = false;
};

} // namespace sparsecomm
