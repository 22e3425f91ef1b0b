// The packed format of entries, which sparsecomm/wire/formats.py describes. One launch each.
//
//   pack             encodes entries                                  reads entries twice, writes bytes
//   unpack           decodes entries, and checks the bytes            reads bytes, writes entries
//   quantize_values  rounds values to a kind; returns rounded         reads values once, writes them twice
//                    values, errors, and the number of zeros
//   drop_zeros       removes entries that were rounded to zero        reads entries, writes the others
//   find_not_finite  finds whether a value is not finite: kinds with  reads values
//                    bit planes then send exact values
//
// Compiled for CODEC, the encoding of values (with VALUE_BYTES or VALUE_PLANES, VALUE_BLOCK and SHARED_BYTES of
// sparsecomm/tensors/kinds.py), ACC, the format of values, and INDEX. Words have 64 bits; l is the number of low bits of an
// index, floor(log2((span + 1) / count)).
//
// Grids: any number of blocks, but one per PACKED_THREADS words of high for unpack. In pack, a thread writes whole words of
// low and high, from the entries that it finds by calculation or binary search. drop_zeros has one thread per entry. Unpack counts the bits before each word by
// decoupled look-back. It trusts only first, span, l and count, which the host has checked against the length of the
// message, and accesses no other memory, whatever the bytes are. It adds to `faults` if there are not `count` bits, an unused
// bit is set, an exponent is too large, or the magnitudes of a block are invalid. Deterministic.
#define LOOK_BACK_WINDOWS 1  // saves registers
#include "codecs.cuh"
#include "lookback.cuh"

using namespace sparsecomm;

