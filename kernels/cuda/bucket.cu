// Work on all tensors of a bucket in one launch: gradients into the residual, AdamW's steps, and results into tensors.
//
// A table describes the tensors, in the order of their first elements in the flat vectors of the bucket. A tensor may have any
// format whose accumulator is REAL, the type of all other numbers. Elements are the work of one block per tile of TILE elements
// of one tensor, entries that of one thread each. Grids: any number of blocks. Deterministic.
#include "adamw.hpp"
#include "search.cuh"

using namespace sparsecomm;

namespace {

using Real = REAL;
using Index = INDEX;

constexpr bool DOUBLE = sizeof(Real) == 8;
using Exponent = UnitExponent<Real>;
constexpr u32 AT_ONCE = 4;  // elements that a thread loads before it uses them
static_assert(SQUARES_LANES == DENSE_THREADS, "one lane of a sum of squares per thread");

// A tensor, as in sparsecomm/backends/cuda/bucket.py.
struct Source {
    u64 begin, size, first_tile;  // its first element in the bucket, its elements, and the tiles of the tensors before it
    void* x;
    const Real* minuend;        // or null
    const Exponent* exponents;  // or null
    double scale;
    u64 type;
};

// The part of a tensor that makes a step of AdamW, as in sparsecomm/backends/cuda/bucket.py.
struct Part {
    u64 begin, size;
    void* x;  // weights
    Real *mean, *squares;
    i32* last;
    Real* compensation;  // or null
    const Real* rows;    // 6 coefficients each
    u64 num_rows;
    double unit_eps, eps, limit;
    i64 step;
    u64 type;
};

template <class X>
DEVICE Real get(const void* x, u64 i) {
    return X::widen(static_cast<const typename X::Bits*>(x)[i]);
}
DEVICE Real get(const void* x, u64 type, u64 i) {
    if constexpr (DOUBLE) return get<F64>(x, i);
    else return type == u64(Type::f32) ? get<F32>(x, i) : type == u64(Type::bf16) ? get<BF16>(x, i) : get<F16>(x, i);
}

// Sets x[i] to a value, rounded to nearest even. Returns the rounded value.
template <class X>
DEVICE Real put(void* x, u64 i, Real value, bool one_nan) {
    const auto bits = X::narrow(value);
    static_cast<typename X::Bits*>(x)[i] = one_nan ? canonical<X>(bits) : bits;
    return X::widen(bits);
}
DEVICE Real put(void* x, u64 type, u64 i, Real value, bool one_nan = true) {
    if constexpr (DOUBLE) return put<F64>(x, i, value, one_nan);
    else
        return type == u64(Type::f32)    ? put<F32>(x, i, value, one_nan)
               : type == u64(Type::bf16) ? put<BF16>(x, i, value, one_nan)
                                         : put<F16>(x, i, value, one_nan);
}

DEVICE Real rounded_to(u64 type, Real value) {
    if constexpr (DOUBLE) return value;
    else
        return type == u64(Type::f32)    ? value
               : type == u64(Type::bf16) ? BF16::widen(BF16::narrow(value))
                                         : F16::widen(F16::narrow(value));
}

// Returns the last of `count` rows whose `field` is at most `at`. The first row's always is.
template <class Row>
DEVICE const Row* row_of(const Row* rows, u64 count, u64 Row::* field, u64 at) {
    u64 low = 0, high = count;
    while (high - low > 1) {
        const u64 middle = low + (high - low) / 2;
        (rows[middle].*field <= at ? low : high) = middle;
    }
    return rows + low;
}

// Elements of a tensor: [begin, end) of `row`.
template <class Row>
struct Tile {
    const Row* row;
    u64 begin, end;
};
template <class Row>
DEVICE Tile<Row> tile_of(const Row* rows, u64 count, u64 tile) {
    const Row* row = row_of(rows, count, &Row::first_tile, tile);
    const u64 begin = (tile - row->first_tile) * TILE, end = begin + TILE;
    return {row, begin, end < row->size ? end : row->size};
}

struct Addend {
    Real scaled, value;
};
template <class X>
DEVICE Addend addend_of(const Source& s, u64 i) {
    const Real x = get<X>(s.x, i), scaled = Real(s.scale) * x;
    return {scaled, s.exponents ? scaled / unit_of<Real>(s.exponents[i]) : s.minuend ? s.minuend[i] - x : scaled};
}

template <class X>
DEVICE bool addends_are_finite(const Tile<Source>& t) {
    const Source s = *t.row;
    bool good = true;
    for (u64 i = t.begin + threadIdx.x; i < t.end; i += DENSE_THREADS) {
        // With the smallest unit, too, the quotient is finite: do not read the unit.
        if (s.exponents && absolute(Real(s.scale) * get<X>(s.x, i)) < Real(2)) continue;
        const Addend a = addend_of<X>(s, i);
        good &= is_finite(a.value) && (!s.exponents || is_finite(a.scaled * a.scaled));
    }
    return good;
}

template <class X>
DEVICE void add_tile(const Tile<Source>& t, Real decay, Real momentum, Real* residual, Real* velocity) {
    const Source s = *t.row;  // in registers, although the stores might change it
    residual += s.begin;
    if (velocity) velocity += s.begin;
    for (u64 from = t.begin + threadIdx.x; from < t.end; from += AT_ONCE * DENSE_THREADS) {
        Real value[AT_ONCE], sum[AT_ONCE];
        UNROLL
        for (u32 c = 0; c < AT_ONCE; c++) {
            const u64 i = from + c * DENSE_THREADS;
            if (i >= t.end) continue;
            value[c] = addend_of<X>(s, i).value;
            sum[c] = residual[i];
        }
        UNROLL
        for (u32 c = 0; c < AT_ONCE; c++) {
            const u64 i = from + c * DENSE_THREADS;
            if (i >= t.end) continue;
            if (velocity) {
                Real& v = velocity[i];
                value[c] = v = momentum * v + value[c];
            }
            residual[i] = decay * sum[c] + value[c];
        }
    }
}

}  // namespace

