// Every entry from a key on, in order of index, up to a capacity; and how many there are in all. One launch.
//
// Any number of blocks. Reads the data once and writes the entries. NaN has the largest key, zeros the smallest,
// which is no threshold. Deterministic.
//
//   x          [in]      n elements; may be null beside a residual, which is then filtered as it is
//   residual   [in,out]  r = r + x, and 0 at the entries written. Not used unless RESIDUAL
//   n          [in]      elements
//   aligned    [in]      whether x and residual are at a multiple of 16 bytes
//   threshold  [in]      the smallest key of an entry, at least 1
//   capacity   [in]      entries for which there is room; later ones stay in the residual
//   indices    [out]     of the entries
//   values     [out]     of the entries, in the accumulator
//   count      [out]     entries that reach the threshold: may be above `capacity`. Not written for n = 0
//   look_back  [in,out]  see lookback.cuh
#include "filter.cuh"

using namespace sparsecomm;

KERNEL void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
threshold(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, Index* indices,
          Acc::Accumulator* values, u64* count, LookBack* look_back) {
    const u64 total = filter_tiles(x, residual, n, aligned, threshold, capacity, look_back, [&](u64 to, u64 i, AccBits found) {
        indices[to] = Index(i);
        values[to] = value_of(found);
    });
    if (threadIdx.x == 0 && total != NOT_LAST_TILE) *count = total;
    reset_after_last_block(look_back, filter_tile_count(n));
}