namespace {

using Index = INDEX;
using Byte = unsigned char;
constexpr u64 WORD = 64;  // bits
constexpr u64 HEAD = 2;   // words before low

DEVICE u64 grid_thread() { return u64(blockIdx.x) * PACKED_THREADS + threadIdx.x; }
DEVICE u64 grid_threads() { return u64(gridDim.x) * PACKED_THREADS; }

// -- values ----------------------------------------------------------------------------------------------------------

using Codec = CODEC;
constexpr u64 SHARING = Codec::SHARING;
static_assert(Codec::BYTES == VALUE_BYTES && Codec::PLANES == VALUE_PLANES, "as in sparsecomm/tensors/kinds.py");
static_assert(SHARING == VALUE_BLOCK && Codec::SHARED == SHARED_BYTES, "as in sparsecomm/tensors/kinds.py");
constexpr u64 SHARERS = SHARING ? SHARING : 1;  // a divisor that is not zero

// Calls each(block, i) for all blocks, one warp per block: a lane has values i and i + WARP. All lanes call it.
template <class Each>
DEVICE void for_blocks(u64 count, Each each) {
    for (u64 block = grid_thread() / WARP; block * SHARERS < count; block += grid_threads() / WARP)
        each(block, block * SHARERS + threadIdx.x % WARP);
}

// A lane's values of a block, followed by zeros. Kinds with blocks have floats.
struct Held {
    float v[2];
    DEVICE Held(const Value* values, u64 i, u64 count) {
        v[0] = i < count ? float(values[i]) : 0, v[1] = i + WARP < count ? float(values[i + WARP]) : 0;
    }
};

// Calls each(i, v, e) for all values, where e is the exponent of the value's block. All lanes call it.
template <class Codec, class Each>
DEVICE void for_values(const Value* values, u64 count, Each each) {
    if constexpr (Codec::SHARING == 0) {
        for (u64 i = grid_thread(); i < count; i += grid_threads()) each(i, values[i], 0);
    } else {
        for_blocks(count, [&](u64, u64 i) {
            const Held held(values, i, count);
            const i32 e = Codec::exponent_of(held.v[0], held.v[1]);
            if (i < count) each(i, held.v[0], e);
            if (i + WARP < count) each(i + WARP, held.v[1], e);
        });
    }
}

// Returns the number of values in a block, which is smaller in the last block.
DEVICE u32 values_in(u64 block, u64 count) { return u32(count - block * SHARERS < SHARERS ? count - block * SHARERS : SHARERS); }

// -- messages --------------------------------------------------------------------------------------------------------

// The areas of a message. `Message` is u64 or const u64.
template <class Message>
struct Areas {
    u64 low_bits, low_words, high_bits, high_words;
    Message *low, *high;
    u64 values, shared, steps, padding, end;  // offsets in bytes; steps: only with planes
    DEVICE Areas(Message* message, u64 count, u64 span, u32 l) {
        low_bits = count * l, low_words = (low_bits + WORD - 1) / WORD;
        high_bits = (span >> l) + count, high_words = (high_bits + WORD - 1) / WORD;
        low = message + HEAD, high = low + low_words;
        values = (HEAD + low_words + high_words) * sizeof(u64);
        const u64 blocks = SHARING ? (count + SHARERS - 1) / SHARERS : 0;
        shared = values + count * Codec::BYTES + blocks * Codec::PLANES * sizeof(u64);
        steps = shared + blocks * sizeof(u16);
        padding = shared + blocks * Codec::SHARED;
        end = (padding + sizeof(u64) - 1) / sizeof(u64) * sizeof(u64);
    }
};

// Writes the values and the shared bytes of blocks. All lanes call it.
template <class Codec>
DEVICE void pack_values(const Value* values, u64 count, const Areas<u64>& areas, Byte* bytes) {
    if constexpr (Codec::PLANES > 0) {
        u64* planes = reinterpret_cast<u64*>(bytes + areas.values);
        for_blocks(count, [&](u64 number, u64 i) {
            const Held held(values, i, count);
            float u[HELD];
            u64 plane[Codec::PLANES];
            magnitudes_of(held.v, u);
            const Codec block = Codec::of_quantized(u, values_in(number, count));
            block.planes_of(held.v, u, plane);
            if (i % SHARERS) return;
            UNROLL
            for (u32 p = 0; p < Codec::PLANES; p++) planes[number * Codec::PLANES + p] = plane[p];
            reinterpret_cast<u16*>(bytes + areas.shared)[number] = u16(block.lowest_bits);
            if (Codec::PLANES > 1) bytes[areas.steps + number] = Byte(block.step);
        });
    } else {
        auto* sent = reinterpret_cast<typename Codec::Sent*>(bytes + areas.values);
        for_values<Codec>(values, count, [&](u64 i, Value v, i32 e) {
            sent[i] = Codec::narrow(v, e);
            if (SHARING && i % SHARERS == 0) bytes[areas.shared + i / SHARERS] = Byte(e - MIN_EXPONENT);
        });
    }
}

// Reads values and returns whether they are valid.
template <class Codec>
DEVICE bool unpack_values(const Byte* bytes, const Areas<const u64>& areas, u64 count, Value* values) {
    bool good = true;
    if constexpr (Codec::PLANES > 0) {
        const u64* planes = reinterpret_cast<const u64*>(bytes + areas.values);
        for_blocks(count, [&](u64 number, u64 i) {
            const u64* plane = planes + number * Codec::PLANES;
            const u32 lowest = reinterpret_cast<const u16*>(bytes + areas.shared)[number], size = values_in(number, count);
            const Codec block{lowest, Codec::PLANES > 1 ? bytes[areas.steps + number] : 0};
            float v[HELD];
            block.widen(plane, v);
            if (i < count) values[i] = v[0];
            if (i + WARP < count) values[i + WARP] = v[1];
            good &= block.valid();
            for (u32 p = 0; p < Codec::PLANES; p++) good &= size == SHARERS || plane[p] >> size == 0;
        });
    } else {
        const auto* sent = reinterpret_cast<const typename Codec::Sent*>(bytes + areas.values);
        for (u64 i = grid_thread(); i < count; i += grid_threads()) {
            const i32 e = SHARING ? i32(bytes[areas.shared + i / SHARERS]) + MIN_EXPONENT : 0;
            good &= e <= MAX_EXPONENT;
            values[i] = Codec::widen(sent[i], e);
        }
    }
    return good;
}

// Calls write(i, value, rounded value) for all values. All lanes call it.
template <class Codec, class Write>
DEVICE void round_values(const Value* values, u64 count, const u32* not_finite, Write write) {
    if constexpr (Codec::PLANES > 0) {
        if (*not_finite) {
            for (u64 i = grid_thread(); i < count; i += grid_threads())
                write(i, values[i], ACC::widen(canonical<ACC>(ACC::narrow(values[i]))));
        } else {
            for_blocks(count, [&](u64 number, u64 i) {
                const Held held(values, i, count);
                float u[HELD], rounded[HELD];
                magnitudes_of(held.v, u);
                const Codec block = Codec::chosen_for(u, values_in(number, count));
                block.round(held.v, u, rounded);
                if (i < count) write(i, held.v[0], rounded[0]);
                if (i + WARP < count) write(i + WARP, held.v[1], rounded[1]);
            });
        }
    } else {
        for_values<Codec>(values, count, [&](u64 i, Value v, i32 e) { write(i, v, Codec::widen(Codec::narrow(v, e), e)); });
    }
}

// Returns the l low bits of entry i.
DEVICE u64 low_of(const u64* low, u64 i, u32 l) {
    if (l == 0) return 0;
    const u64 bit = i * l, shift = bit % WORD, mask = (1ull << l) - 1;
    const u64 here = low[bit / WORD] >> shift;
    return (shift + l > WORD ? here | low[bit / WORD + 1] << (WORD - shift) : here) & mask;
}

// Returns whether the unused bits of an area's last word are zero.
DEVICE bool clean(const u64* area, u64 bits, u64 words) {
    return bits % WORD == 0 || area[words - 1] >> bits % WORD == 0;
}

}  // namespace

