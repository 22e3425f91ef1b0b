// Arithmetic between dense vectors and entries, and between dense vectors.
//
// Compiled for X (FORMAT), the format of the dense memory, and INDEX; values of entries have X's accumulator type. In
// `widen`, ACC is the residual's format. The number of entries may be in device memory: `device_count`, if not null,
// overrides `host_count`. Grids: one block per DENSIFY_TILE elements for densify, any number of blocks for other kernels.
// Deterministic: no atomics on data, because the indices of a vector are distinct.
#include "search.cuh"

using namespace sparsecomm;

namespace {

using X = FORMAT;
using Bits = X::Bits;
using Index = INDEX;
using Value = X::Accumulator;

}  // namespace

// out = 0, then out[index] = value, rounded to nearest even. Reads the entries once, after 2 searches per tile, and writes
// every element once. If users have changed the indices, entries that are out of order or not below n may be omitted.
//
//   out                       [out]  n elements
//   n                         [in]   number of elements
//   aligned                   [in]   whether the address of out is a multiple of 16
//   indices, values           [in]   entries in order of index
//   host_count, device_count  [in]   number of entries
KERNEL void __launch_bounds__(DENSE_THREADS)
densify(Bits* out, u64 n, bool aligned, const Index* indices, const Value* values, u64 host_count, const u64* device_count) {
    struct Tile {
        alignas(16) Bits element[DENSIFY_TILE];
        u64 begin, end;  // positions of its entries
    };
    SHARED(Tile, tile);
    const u64 count = device_count ? *device_count : host_count, first = u64(blockIdx.x) * DENSIFY_TILE;
    const u64 size = n - first < DENSIFY_TILE ? n - first : DENSIFY_TILE;
    if (threadIdx.x < 2 * WARP) {
        const u32 warp = threadIdx.x / WARP;
        const u64 found = warp_lower_bound(indices, count, warp == 0 ? first : first + size);
        if (threadIdx.x % WARP == 0) (warp == 0 ? tile.begin : tile.end) = found;
    }
    for (u64 i = threadIdx.x; i < DENSIFY_TILE; i += DENSE_THREADS) tile.element[i] = 0;
    __syncthreads();
    for (u64 e = tile.begin + threadIdx.x; e < tile.end; e += DENSE_THREADS) {
        const u64 i = u64(indices[e]) - first;
        if (i < size) tile.element[i] = X::narrow(values[e]);
    }
    __syncthreads();
    constexpr u32 VECTOR = sizeof(Vector) / sizeof(Bits);
    if (aligned && size == DENSIFY_TILE) {
        const Vector* from = reinterpret_cast<const Vector*>(tile.element);
        Vector* to = reinterpret_cast<Vector*>(out + first);
        for (u32 c = threadIdx.x; c < DENSIFY_TILE / VECTOR; c += DENSE_THREADS) to[c] = from[c];
    } else {
        for (u64 i = threadIdx.x; i < size; i += DENSE_THREADS) out[first + i] = tile.element[i];
    }
}

// dense[index] += value, in the accumulator type, rounded once.
//
//   dense                     [in,out]  elements, more than the last index
//   indices, values           [in]      entries
//   host_count, device_count  [in]      number of entries
KERNEL void __launch_bounds__(DENSE_THREADS)
scatter_add(Bits* dense, const Index* indices, const Value* values, u64 host_count, const u64* device_count) {
    const u64 count = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        Bits* to = dense + u64(indices[e]);
        *to = canonical<X>(X::narrow(X::widen(*to) + values[e]));
    }
}

// dense[index] = 0. Arguments as in scatter_add; values are not used.
KERNEL void __launch_bounds__(DENSE_THREADS)
clear(Bits* dense, const Index* indices, const Value* values, u64 host_count, const u64* device_count) {
    const u64 count = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) dense[u64(indices[e])] = 0;
}

