// Every entry from a key on, in order, up to a capacity; and how many there are in all. One launch.
//
// Reads the data once and writes the entries; with a residual also r = r + x, and 0 at the entries that were written.
// One block per tile of filter.cuh. Deterministic.
#include "filter.cuh"

using namespace sparsecomm;

KERNEL void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
threshold(const XBits* x, AccBits* residual, u64 n, bool aligned, u64 threshold, u64 capacity, Index* indices,
          Acc::Accumulator* values, u64* count, LookBack* tiles) {
    const u64 upto = take_from(x, residual, n, aligned, threshold, capacity, tiles, [&](u64 to, u64 i, AccBits found) {
        indices[to] = Index(i);
        values[to] = value_of(found);
    });
    if (threadIdx.x == 0 && upto != NOT_LAST) *count = upto;
    leave(tiles, gridDim.x);
}
