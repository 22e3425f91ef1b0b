// The part of the codec of patches that runs on the device: see kernels/patches/patches.hpp. The host codes and decodes.
//
//   compare         counts elements by class, and changes, in each block; adds up hashes   reads both versions
//   offsets         turns these counts into prefix sums within each piece                  reads and writes the counts
//   list_changes    writes the changes by position: class, rank and distance               reads both versions
//   place_changes   writes decoded distances to the places of their elements               reads changes
//   find_changes    writes position and new bits of each changed element; adds up hashes   reads the tensor, and a distance
//                                                                                          for each of its elements
//   write_changes   writes new elements to the tensor                                      reads and writes changes
//
// To compare: compare, offsets, list_changes. To locate: compare of one version, offsets, place_changes, find_changes. An
// element's place is its number in its piece, in the order of classes and, within a class, of ranks.
//
// Compiled for ELEMENT, an unsigned integer. Tensors may begin at any multiple of its size. They are read in parts of whole
// pieces; `first_block` is the number of a part's first block in the tensor. Grids: one block per piece for offsets, one per
// PATCH_THREADS / 32 blocks of BLOCK bytes for find_changes, else any number. Damaged patches never cause
// accesses to other memory. Deterministic: atomics add integers.
#define LOOK_BACK_WINDOWS 1  // saves registers
#include "lookback.cuh"
#include "patch_elements.hpp"
#include "search.cuh"

using namespace sparsecomm;
using namespace sparsecomm::patches;

namespace {

using Element = ELEMENT;
constexpr u32 SIZE = BLOCK / sizeof(Element);  // elements of a block, which a warp reads
constexpr u32 PER_WORD = 8 / sizeof(Element), WORDS = BLOCK / 8 / WARP, ROUNDS = SIZE / WARP;
constexpr u32 BATCH = 4;  // elements that a lane loads at once; each comes WARP elements after the one before
constexpr u32 WARPS = PATCH_THREADS / WARP, BLOCKS = PIECE / SIZE, SLICES = PATCH_THREADS / CLASSES;
static_assert(CLASSES == 16, "four bits, and half a warp");

DEVICE u64 thread_of_grid() { return u64(blockIdx.x) * PATCH_THREADS + threadIdx.x; }

DEVICE Element element_of(u64 word, u32 e) { return Element(word >> (e * 8 * sizeof(Element))); }

// Returns the elements of a word that begins at element i of n, or zeros after the last.
DEVICE u64 load_word(const Element* data, u64 i, u64 n) {
    if (reinterpret_cast<u64>(data) % 8 == 0 && i + PER_WORD <= n) return *reinterpret_cast<const u64*>(data + i);
    u64 word = 0;
    UNROLL
    for (u32 e = 0; e < PER_WORD; e++)
        if (i + e < n) word |= u64(data[i + e]) << (e * 8 * sizeof(Element));
    return word;
}

// Returns element i of n, or zero after the last.
DEVICE Element load(const Element* data, u64 i, u64 n) { return i < n ? data[i] : Element(0); }

// Which lanes have an element of which class. All lanes must construct it together.
struct Members {
    u32 bit[4];

    DEVICE explicit Members(u32 c) {
        UNROLL
        for (u32 b = 0; b < 4; b++) bit[b] = __ballot_sync(ALL_LANES, c >> b & 1);
    }
    DEVICE u32 of(u32 c) const {
        u32 lanes = ALL_LANES;
        UNROLL
        for (u32 b = 0; b < 4; b++) lanes &= bit[b] ^ ((c >> b & 1) - 1);
        return lanes;
    }
};

// Adds the values of all warps to a word in device memory. All threads must call it.
DEVICE void add(u64* sum, u64 of_warp) {
    u64 all;
    block_scan<PATCH_THREADS>(threadIdx.x % WARP == 0 ? of_warp : 0ull, &all);
    if (threadIdx.x == 0) atomicAdd(sum, all);
}

}  // namespace

