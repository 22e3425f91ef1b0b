// Merge and reselect: the sum of two index-sorted vectors, its top-k, and what was rejected. Three launches.
//
//   merge    the union, in order, equal indices added; its keys counted    reads both, writes the union
//   refine   the k-th key of it (emit.cuh)                                 reads the union's values
//   emit     the k winners and the others, both in order (emit.cuh)        reads and writes the union
//
// Balanced merge path (Green, McColl & Bader, 2012): every block takes MERGE_TILE places of the merged order, in which
// of equal indices a's comes first. a's entry takes b's value with it, and b's is passed over, also where a block or a
// thread ends between the two: each looks one entry ahead in b and one back in a. Numbers of entries may stand in device
// memory, where the last call left them. 56 bytes per k with 8-byte entries, most of them in the L2. Deterministic.
#include "emit.cuh"

using namespace sparsecomm;

namespace {

using Index = INDEX;
using Value = ACC::Accumulator;
constexpr u32 MERGE_TILE = MERGE_THREADS * MERGE_ITEMS;
constexpr u32 SHIFT = KEY_BITS<Key> - 12;  // bins over the whole range of keys
static_assert(BINS == 1u << 12, "bins by the 12 highest bits of keys");

// How many of a's entries are among the first `place` of the merged order. All lanes of a warp call it, for one place:
// 32 probes at a time.
DEVICE u64 split(const Index* a, u64 a_count, const Index* b, u64 b_count, u64 place) {
    const u32 lane = threadIdx.x % WARP;
    u64 low = place > b_count ? place - b_count : 0, high = place < a_count ? place : a_count;
    while (low < high) {  // the least i with a[i] > b[place - 1 - i], that is: which of a's are not among the first
        const u64 step = (high - low + WARP - 1) / WARP, i = low + lane * step;
        const bool among = i < high && a[i] <= b[place - 1 - i];
        const u32 count = u32(__popc(__ballot_sync(ALL_LANES, among)));
        if (count == 0) return low;
        const u64 next = low + (count - 1) * step + 1;
        high = low + count * step < high ? low + count * step : high;
        low = next;
    }
    return low;
}

}  // namespace

KERNEL void __launch_bounds__(MERGE_THREADS)
merge(const Index* a_indices, const Value* a_values, u64 a_given, const u64* a_counted, const Index* b_indices,
      const Value* b_values, u64 b_given, const u64* b_counted, u64 k, Index* indices, Key* bits, LookBack* tiles,
      Selection* s) {
    struct Tile {  // one more of b ahead, one more of a back
        Index a[MERGE_TILE + 1], b[MERGE_TILE + 1];
        u64 a_begin, a_end;
    };
    SHARED(Tile, tile);
    const u64 a_count = a_counted ? *a_counted : a_given, b_count = b_counted ? *b_counted : b_given;
    const u64 total = a_count + b_count;
    const u32 number = tile_ticket(tiles), warp = threadIdx.x / WARP;
    const u64 begin = u64(number) * MERGE_TILE;
    if (begin < total) {
        const u64 end = begin + MERGE_TILE < total ? begin + MERGE_TILE : total;
        if (warp < 2) {
            const u64 found = split(a_indices, a_count, b_indices, b_count, warp == 0 ? begin : end);
            if (threadIdx.x % WARP == 0) (warp == 0 ? tile.a_begin : tile.a_end) = found;
        }
        __syncthreads();
        const u64 a_begin = tile.a_begin, a_size = tile.a_end - a_begin;
        const u64 b_begin = begin - a_begin, b_size = end - begin - a_size;
        for (u64 i = threadIdx.x; i < a_size + 1; i += MERGE_THREADS)  // a[0] is the one before
            tile.a[i] = a_begin + i > 0 ? a_indices[a_begin + i - 1] : Index(-1);
        for (u64 i = threadIdx.x; i < b_size + 1; i += MERGE_THREADS)  // b[b_size] is the next one
            tile.b[i] = b_begin + i < b_count ? b_indices[b_begin + i] : Index(-1);
        __syncthreads();

        // This thread's places within the tile, and where a and b stand there.
        const u64 size = a_size + b_size;
        const u64 place = u64(threadIdx.x) * MERGE_ITEMS < size ? u64(threadIdx.x) * MERGE_ITEMS : size;
        u64 low = place > b_size ? place - b_size : 0, high = place < a_size ? place : a_size;
        while (low < high) {
            const u64 middle = (low + high) / 2;
            if (tile.a[middle + 1] <= tile.b[place - 1 - middle])
                low = middle + 1;
            else
                high = middle;
        }
        u64 i = low, j = place - low;
        Index where[MERGE_ITEMS];
        Value sum[MERGE_ITEMS];
        u32 count = 0;
        UNROLL
        for (u32 item = 0; item < MERGE_ITEMS; item++) {
            sum[item] = 0;
            where[item] = 0;
            if (place + item >= size) continue;
            const bool from_a = i < a_size && (j >= b_size || tile.a[i + 1] <= tile.b[j]);
            if (from_a) {
                where[item] = tile.a[i + 1];
                sum[item] = a_values[a_begin + i];
                if (b_begin + j < b_count && tile.b[j] == where[item]) sum[item] += b_values[b_begin + j];
                i++;
            } else {
                where[item] = tile.b[j];
                if (a_begin + i == 0 || tile.a[i] != where[item]) sum[item] = b_values[b_begin + j];
                j++;
            }
            count += sum[item] != 0;
        }
        u32 all;
        const u32 within = block_scan<MERGE_THREADS>(count, &all);
        const u64 before = exclusive_prefix(tiles, number, all);
        u64 to = before + within;
        UNROLL
        for (u32 item = 0; item < MERGE_ITEMS; item++) {
            if (sum[item] == 0) continue;
            const Key found = canonical<ACC>(ACC::narrow(sum[item]));
            indices[to] = where[item];
            bits[to] = found;
            count_key(s, sparsecomm::key_of(found, ACC::infinity), 0, SHIFT);
            to++;
        }
        if (threadIdx.x == 0 && end == total) s->count = before + all;
    }
    if (!leave(tiles, gridDim.x)) return;
    if (threadIdx.x == 0) {
        s->threshold = 0;
        s->shift = SHIFT;
        s->retry = 0;
    }
    pick_bin<MERGE_THREADS>(s, total ? s->count : 0, k);
}