// Adds 1 to the flag of a source in every thread that finds an addend of it that is not finite; or, with units, the square of
// scale * x.
//
//   sources  [in]      `count` rows, with `tiles` tiles
//   flags    [in,out]  one per source
KERNEL void __launch_bounds__(DENSE_THREADS) check_addends(const Source* sources, u64 count, u64 tiles, u32* flags) {
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Tile<Source> t = tile_of(sources, count, tile);
        bool good;
        if constexpr (DOUBLE) good = addends_are_finite<F64>(t);
        else if (t.row->type == u64(Type::f32)) good = addends_are_finite<F32>(t);
        else if (t.row->type == u64(Type::bf16)) good = addends_are_finite<BF16>(t);
        else good = addends_are_finite<F16>(t);
        if (!good) atomicAdd(flags + (t.row - sources), 1u);
    }
}

// residual = decay * residual + addend, or with velocities: velocity = momentum * velocity + addend, then residual = decay *
// residual + velocity. Rounds each operation.
//
//   sources             [in]      `count` rows, with `tiles` tiles
//   flags               [in]      sources with a flag are left out; or null
//   residual, velocity  [in,out]  elements of the bucket; velocity may be null
KERNEL void __launch_bounds__(DENSE_THREADS)
add_addends(const Source* sources, u64 count, u64 tiles, const u32* flags, Real decay, Real momentum, Real* residual,
            Real* velocity) {
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Tile<Source> t = tile_of(sources, count, tile);
        if (flags && flags[t.row - sources]) continue;
        if constexpr (DOUBLE) add_tile<F64>(t, decay, momentum, residual, velocity);
        else if (t.row->type == u64(Type::f32)) add_tile<F32>(t, decay, momentum, residual, velocity);
        else if (t.row->type == u64(Type::bf16)) add_tile<BF16>(t, decay, momentum, residual, velocity);
        else add_tile<F16>(t, decay, momentum, residual, velocity);
    }
}

