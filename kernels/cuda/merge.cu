// Merge and reselect: the sum of two vectors sorted by index, split into its top-k and the rest. Two launches.
//
//   merge    writes the sum in order, and counts its keys                reads both vectors, writes the sum
//   emit     finds the k-th key, and writes the k winners and the        reads the sum two or three times, writes it
//            rest, in order (emit.cuh)
//
// Balanced merge path (Green, McColl & Bader, 2012): every block takes MERGE_TILE positions of the merged order, in which
// a's entry comes before b's entry with the same index. a's entry adds b's value (a + b, in that order), and b's entry is
// skipped, even if they are in different blocks or threads: each looks one entry ahead in b and one back in a. Zero sums are
// omitted. If users have changed indices, so that they are out of order, the sum is meaningless, but no other memory is
// accessed. Winners are those of topk.cu; k above the number of sums keeps all. Moves 56 bytes per k with 8-byte entries,
// partly in the L2. Deterministic.
#include "emit.cuh"

using namespace sparsecomm;

namespace {

using Index = INDEX;
using Value = ACC::Accumulator;
constexpr u32 MERGE_TILE = MERGE_THREADS * MERGE_ITEMS;
constexpr u32 SHIFT = sizeof(Key) == 8 ? 44 : 15;  // bins of 1/256 octave, because values often span few octaves
constexpr u64 OCTAVE = 1ull << (SHIFT + 8);

// Returns the key at which bins begin, so that the last bin ends an octave above the greatest of 64 sampled finite values.
// All lanes of a warp call it.
DEVICE u64 first_bin(const Value* a, u64 a_count, const Value* b, u64 b_count) {
    const u32 lane = threadIdx.x % WARP;
    u64 greatest = 0;
    for (u32 which = 0; which < 2; which++) {
        const u64 count = which ? b_count : a_count;
        if (count == 0) continue;
        const u64 key = sparsecomm::key_of(ACC::narrow((which ? b : a)[u64(lane) * count / WARP]), ACC::infinity);
        if (key > greatest && key < ACC::infinity) greatest = key;
    }
    for (u32 with = WARP / 2; with > 0; with /= 2) {
        const u64 other = __shfl_xor_sync(ALL_LANES, greatest, with);
        if (other > greatest) greatest = other;
    }
    const u64 end = greatest + OCTAVE, all = u64(BINS) << SHIFT;
    return end > all ? end - all : 0;
}

// Returns how many of a's entries are among the first `position` of the merged order. All lanes of a warp call it for one
// position; each step probes 32 candidates.
DEVICE u64 merge_path(const Index* a, u64 a_count, const Index* b, u64 b_count, u64 position) {
    const u32 lane = threadIdx.x % WARP;
    u64 low = position > b_count ? position - b_count : 0, high = position < a_count ? position : a_count;
    while (low < high) {  // find the smallest i with a[i] > b[position - 1 - i]
        const u64 step = (high - low + WARP - 1) / WARP, i = low + lane * step;
        const bool among = i < high && a[i] <= b[position - 1 - i];
        const u32 count = u32(__popc(__ballot_sync(ALL_LANES, among)));
        if (count == 0) return low;
        const u64 next = low + (count - 1) * step + 1;
        high = low + count * step < high ? low + count * step : high;
        low = next;
    }
    return low;
}

}  // namespace