//   before, after     [in]   n elements. after: null for a single version
//   first_block       [in]   see above
//   shift, mask, low  [in]   see class_of
//   ranks, changes    [out]  elements of each class, and changes, in each block; or null
//   sums              [in,out]  adds the hashes of before, and of after
KERNEL void __launch_bounds__(PATCH_THREADS, 2)
compare(const Element* before, const Element* after, u64 n, u64 first_block, u32 shift, u32 mask, u32 low, u32* ranks,
        u32* changes, u64* sums) {
    const u32 lane = threadIdx.x % WARP;
    u64 key[WORDS], hashes = 0, new_hashes = 0;
    UNROLL
    for (u32 j = 0; j < WORDS; j++) key[j] = key_of_place(j * WARP + lane);
    for (u64 b = thread_of_grid() / WARP; b * SIZE < n; b += u64(gridDim.x) * WARPS) {
        u64 x[WORDS], y[WORDS], hash = 0, new_hash = 0;
        UNROLL
        for (u32 j = 0; j < WORDS; j++) x[j] = load_word(before, b * SIZE + (j * WARP + lane) * PER_WORD, n);
        UNROLL
        for (u32 j = 0; j < WORDS; j++) y[j] = after ? load_word(after, b * SIZE + (j * WARP + lane) * PER_WORD, n) : x[j];
        UNROLL
        for (u32 j = 0; j < WORDS; j++) {
            hash += hash_with_key(x[j], key[j]);
            if (after) new_hash += hash_with_key(y[j], key[j]);
        }
        hashes += mix_block(warp_sum(hash), first_block + b);
        if (after) new_hashes += mix_block(warp_sum(new_hash), first_block + b);
        if (!ranks) continue;
        u32 count = 0, changed = 0;  // of class `lane`; of this lane's elements
        UNROLL
        for (u32 j = 0; j < WORDS; j++) {
            _Pragma("unroll 2")  // more would need more registers than there are
            for (u32 e = 0; e < PER_WORD; e++) {
                count += u32(__popc(Members(class_of(element_of(x[j], e), shift, mask, low)).of(lane)));
                changed += element_of(x[j], e) != element_of(y[j], e);
            }
        }
        if (lane == 0 && n - b * SIZE < SIZE) count -= u32(SIZE - (n - b * SIZE));  // zeros after the last element
        if (lane < CLASSES) ranks[b * CLASSES + lane] = count;
        changed = warp_sum(changed);
        if (lane == 0) changes[b] = changed;
    }
    add(&sums[0], hashes);
    add(&sums[1], new_hashes);
}

//   blocks     [in]      number of blocks
//   ranks      [in,out]  elements of each class in each block; then in earlier blocks of its piece
//   changes    [in,out]  the same for changes
//   members    [out]     elements of each class in each piece
//   starts     [out]     changes before each piece, and in all pieces
//   look_back  [in,out]  see lookback.cuh
KERNEL void __launch_bounds__(PATCH_THREADS)
offsets(u64 blocks, u32* ranks, u32* changes, u32* members, u64* starts, LookBack* look_back) {
    struct Slices {  // parts of a piece
        u32 members[SLICES][CLASSES];
    };
    SHARED(Slices, slices);
    const u32 piece = tile_ticket(look_back), slice = threadIdx.x / CLASSES, c = threadIdx.x % CLASSES;
    const u64 first = u64(piece) * BLOCKS;
    const u32 size = u32(blocks - first < BLOCKS ? blocks - first : BLOCKS), length = (size + SLICES - 1) / SLICES;
    const u32 begin = slice * length, end = begin + length < size ? begin + length : size;
    u32* column = ranks + first * CLASSES + c;
    u32 own = 0, before = 0;
    for (u32 b = begin; b < end; b++) own += column[u64(b) * CLASSES];
    slices.members[slice][c] = own;
    __syncthreads();
    for (u32 s = 0; s < slice; s++) before += slices.members[s][c];
    if (slice == SLICES - 1) members[piece * CLASSES + c] = before + own;
    for (u32 b = begin; b < end; b++) {
        const u32 here = column[u64(b) * CLASSES];
        column[u64(b) * CLASSES] = before;
        before += here;
    }
    u32 total = 0, all;
    for (u32 row = 0; row < size; row += PATCH_THREADS) {
        const u32 b = row + threadIdx.x;
        const u32 within = block_scan<PATCH_THREADS>(b < size ? changes[first + b] : 0, &all);
        if (b < size) changes[first + b] = total + within;
        total += all;
    }
    const u64 start = exclusive_prefix(look_back, piece, total);
    if (threadIdx.x == 0) {
        if (piece == 0) starts[0] = 0;
        starts[piece + 1] = start + total;
    }
    reset_after_last_block(look_back, gridDim.x);
}