// Sums the squares of each tile: see `Backend.sums_of_squares`.
//
//   sources  [in]   `count` rows, with `tiles` tiles
//   sums     [out]  one per tile
KERNEL void __launch_bounds__(DENSE_THREADS) sum_squares(const Source* sources, u64 count, u64 tiles, double* sums) {
    struct Sums {
        double of_lane[SQUARES_LANES];
    };
    SHARED(Sums, shared);
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Tile<Source> t = tile_of(sources, count, tile);
        double sum = 0;
        for (u64 i = t.begin + threadIdx.x; i < t.end; i += DENSE_THREADS) {
            const double x = double(get(t.row->x, t.row->type, i));
            sum += x * x;
        }
        shared.of_lane[threadIdx.x] = sum;
        for (u32 width = SQUARES_LANES / 2; width > 0; width /= 2) {
            __syncthreads();
            if (threadIdx.x < width) shared.of_lane[threadIdx.x] += shared.of_lane[threadIdx.x + width];
        }
        if (threadIdx.x == 0) sums[tile] = shared.of_lane[0];
        __syncthreads();  // all threads have used the sums
    }
}

// x[i] += value, in the accumulator type, rounded once, in the tensor that has the entry; entries of no tensor are ignored.
//
//   sources                   [in]  `count` rows; x [in,out]
//   indices, values           [in]  entries
//   host_count, device_count  [in]  number of entries: as in dense.cu
KERNEL void __launch_bounds__(DENSE_THREADS)
add_entries(const Source* sources, u64 count, const Index* indices, const Real* values, u64 host_count, const u64* device_count) {
    const u64 entries = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < entries; e += grid_threads()) {
        const Source& s = *row_of(sources, count, &Source::begin, u64(indices[e]));
        const u64 i = u64(indices[e]) - s.begin;
        if (u64(indices[e]) >= s.begin && i < s.size) put(s.x, s.type, i, get(s.x, s.type, i) + values[e]);
    }
}

// x = 0, then x[i] = value, rounded to nearest even, in the tensor that has the entry. As `densify` of dense.cu.
//
//   sources                   [in]  `count` rows, with `tiles` tiles; x [out]
//   dense                     [in]  a value for each element of the bucket, instead of entries; or null
//   indices, values           [in]  entries in order of index
//   host_count, device_count  [in]  number of entries
KERNEL void __launch_bounds__(DENSE_THREADS)
write_entries(const Source* sources, u64 count, u64 tiles, const Real* dense, const Index* indices, const Real* values, u64 host_count,
      const u64* device_count) {
    struct Shared {
        Real element[TILE];
        u64 begin, end;  // positions of the tile's entries
    };
    SHARED(Shared, shared);
    const u64 entries = device_count ? *device_count : host_count;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const Tile<Source> t = tile_of(sources, count, tile);
        const u64 first = t.row->begin + t.begin, size = t.end - t.begin;
        if (!dense) {
            if (threadIdx.x < 2 * WARP) {
                const u32 warp = threadIdx.x / WARP;
                const u64 found = warp_lower_bound(indices, entries, warp == 0 ? first : first + size);
                if (threadIdx.x % WARP == 0) (warp == 0 ? shared.begin : shared.end) = found;
            }
            for (u64 i = threadIdx.x; i < size; i += DENSE_THREADS) shared.element[i] = 0;
            __syncthreads();
            for (u64 e = shared.begin + threadIdx.x; e < shared.end; e += DENSE_THREADS) {
                const u64 i = u64(indices[e]) - first;
                if (i < size) shared.element[i] = values[e];
            }
            __syncthreads();
        }
        for (u64 i = threadIdx.x; i < size; i += DENSE_THREADS)
            put(t.row->x, t.row->type, t.begin + i, dense ? dense[first + i] : shared.element[i], false);  // cleared by this thread
    }
}