// scatter_add for the entries whose index is among the others (if `present`), or is not among them. A block takes
// DENSE_THREADS entries at a time, finds the range of others between the first and the last of them, and each thread
// searches that range for its index. Reads the entries once.
//
//   dense                                [in,out]  elements, more than the last index
//   indices, values                      [in]      entries in order of index
//   host_count, device_count             [in]      number of entries
//   others                               [in]      indices in ascending order
//   other_host_count, other_device_count [in]      number of others
//   present                              [in]      add the entries among the others, or the entries not among them
KERNEL void __launch_bounds__(DENSE_THREADS)
scatter_add_where(Bits* dense, const Index* indices, const Value* values, u64 host_count, const u64* device_count,
                  const Index* others, u64 other_host_count, const u64* other_device_count, bool present) {
    struct Range {
        u64 begin, end;
    };
    SHARED(Range, range);
    const u64 count = device_count ? *device_count : host_count;
    const u64 other_count = other_device_count ? *other_device_count : other_host_count;
    for (u64 first = u64(blockIdx.x) * DENSE_THREADS; first < count; first += grid_threads()) {
        const u64 last = (first + DENSE_THREADS < count ? first + DENSE_THREADS : count) - 1;
        __syncthreads();  // all threads have used the previous range
        if (threadIdx.x < 2 * WARP) {
            const u32 warp = threadIdx.x / WARP;
            const u64 found = warp_lower_bound(others, other_count, warp == 0 ? u64(indices[first]) : u64(indices[last]) + 1);
            if (threadIdx.x % WARP == 0) (warp == 0 ? range.begin : range.end) = found;
        }
        __syncthreads();
        const u64 e = first + threadIdx.x;
        if (e > last) continue;
        const u64 found = range.begin + lower_bound(others + range.begin, range.end - range.begin, u64(indices[e]));
        if ((found < range.end && others[found] == indices[e]) != present) continue;
        Bits* to = dense + u64(indices[e]);
        *to = canonical<X>(X::narrow(X::widen(*to) + values[e]));
    }
}

// sum = x, or residual + x rounded to the residual's format (ACC), in the accumulator type.
//
//   x, residual  [in]   n elements each; residual may be null
//   sum          [out]  n elements
KERNEL void __launch_bounds__(DENSE_THREADS)
widen(const Bits* x, const ACC::Bits* residual, u64 n, Value* sum) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) {
        const Value v = X::widen(x[i]);
        sum[i] = residual ? ACC::widen(ACC::narrow(ACC::widen(residual[i]) + v)) : v;
    }
}

// sum += addend, n elements each, sum [in,out] and addend [in].
KERNEL void __launch_bounds__(DENSE_THREADS) add(Value* sum, const Value* addend, u64 n) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) sum[i] += addend[i];
}

// dense = values, rounded to nearest even; n elements each. values [in] may be null: zeros; dense [out].
KERNEL void __launch_bounds__(DENSE_THREADS) narrow(const Value* values, u64 n, Bits* dense) {
    for (u64 i = grid_thread(); i < n; i += grid_threads()) dense[i] = values ? X::narrow(values[i]) : Bits(0);
}

// to = values / by, or values / counts.
//
//   values                    [in]   values of entries
//   host_count, device_count  [in]   number of entries
//   by                        [in]   divisor if `counts` is null
//   counts                    [in]   one divisor per value; or null
//   to                        [out]  quotients, one per entry
KERNEL void __launch_bounds__(DENSE_THREADS)
divide(const Value* values, u64 host_count, const u64* device_count, Value by, const Value* counts, Value* to) {
    const u64 count = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) to[e] = values[e] / (counts ? counts[e] : by);
}

// Checks that indices increase strictly within [begin, end), and that no value is zero.
//
//   indices, values  [in]      entries
//   count            [in]      number of entries
//   begin, end       [in]      from 0 to the number of elements
//   faults           [in,out]  every thread that finds a fault adds 1
KERNEL void __launch_bounds__(DENSE_THREADS)
well_formed(const Index* indices, const Value* values, u64 count, u64 begin, u64 end, u32* faults) {
    bool good = true;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        good &= values[e] != 0 && indices[e] >= 0 && u64(indices[e]) >= begin && u64(indices[e]) < end;
        good &= e == 0 || indices[e - 1] < indices[e];
    }
    if (!good) atomicAdd(faults, 1u);
}
