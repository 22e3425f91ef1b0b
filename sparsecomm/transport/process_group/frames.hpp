// The frames on a connection, and the assembly of a peer's messages from them, without input or output.
//
// Both ends of a connection first send a hello, with a ticket that is valid for one connection in one direction, then
// frames: a header and a piece of a message each. The pieces of a message have equal lengths except for the last one,
// and may travel on different connections in any order. Messages to a peer are numbered and delivered in this order.
// All numbers have the sender's byte order: a receiver with another byte order finds no magic number.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>

namespace sparsecomm {

// Kinds of frames and completions; control messages have kinds from 0 on. NOTHING: see Connections::send_follow_up.
// MORE: like DATA, but the next message continues it.
enum Kind : int32_t { DATA = -1, GOODBYE = -2, SENT = -3, DISCONNECTED = -4, UNREADABLE = -5, NOTHING = -6, MORE = -7 };

constexpr size_t TICKET_BYTES = 16;
constexpr uint32_t MAX_STREAMS = 64; // connections of two ranks
constexpr size_t TICKETS_BYTES = 2 * MAX_STREAMS * TICKET_BYTES; // of two ranks, for both directions
constexpr uint32_t FRAME_MAGIC = 0x53435031;
constexpr char HELLO_MAGIC[9] = "sparsec2";
constexpr int64_t MAX_NUMBER = int64_t{1} << 62;
constexpr uint64_t MAX_BYTES = uint64_t{1} << 48;   // bytes of a message
constexpr uint64_t MAX_CONTROL = uint64_t{1} << 17; // bytes of a control message
constexpr uint64_t MAX_AHEAD = uint64_t{1} << 24;   // messages that may arrive before an earlier one is complete
constexpr uint32_t MIN_PIECE = 64;                  // minimum bytes in each of several pieces

struct Hello {
    char magic[8];
    char ticket[TICKET_BYTES]; // known only to the two ranks; accepted once
    uint32_t rank;             // of the sender
    uint16_t stream;           // index of this connection, among those of the two ranks
    uint16_t streams;          // number of connections that the sender opens; only in the first hello
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
    bool data = f.kind == DATA || f.kind == MORE, empty = f.kind == GOODBYE || f.kind == NOTHING;
    return f.magic == FRAME_MAGIC && (data || empty || (f.kind >= 0 && f.kind <= 255)) && f.number >= 0 &&
           f.number < MAX_NUMBER && f.total <= (data ? MAX_BYTES : empty ? 0 : MAX_CONTROL) &&
           f.offset <= f.total && f.length == (f.total - f.offset < f.piece ? f.total - f.offset : f.piece) &&
           (f.total <= f.piece ? f.offset == 0 : f.piece >= MIN_PIECE && f.length > 0 && f.offset % f.piece == 0);
}

inline std::string describe(const Frame &f) {
    return "a message of kind " + std::to_string(f.kind) + " for call " + std::to_string(f.number) + " with " +
           std::to_string(f.total) + " bytes (number " + std::to_string(f.sequence) + ": " + std::to_string(f.length) +
           " bytes from byte " + std::to_string(f.offset) + " on)";
}

// A received message, in memory from malloc.
struct Message {
    int32_t kind = DATA;
    int64_t number = 0;
    char *memory = nullptr;
    uint64_t total = 0;
};

// The messages of one peer that are incomplete, or wait for an earlier one.
class Assembly {
  public:
    Assembly() = default;
    Assembly(const Assembly &) = delete;
    ~Assembly() { clear(); }

    // Discard all messages.
    void clear() {
        for (auto &[sequence, partial] : partial_)
            std::free(partial.message.memory);
        partial_.clear();
    }

    // Begin a piece and set `to`, its destination. Return a description of an invalid piece, otherwise "".
    std::string begin(const Frame &f, char **to) {
        *to = nullptr;
        if (!is_valid(f))
            return describe(f);
        if (f.kind == NOTHING)
            return "";
        if (f.kind == GOODBYE && goodbye_)
            return ""; // it arrives on every connection
        if (f.sequence < next_ || f.sequence - next_ > MAX_AHEAD || (goodbye_ && f.sequence > last_))
            return describe(f);
        auto [found, is_new] = partial_.try_emplace(f.sequence);
        Partial &p = found->second;
        if (is_new) {
            // The system provides memory only when bytes are written, so an announced length alone uses none.
            p.message = {f.kind, f.number, static_cast<char *>(std::malloc(f.total ? f.total : 1)), f.total};
            p.piece = f.piece;
            if (p.message.memory == nullptr) {
                partial_.erase(found);
                return "a message of " + std::to_string(f.total) + " bytes, more than there is memory for";
            }
        } else if (f.kind != p.message.kind || f.number != p.message.number || f.total != p.message.total ||
                   f.piece != p.piece) {
            return describe(f) + ", which does not fit its other pieces";
        }
        if (!p.mark(f.piece ? f.offset / f.piece : 0))
            return describe(f) + ", which has arrived before";
        *to = p.message.memory + f.offset;
        return "";
    }

    // Complete a piece, and call `deliver` with each message that can be delivered now.
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

    bool is_complete() const { return goodbye_ && next_ > last_; } // all messages have arrived

  private:
    struct Partial {
        Message message;
        uint64_t received = 0;
        uint32_t piece = 0;
        bool complete = false;
        uint64_t begun = 0;       // number of pieces begun, counted up to the first missing one
        std::set<uint64_t> ahead; // pieces begun after that one

        // Record that a piece begins; return false if it has begun before.
        bool mark(uint64_t index) {
            if (index != begun)
                return index > begun && ahead.insert(index).second;
            for (begun++; !ahead.empty() && *ahead.begin() == begun; begun++)
                ahead.erase(ahead.begin());
            return true;
        }
    };
    std::map<uint64_t, Partial> partial_; // by sequence
    uint64_t next_ = 0;                   // sequence of the next message to deliver
    uint64_t last_ = 0;                   // sequence of the goodbye
    bool goodbye_ = false;
};

} // namespace sparsecomm