//   before, after, n, shift, mask, low  [in]   as in compare
//   is_float                            [in]   see ordered
//   ranks, changes, starts              [in]   of offsets
//   label, rank, distance               [out]  of each change, by position; distance has the sign of an element's difference
KERNEL void __launch_bounds__(PATCH_THREADS, 2)
list_changes(const Element* before, const Element* after, u64 n, u32 shift, u32 mask, u32 low, bool is_float, const u32* ranks,
             const u32* changes, const u64* starts, unsigned char* label, u32* rank, u64* distance) {
    constexpr u32 UNUSED = 64 - 8 * sizeof(Element);
    const u32 lane = threadIdx.x % WARP, lower = (1u << lane) - 1;
    for (u64 b = thread_of_grid() / WARP; b * SIZE < n; b += u64(gridDim.x) * WARPS) {
        const u64 piece = b / BLOCKS;
        const bool is_last = (b + 1) % BLOCKS == 0 || (b + 1) * SIZE >= n;
        if (changes[b] == (is_last ? starts[piece + 1] - starts[piece] : changes[b + 1])) continue;
        u64 to = starts[piece] + changes[b];
        u32 next = ranks[b * CLASSES + lane % CLASSES];  // of class `lane`
        for (u32 first = 0; first < ROUNDS; first += BATCH) {
            Element x[BATCH], y[BATCH];
            UNROLL
            for (u32 r = 0; r < BATCH; r++) {
                x[r] = load(before, b * SIZE + (first + r) * WARP + lane, n);
                y[r] = load(after, b * SIZE + (first + r) * WARP + lane, n);
            }
            UNROLL
            for (u32 r = 0; r < BATCH; r++) {
                const u32 c = class_of(x[r], shift, mask, low);
                const Members members(c);
                const u32 found = __shfl_sync(ALL_LANES, next, int(c)) + u32(__popc(members.of(c) & lower));
                next += u32(__popc(members.of(lane)));
                const u32 changed = __ballot_sync(ALL_LANES, x[r] != y[r]);
                if (x[r] != y[r]) {
                    const u64 o = to + u32(__popc(changed & lower));
                    const u64 step = u64(ordered(y[r], is_float)) - u64(ordered(x[r], is_float));
                    label[o] = (unsigned char)(c);
                    rank[o] = found;
                    distance[o] = u64(i64(step << UNUSED) >> UNUSED);
                }
                to += u32(__popc(changed));
            }
        }
    }
}

//   begin           [in]   the first change of each class of each piece, in order; then all changes
//   ranges, count   [in]   number of classes of all pieces; number of changes
//   members         [in]   of offsets
//   rank, distance  [in]   of each change, decoded; they may be wrong
//   placed          [out]  distances at the places of their elements
KERNEL void __launch_bounds__(PATCH_THREADS)
place_changes(const u32* begin, u64 ranges, u64 count, const u32* members, const u32* rank, const u64* distance,
              Element* placed) {
    for (u64 i = thread_of_grid(); i < count; i += u64(gridDim.x) * PATCH_THREADS) {
        const u64 range = lower_bound(begin, ranges, i + 1) - 1, piece = range / CLASSES;
        u64 place = piece * PIECE + rank[i];
        for (u64 r = piece * CLASSES; r < range; r++) place += members[r];
        if (rank[i] < members[range]) placed[place] = Element(distance[i]);
    }
}

