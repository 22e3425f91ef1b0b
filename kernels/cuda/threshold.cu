// Writes every entry whose key is at least a threshold, in order of index, up to a capacity, and counts them. One launch.
//
// Any number of blocks. Reads the data once and writes the entries. NaN has the largest key. Zeros have key 0 and are never
// selected. Deterministic.
//
//   x          [in]      n elements; with RESIDUAL may be null, to filter the residual unchanged
//   residual   [in,out]  r = r + x, with 0 at the entries written. Not used unless RESIDUAL
//   n          [in]      number of elements
//   aligned    [in]      whether the addresses of x and residual are multiples of 16
//   threshold  [in]      the smallest key of an entry, at least 1
//   capacity   [in]      maximum entries written; later ones remain in the residual
//   indices    [out]     indices of the entries
//   values     [out]     values of the entries, in the accumulator type
//   count      [out]     number of entries that reach the threshold; may exceed `capacity`. Not written for n = 0
//   look_back  [in,out]  see lookback.cuh
#include "filter.cuh"

using namespace sparsecomm;

KERNEL void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
threshold(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, Index* indices,
          Acc::Accumulator* values, u64* count, LookBack* look_back) {
    const auto take = [&](u64 to, u64 i, AccBits found) {
        indices[to] = Index(i);
        values[to] = value_of(found);
    };
    const u64 total = filter_tiles(x, residual, n, aligned, threshold, capacity, FILTER_ROUNDS, look_back, take);
    if (threadIdx.x == 0 && total != NOT_LAST_TILE) *count = total;
    reset_after_last_block(look_back, filter_tile_count(n, FILTER_ROUNDS));
}
