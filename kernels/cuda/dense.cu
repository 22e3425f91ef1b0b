// Between sparse and dense: densify, scatter_add; and dense sums, element by element.
//
// Compiled for X, the format of the dense memory, and INDEX; entries are in X's accumulator, whose format is ACC. Numbers of
// entries may stand in device memory. Grids: one block per DENSIFY_TILE elements for densify, any number for the others.
// No atomics: the indices of a vector are all different.
#include "lookback.cuh"
#include "tuning.cuh"

using namespace sparsecomm;

namespace {

using X = FORMAT;
using Bits = X::Bits;
using Index = INDEX;
using Value = X::Accumulator;

DEVICE u64 first_of_grid() { return u64(blockIdx.x) * DENSE_THREADS + threadIdx.x; }
DEVICE u64 grid_size() { return u64(gridDim.x) * DENSE_THREADS; }

// The first of `count` indices that is at least `from`.
DEVICE u64 lower_bound(const Index* indices, u64 count, u64 from) {
    u64 low = 0, high = count;
    while (low < high) {
        const u64 middle = low + (high - low) / 2;
        if (u64(indices[middle]) < from)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

}  // namespace

// out = 0, then out[index] = value rounded. Writes every element once: n elements and 2 searches per tile.
KERNEL void __launch_bounds__(DENSE_THREADS)
densify(Bits* out, u64 n, bool aligned, const Index* indices, const Value* values, u64 given, const u64* counted) {
    struct Tile {
        alignas(16) Bits element[DENSIFY_TILE];
        u64 begin, end;  // of its entries
    };
    SHARED(Tile, tile);
    const u64 count = counted ? *counted : given, first = u64(blockIdx.x) * DENSIFY_TILE;
    const u64 size = n - first < DENSIFY_TILE ? n - first : DENSIFY_TILE;
    if (threadIdx.x == 0) tile.begin = lower_bound(indices, count, first);
    if (threadIdx.x == WARP) tile.end = lower_bound(indices, count, first + size);
    for (u64 i = threadIdx.x; i < DENSIFY_TILE; i += DENSE_THREADS) tile.element[i] = 0;
    __syncthreads();
    for (u64 e = tile.begin + threadIdx.x; e < tile.end; e += DENSE_THREADS)
        tile.element[u64(indices[e]) - first] = X::narrow(values[e]);
    __syncthreads();
    constexpr u32 VECTOR = sizeof(Chunk) / sizeof(Bits);
    if (aligned && size == DENSIFY_TILE) {
        const Chunk* from = reinterpret_cast<const Chunk*>(tile.element);
        Chunk* to = reinterpret_cast<Chunk*>(out + first);
        for (u32 c = threadIdx.x; c < DENSIFY_TILE / VECTOR; c += DENSE_THREADS) to[c] = from[c];
    } else {
        for (u64 i = threadIdx.x; i < size; i += DENSE_THREADS) out[first + i] = tile.element[i];
    }
}

// dense[index] += value, in the accumulator, rounded once.
KERNEL void __launch_bounds__(DENSE_THREADS)
scatter_add(Bits* dense, const Index* indices, const Value* values, u64 given, const u64* counted) {
    const u64 count = counted ? *counted : given;
    for (u64 e = first_of_grid(); e < count; e += grid_size()) {
        Bits* to = dense + u64(indices[e]);
        *to = canonical<X>(X::narrow(X::widen(*to) + values[e]));
    }
}

// sum = x, or residual + x as it would be stored; in the accumulator. ACC: the residual's format.
KERNEL void __launch_bounds__(DENSE_THREADS)
widen(const Bits* x, const ACC::Bits* residual, u64 n, Value* sum) {
    for (u64 i = first_of_grid(); i < n; i += grid_size()) {
        const Value v = X::widen(x[i]);
        sum[i] = residual ? ACC::widen(ACC::narrow(ACC::widen(residual[i]) + v)) : v;
    }
}

// sum += addend.
KERNEL void __launch_bounds__(DENSE_THREADS) add(Value* sum, const Value* addend, u64 n) {
    for (u64 i = first_of_grid(); i < n; i += grid_size()) sum[i] += addend[i];
}

// dense = values, rounded; zeros if there are no values.
KERNEL void __launch_bounds__(DENSE_THREADS) narrow(const Value* values, u64 n, Bits* dense) {
    for (u64 i = first_of_grid(); i < n; i += grid_size()) dense[i] = values ? X::narrow(values[i]) : Bits(0);
}

// Quotients.
KERNEL void __launch_bounds__(DENSE_THREADS) divide(const Value* values, u64 given, const u64* counted, Value by, Value* to) {
    const u64 count = counted ? *counted : given;
    for (u64 e = first_of_grid(); e < count; e += grid_size()) to[e] = values[e] / by;
}

// Adds 1 to `faults` unless indices increase strictly within [0, n) and no value is zero.
KERNEL void __launch_bounds__(DENSE_THREADS)
well_formed(const Index* indices, const Value* values, u64 count, u64 n, u32* faults) {
    bool good = true;
    for (u64 e = first_of_grid(); e < count; e += grid_size()) {
        good &= values[e] != 0 && indices[e] >= 0 && u64(indices[e]) < n;
        good &= e == 0 || indices[e - 1] < indices[e];
    }
    if (!good) atomicAdd(faults, 1u);
}