// Writes the sum. One block per MERGE_TILE of the maximum entries of both together.
//
//   a_indices, a_values, b_indices, b_values  [in]      entries in order of index
//   a_host_count, b_host_count                [in]      number of entries, unless overridden:
//   a_device_count, b_device_count            [in]      number of entries in device memory; or null
//   k                                         [in]      entries to keep
//   indices, bits                             [out]     the sum in order of index; room for all entries of both
//   look_back                                 [in,out]  see lookback.cuh
//   selection                                 [out]     count, first, last, rank, retry = 0
KERNEL void __launch_bounds__(MERGE_THREADS)
merge(const Index* a_indices, const Value* a_values, u64 a_host_count, const u64* a_device_count, const Index* b_indices,
      const Value* b_values, u64 b_host_count, const u64* b_device_count, u64 k, Index* indices, Key* bits, LookBack* look_back,
      Selection* selection) {
    struct Tile {  // with the next entry of b and the previous entry of a
        Index a[MERGE_TILE + 1], b[MERGE_TILE + 1];
        u64 a_begin, a_end;
        u64 threshold;   // not in registers, which are scarce
        Bins keys;
    };
    SHARED(Tile, tile);
    const u64 a_count = a_device_count ? *a_device_count : a_host_count, b_count = b_device_count ? *b_device_count : b_host_count;
    const u64 total = a_count + b_count;
    const u32 warp = threadIdx.x / WARP;
    if (warp == 1) {  // while warp 0 waits for the ticket
        const u64 first = first_bin(a_values, a_count, b_values, b_count);
        if (threadIdx.x == WARP) tile.threshold = first;
    }
    const u32 ticket = tile_ticket(look_back);  // its barrier shows all threads the threshold
    const u64 begin = u64(ticket) * MERGE_TILE;
    if (begin < total) {
        clear<MERGE_THREADS>(tile.keys);
        const u64 end = begin + MERGE_TILE < total ? begin + MERGE_TILE : total;
        if (warp < 2) {
            const u64 found = merge_path(a_indices, a_count, b_indices, b_count, warp == 0 ? begin : end);
            if (threadIdx.x % WARP == 0) (warp == 0 ? tile.a_begin : tile.a_end) = found;
        }
        __syncthreads();
        const u64 a_begin = tile.a_begin, a_end = tile.a_end < a_begin ? a_begin : tile.a_end;
        const u64 a_size = a_end - a_begin < end - begin ? a_end - a_begin : end - begin;
        const u64 b_begin = begin - a_begin, b_size = end - begin - a_size;
        for (u64 i = threadIdx.x; i < a_size + 1; i += MERGE_THREADS)  // a[0] is the previous entry
            tile.a[i] = a_begin + i > 0 ? a_indices[a_begin + i - 1] : Index(-1);
        for (u64 i = threadIdx.x; i < b_size + 1; i += MERGE_THREADS)  // b[b_size] is the next entry
            tile.b[i] = b_begin + i < b_count ? b_indices[b_begin + i] : Index(-1);
        __syncthreads();

        // Find this thread's first position within the tile, and the entries i of a and j of b there.
        const u64 size = a_size + b_size;
        const u64 position = u64(threadIdx.x) * MERGE_ITEMS < size ? u64(threadIdx.x) * MERGE_ITEMS : size;
        u64 low = position > b_size ? position - b_size : 0, high = position < a_size ? position : a_size;
        while (low < high) {
            const u64 middle = (low + high) / 2;
            if (tile.a[middle + 1] <= tile.b[position - 1 - middle])
                low = middle + 1;
            else
                high = middle;
        }
        u64 i = low, j = position - low;
        Index where[MERGE_ITEMS];
        Value sum[MERGE_ITEMS];
        u32 count = 0;
        UNROLL
        for (u32 item = 0; item < MERGE_ITEMS; item++) {
            sum[item] = 0;
            where[item] = 0;
            if (position + item >= size) continue;
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
        const u64 before = exclusive_prefix(look_back, ticket, all);
        u64 to = before + within;
        UNROLL
        for (u32 item = 0; item < MERGE_ITEMS; item++) {
            if (sum[item] == 0) continue;
            const Key found = canonical<ACC>(ACC::narrow(sum[item]));
            indices[to] = where[item];
            bits[to] = found;
            atomicAdd(&tile.keys.of[bin_of<BINS>(sparsecomm::key_of(found, ACC::infinity), tile.threshold, SHIFT)], 1u);
            to++;
        }
        __syncthreads();
        add<MERGE_THREADS>(selection, tile.keys);
        if (threadIdx.x == 0 && end == total) selection->count = before + all;
    }
    if (!reset_after_last_block(look_back, gridDim.x)) return;
    const u64 count = total ? selection->count : 0;
    if (threadIdx.x == 0) {
        if (!total) selection->count = 0;
        selection->retry = 0;
    }
    pick_bin<MERGE_THREADS>(selection, count <= k, 1, tile.threshold, MAX_KEY<Key>, SHIFT, k);
}