// Makes all steps of weights since their last update: `Backend.adamw`, or without indices `Backend.adamw_dense`.
//
//   parts            [in]      `count` rows
//   exponents        [in]      of the units of all elements of the bucket
//   indices, values  [in]      entries with indices of the bucket; no indices: one entry for each element from `begin` on
//   host_count, device_count  [in]  number of entries: as in dense.cu
//   new_*, changes   [out]     one element per entry
//   jumps            [out]     changes of exponents, or OVERFLOWS
//   rounded          [out]     rounded weights, or NaN where the step overflows, for entries of a part; may be `values`; or null
//   faults           [in,out]  [0] counts threads that find an overflow, [1] threads that find a sum that is not finite
KERNEL void __launch_bounds__(DENSE_THREADS)
adamw(const Part* parts, u64 count, const Exponent* exponents, const Index* indices, const Real* values, u64 host_count,
      const u64* device_count, u64 begin, Real margin, Real* new_weights, Real* new_mean, Real* new_squares, Real* changes,
      signed char* jumps, Real* rounded, u32* faults) {
    const u64 entries = device_count ? *device_count : host_count;
    bool overflows = false, finite = true;
    for (u64 e = grid_thread(); e < entries; e += grid_threads()) {
        const u64 index = indices ? u64(indices[e]) : begin + e;
        const Part& p = *row_of(parts, count, &Part::begin, index);
        const u64 i = index - p.begin;
        if (index < p.begin || i >= p.size) continue;
        const Real *c = p.rows + 6 * row_of(p.step, p.last[i], p.num_rows), value = values[e], before = get(p.x, p.type, i);
        const Unit<Real>::Integer unit = exponents[index];
        Real weight = p.compensation ? before + p.compensation[i] : before, mean = p.mean[i], square = p.squares[i];
        adamw_step(weight, mean, square, value * unit_of<Real>(unit), c[0], c[1], c[2], c[3], c[4], c[5], Real(p.eps));
        const AdamWLimits<Real> limits{Real(p.eps), Real(p.unit_eps), Real(p.limit), margin};
        const int jump = jump_of(weight, mean, square, before, unit, limits);
        overflows |= jump == OVERFLOWS;
        finite &= is_finite(value);
        jumps[e] = (signed char)(jump);
        new_weights[e] = weight;
        new_mean[e] = mean;
        new_squares[e] = square;
        if (changes) changes[e] = weight - before;
        if (rounded) rounded[e] = jump == OVERFLOWS ? Real(F32::widen(F32::nan)) : rounded_to(p.type, weight);
    }
    if (overflows) atomicAdd(faults, 1u);
    if (!finite) atomicAdd(faults + 1, 1u);
}

// Stores results of `adamw`: `Backend.store_adamw`.
//
//   parts                     [in]      as in `adamw`; what they point to [in,out]; weights are written if `write`
//   exponents                 [in,out]  of units, which jump where the weight changes; or null
//   indices, host_count, device_count, begin  [in]  as in `adamw`
//   new_*, changes, jumps     [in]      as in `adamw`
KERNEL void __launch_bounds__(DENSE_THREADS)
store_adamw(const Part* parts, u64 count, Exponent* exponents, const Index* indices, u64 host_count, const u64* device_count,
            u64 begin, const Real* new_weights, const Real* new_mean, const Real* new_squares, const Real* changes,
            const signed char* jumps, bool write) {
    const u64 entries = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < entries; e += grid_threads()) {
        const u64 index = indices ? u64(indices[e]) : begin + e;
        const Part& p = *row_of(parts, count, &Part::begin, index);
        const u64 i = index - p.begin;
        if (index < p.begin || i >= p.size) continue;
        if (write) put(p.x, p.type, i, new_weights[e]);
        if (p.compensation) p.compensation[i] = compensation_of(new_weights[e], get(p.x, p.type, i));
        p.mean[i] = new_mean[e];
        p.squares[i] = new_squares[e];
        p.last[i] = i32(p.step);
        if (exponents && changes[e] != 0) exponents[index] = jumped<Real>(exponents[index], jumps[e]);
    }
}

// Adds changes to exponents of units, and converts residuals: `Backend.change_units`.
//
//   residual, exponents       [in,out]  elements, more than the last index
//   indices, values           [in]      changes, which are rounded to integers
//   host_count, device_count  [in]      their number: as in dense.cu
KERNEL void __launch_bounds__(DENSE_THREADS)
change_units(Real* residual, Exponent* exponents, const Index* indices, const Real* values, u64 host_count,
             const u64* device_count) {
    const u64 count = device_count ? *device_count : host_count;
    for (u64 e = grid_thread(); e < count; e += grid_threads()) {
        const u64 i = u64(indices[e]);
        change_unit(residual[i], exponents[i], values[e]);
    }
}