// Writes a message.
//
//   indices, values  [in]   entries in order of index; values rounded by `quantize_values`
//   count            [in]   number of entries, at least 1
//   first, span      [in]   the first index; the last index minus the first
//   l                [in]   number of low bits of an index
//   flags            [in]   flag bits of the word of span
//   message          [out]  all words
KERNEL void __launch_bounds__(PACKED_THREADS)
pack(const Index* indices, const Value* values, u64 count, u64 first, u64 span, u32 l, u64 flags, u64* message) {
    const Areas<u64> areas(message, count, span, l);
    Byte* bytes = reinterpret_cast<Byte*>(message);
    if (grid_thread() == 0) message[0] = first, message[1] = span | flags;
    for (u64 w = grid_thread(); w < areas.low_words; w += grid_threads()) {
        const u64 begin = w * WORD, mask = (1ull << l) - 1;
        u64 word = 0;
        for (u64 i = begin / l; i < count && i * l < begin + WORD; i++) {
            const u64 low = (u64(indices[i]) - first) & mask, bit = i * l;
            word |= bit < begin ? low >> (begin - bit) : low << (bit - begin);
        }
        areas.low[w] = word;
    }
    for (u64 w = grid_thread(); w < areas.high_words; w += grid_threads()) {
        const u64 begin = w * WORD, max_high = span >> l;  // the bit of entry i is in [i, i + max_high]
        u64 i = begin > max_high ? begin - max_high : 0, end = begin < count ? begin : count;
        while (i < end) {  // find the first entry whose bit is in or after this word
            const u64 middle = i + (end - i) / 2;
            if (((u64(indices[middle]) - first) >> l) + middle < begin)
                i = middle + 1;
            else
                end = middle;
        }
        u64 word = 0;
        for (; i < count; i++) {
            const u64 bit = ((u64(indices[i]) - first) >> l) + i - begin;
            if (bit >= WORD) break;
            word |= 1ull << bit;
        }
        areas.high[w] = word;
    }
    pack_values<Codec>(values, count, areas, bytes);
    for (u64 at = areas.padding + grid_thread(); at < areas.end; at += grid_threads()) bytes[at] = 0;
}