//   before, n, first_block, shift, mask, low, is_float  [in]      as above
//   ranks, members                                      [in]      of offsets
//   placed                                              [in]      of place_changes, or 0: n numbers
//   position, value                                     [out]     of each changed element: its number, and new bits
//   sums                                                [in,out]  adds the hashes of the new version to the second word; sets
//                                                                 the third one to the number of changed elements
//   look_back                                           [in,out]  see lookback.cuh
KERNEL void __launch_bounds__(PATCH_THREADS, 2)
find_changes(const Element* before, u64 n, u64 first_block, u32 shift, u32 mask, u32 low, bool is_float, const u32* ranks,
             const u32* members, const Element* placed, u32* position, Element* value, u64* sums, LookBack* look_back) {
    struct Room {
        alignas(16) Element of[WARPS][SIZE];
    };
    SHARED(Room, room);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, lower = (1u << lane) - 1, tile = tile_ticket(look_back);
    const u64 b = u64(tile) * WARPS + warp, piece = b / BLOCKS;
    Element* element = room.of[warp];
    u32 changed = 0, all;  // one bit per round
    u64 hash = 0;
    if (b * SIZE < n) {
        const u32 own = lane < CLASSES ? members[piece * CLASSES + lane] : 0;
        const u32 of_class = warp_scan(own) - own;
        u32 next = of_class + ranks[b * CLASSES + lane % CLASSES];  // place of the next element of class `lane`
        for (u32 first = 0; first < ROUNDS; first += BATCH) {
            Element x[BATCH];
            UNROLL
            for (u32 k = 0; k < BATCH; k++) x[k] = load(before, b * SIZE + (first + k) * WARP + lane, n);
            UNROLL
            for (u32 k = 0; k < BATCH; k++) {
                const u32 r = first + k, c = class_of(x[k], shift, mask, low);
                const Members members_of(c);
                const u32 place = __shfl_sync(ALL_LANES, next, int(c)) + u32(__popc(members_of.of(c) & lower));
                next += u32(__popc(members_of.of(lane)));
                const bool exists = b * SIZE + r * WARP + lane < n;
                const Element step = exists ? placed[piece * PIECE + place] : Element(0);
                changed |= u32(step != 0) << r;
                element[r * WARP + lane] = unordered(Element(ordered(x[k], is_float) + step), is_float);
            }
        }
        __syncwarp();
        UNROLL
        for (u32 j = 0; j < WORDS; j++) {
            const u32 place = j * WARP + lane;
            hash += hash_with_key(reinterpret_cast<const u64*>(element)[place], key_of_place(place));
        }
        hash = mix_block(warp_sum(hash), first_block + b);
    }
    add(&sums[1], hash);
    const u32 within = block_scan<PATCH_THREADS>(u32(__popc(changed)), &all);
    const u64 tiles_before = exclusive_prefix(look_back, tile, all);
    u64 to = tiles_before + within;
    for (; changed; changed &= changed - 1, to++) {
        const u32 i = (u32(__ffs(int(changed))) - 1) * WARP + lane;
        position[to] = u32(b * SIZE + i);
        value[to] = element[i];
    }
    if (threadIdx.x == 0 && tile == gridDim.x - 1) sums[2] = tiles_before + all;
    reset_after_last_block(look_back, gridDim.x);
}

//   data             [out]  n elements
//   position, value  [in]   of find_changes
KERNEL void __launch_bounds__(PATCH_THREADS)
write_changes(Element* data, u64 count, const u32* position, const Element* value) {
    for (u64 i = thread_of_grid(); i < count; i += u64(gridDim.x) * PATCH_THREADS) data[position[i]] = value[i];
}