// Reads a message.
//
//   message          [in]      arbitrary bytes, of the length that follows from count, span and l
//   count            [in]      number of entries, at least 1
//   first, span, l   [in]      as in `pack`, checked by the host
//   indices, values  [out]     entries; room for `count`
//   look_back        [in,out]  see lookback.cuh
//   faults           [in,out]  every thread that finds a fault adds 1
KERNEL void __launch_bounds__(PACKED_THREADS)
unpack(const u64* message, u64 count, u64 first, u64 span, u32 l, Index* indices, Value* values, LookBack* look_back,
       u32* faults) {
    const Areas<const u64> areas(message, count, span, l);
    const Byte* bytes = reinterpret_cast<const Byte*>(message);
    const u32 ticket = tile_ticket(look_back), lane = threadIdx.x % WARP;
    const u64 mine = u64(ticket) * PACKED_THREADS + threadIdx.x;
    const u64 word = mine < areas.high_words ? areas.high[mine] : 0;
    u32 all;
    const u32 within = block_scan<PACKED_THREADS>(u32(__popcll(word)), &all);
    const u64 tiles_before = exclusive_prefix(look_back, ticket, all), before = tiles_before + within;
    for (u32 l_of = 0; l_of < WARP; l_of++) {  // all lanes write the entries of each word in turn, which coalesces writes
        const u64 bits = __shfl_sync(ALL_LANES, word, l_of), bits_before = __shfl_sync(ALL_LANES, before, l_of);
        const u64 begin = (mine - lane + l_of) * WORD;
        UNROLL
        for (u32 bit = lane; bit < WORD; bit += WARP) {
            const u64 i = bits_before + u32(__popcll(bits & ((1ull << bit) - 1)));
            if (bits >> bit & 1 && i < count)
                indices[i] = Index(first + ((begin + bit - i) << l | low_of(areas.low, i, l)));
        }
    }
    bool good = true;
    good &= unpack_values<Codec>(bytes, areas, count, values);
    for (u64 at = areas.padding + grid_thread(); at < areas.end; at += grid_threads()) good &= bytes[at] == 0;
    if (grid_thread() == 0) good &= clean(areas.low, areas.low_bits, areas.low_words);
    if (grid_thread() == 0) good &= clean(areas.high, areas.high_bits, areas.high_words);
    if (threadIdx.x == 0 && ticket == gridDim.x - 1) good &= tiles_before + all == count;
    if (!good) atomicAdd(faults, 1u);
    reset_after_last_block(look_back, gridDim.x);
}

// Finds values that are not finite.
//
//   values  [in]      `count` values
//   found   [in,out]  0; becomes 1 if there is one
KERNEL void __launch_bounds__(PACKED_THREADS)
find_not_finite(const Value* values, u64 count, u32* found) {
    bool all = true;
    for (u64 i = grid_thread(); i < count; i += grid_threads()) all &= is_finite(values[i]);
    if (!all) *found = 1;
}

// Rounds values to a kind: to nearest even, or to the nearest level of a block.
//
//   values      [in]      `count` values
//   positions   [in]      position of each value in `errors`, to which its error is added; or null
//   rounded     [out]     `count` values; zeros are +0
//   errors      [in,out]  if `positions` is null, receives values - rounded; 0 if not finite
//   not_finite  [in]      for kinds with planes: result of `find_not_finite`; if set, nothing is rounded. Else null
//   zeros       [in,out]  the number of zeros in `rounded` is added
KERNEL void __launch_bounds__(PACKED_THREADS)
quantize_values(const Value* values, u64 count, const Index* positions, Value* rounded, Value* errors, const u32* not_finite,
                u64* zeros) {
    u64 found = 0;
    const auto write = [&](u64 i, Value v, Value to) {
        rounded[i] = to == 0 ? Value(0) : to;  // not -0
        const Value error = is_finite(v) ? v - to : Value(0);
        if (positions == nullptr)
            errors[i] = error;
        else
            errors[positions[i]] += error;
        found += to == 0;
    };
    round_values<Codec>(values, count, not_finite, write);
    found = warp_sum(found);
    if (threadIdx.x % WARP == 0 && found) atomicAdd(zeros, found);
}

// Removes zeros, in order.
//
//   values, indices, positions  [in]      `count` entries; positions: in the values of the first round, in which it is null
//   rest_...                    [out]     the entries whose value is not zero
//   look_back                   [in,out]  see lookback.cuh
KERNEL void __launch_bounds__(PACKED_THREADS)
drop_zeros(const Value* values, const Index* indices, const Index* positions, u64 count, Value* rest_values,
           Index* rest_indices, Index* rest_positions, LookBack* look_back) {
    const u32 ticket = tile_ticket(look_back);
    const u64 i = u64(ticket) * PACKED_THREADS + threadIdx.x;
    const Value value = i < count ? values[i] : Value(0);
    u32 all;
    const u32 within = block_scan<PACKED_THREADS>(u32(value != 0), &all);
    const u64 to = exclusive_prefix(look_back, ticket, all) + within;
    if (value != 0) {
        rest_values[to] = value;
        rest_indices[to] = indices[i];
        rest_positions[to] = positions == nullptr ? Index(i) : positions[i];
    }
    reset_after_last_block(look_back, gridDim.x);
}
