// What the CPU kernels do. Plain C++: they know neither Python nor MPI.
//
// A dense vector is a pointer, a type and a number of elements. A sparse one is (indices, values): indices strictly
// increasing, int32 or, if `int64_indices`, int64; values in the accumulator of the dense type: float for f16, bf16 and
// f32, double for f64 (`float64_values`). A residual r has the type of x, or is f32 beside a 16-bit x. Sizes and counts are
// elements and entries, unless they are called bytes. `threads`: how many may work, the caller's included.
//
// The order of selection is (|v| descending, index ascending), NaN above infinity, zeros never selected; of ties at the
// k-th place the lower indices win. Results do not depend on `threads` or on the instruction set; callers are in the
// default mode of arithmetic (float_mode.hpp). No function keeps a pointer. Every NaN that is written to values is the
// quiet NaN of the format. Functions that allocate take a `scratch`, from which their memory comes and to which it returns, and
// throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../formats.hpp"
#include "buffer.hpp"

namespace sparsecomm {

struct Dense {
    void* data;
    Type type;
    size_t size;  // elements
};

struct Sparse {
    const void* indices;
    const void* values;
    size_t count;  // entries
};
struct SparseOut {
    void* indices;
    void* values;
    size_t count;  // entries; set by the function
};

// Selects the first k entries of x, or of r + x. Returns how many there are: min(k, non-zeros).
// One pass over the data: reads 4n bytes for f32; with r 8n, and writes 4n. Scratch memory O(k) per thread; if it cannot be
// had, nothing was written.
//
//   x                [in]      n elements
//   r                [in,out]  n elements, r = r + x, and 0 where an entry was selected; or null
//   k                [in]      entries to select; more than n are as n
//   indices, values  [out]     entries, in order of index; room for min(k, n)
size_t topk(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch);

// The same of x alone, which has zeros there afterwards.
size_t take_topk(Dense x, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch);

// Selects the first k entries of every `chunk` elements of x, or of decay * r + x; the last chunk may be shorter. Returns how
// many there are: the sum over chunks of min(k, non-zeros). One pass over the data, as `topk` has it, and what a chunk needs
// besides is done while it is in the cache. Product, sum and what is stored are each rounded. Scratch memory O(chunk) per
// thread; if it cannot be had, nothing was written.
//
//   x                [in]      n elements
//   r                [in,out]  n elements, r = decay * r + x, and 0 where an entry was selected; or null
//   k, chunk         [in]      1 <= k <= chunk; min(n, chunk) at most 2^31
//   indices, values  [out]     entries, in order of index; room for `chunk_room`
size_t topk_by_chunk(Dense x, Dense* r, size_t k, size_t chunk, double decay, bool int64_indices, void* indices, void* values,
                     int threads, Scratch& scratch);

// Returns the sum over the chunks of n elements of min(k, elements of the chunk).
size_t chunk_room(size_t n, size_t k, size_t chunk);

// Selects every entry of x, or of r + x, with |v| >= tau, and NaN. Two steps, as the number is not known before: collect,
// then write, which also frees. If memory runs out while collecting, r = r + x with nothing selected.
//
//   x                [in]      n elements
//   r                [in,out]  as for topk
//   tau              [in]      at least 0, not NaN
//   count            [out]     entries
//   indices, values  [out]     entries, in order of index; room for `count`
struct Collected;
Collected* threshold_collect(Dense x, Dense* r, double tau, int threads, size_t* count, Scratch& scratch);
void threshold_write(Collected* collected, bool int64_indices, void* indices, void* values);
void threshold_free(Collected* collected);

// Adds two sparse vectors: values at equal indices as a + b; sums that are zero are dropped. Reads and writes entries once.
//
//   a, b  [in]   vectors of one size
//   sum   [out]  room for a.count + b.count
void merge(Sparse a, Sparse b, bool int64_indices, bool float64_values, SparseOut* sum);

// Adds vectors: neighbours, pairs of these, and so on. Says of how many vectors each sum is; sums that are zero are dropped.
//
//   vectors  [in]   `number` vectors of one size, at least one
//   sum      [out]  room for all of their entries
//   counts   [out]  a value for each of these
void sum_and_count(const Sparse* vectors, size_t number, bool int64_indices, bool float64_values, SparseOut* sum, void* counts,
                   Scratch& scratch);

// value / count, in the accumulator, without those that are zero.
//
//   counts  [in]   a value for each entry
//   means   [out]  room for all entries
void divide_by(Sparse entries, const void* counts, bool int64_indices, bool float64_values, SparseOut* means);

// Adds as `merge`, and selects the first k.
//
//   a, b      [in]   vectors of one size
//   kept      [out]  the first k, in order of index; room for min(k, a.count + b.count)
//   rejected  [out]  all others, in order of index; room for a.count + b.count less that
void merge_topk(Sparse a, Sparse b, size_t k, bool int64_indices, bool float64_values, SparseOut* kept, SparseOut* rejected,
                Scratch& scratch);

// The values of entries at the indices of others, 0 where there is no entry. Reads both once; searches for far fewer others.
//
//   others  [in]   `other_count` indices, strictly increasing
//   out     [out]  `other_count` values
void values_at(Sparse entries, const void* others, size_t other_count, bool int64_indices, bool float64_values, void* out);

// dense[index] += value, in the accumulator, rounded once to the dense type.
//
//   dense    [in,out]  elements
//   entries  [in]      indices below dense.size
void scatter_add(Dense dense, Sparse entries, bool int64_indices);

// As scatter_add, of the entries alone whose index is among the others (`present`), or is not. Reads both once; where one
// side has far fewer indices, it searches the other for them.
//
//   dense    [in,out]  elements
//   entries  [in]      indices below dense.size
//   others   [in]      `other_count` indices, strictly increasing
void scatter_add_where(Dense dense, Sparse entries, const void* others, size_t other_count, bool int64_indices, bool present);

// dense = 0, then dense[index] = value, rounded to nearest even. Writes every element once. Returns false if an index is not
// below dense.size, as users may have written to them: then nothing was written.
//
//   dense    [out]  elements
//   entries  [in]   in any order
bool densify(Dense dense, Sparse entries, bool int64_indices, int threads);

// out = x, or r + x as it would be stored in r; in the accumulator.
//
//   x    [in]   n elements
//   r    [in]   n elements, or null
//   out  [out]  n elements, float or double; may be r's
void widen(Dense x, const Dense* r, void* out, int threads);

// r = decay * r + (from - x), in the accumulator; difference, product and sum are each rounded. With `if_finite` returns false,
// and writes nothing, if a difference is not finite. Reads x and `from` once, or with `if_finite` twice.
//
//   from  [in]      n elements, float or double
//   x     [in]      n elements
//   r     [in,out]  n elements, float or double
bool add_difference(const void* from, Dense x, double decay, bool if_finite, void* r, int threads);

// r += scale * x / floor_power_of_two(sqrt(squares) + eps), in the accumulator; each operation is rounded. With
// `if_finite` returns false, and writes nothing, if a quotient, or the square of scale * x, is not finite. Reads x and squares
// once, or with `if_finite` x twice, and squares where x is that large.
//
//   x        [in]      n elements
//   squares  [in]      n elements of the accumulator's type
//   r        [in,out]  n elements of it
bool add_quotient(Dense x, const void* squares, double eps, double scale, bool if_finite, void* r, int threads);

// The moments of weights, in the accumulator's type, and the step that updated each of them last.
struct Moments {
    void* mean;
    void* squares;
    int32_t* last;
};

// The largest magnitude; NaN if there is one. Reads x once.
double largest(Dense x, int threads);

// AdamW on some weights, as many steps as they waited for: see `Backend.adamw`. Each operation is rounded. A residual that
// would become infinite in its new unit becomes the largest finite number.
//
//   weights  [in,out]  n elements
//   moments  [in,out]  n elements each
//   residual [in,out]  n elements of the accumulator's type
//   means    [in]      indices below n; or null, and a value for each of the n elements
//   rows     [in]      `count` rows of 6 numbers of the accumulator's type, count > 0
void adamw(Dense weights, Moments moments, void* residual, Sparse means, bool int64_indices, const void* rows, size_t count,
           double unit_eps, double eps, int32_t step, int threads);

// x = weight * x + (1 - weight) * values, in the accumulator; both products and the sum are each rounded, the sum once more
// to the type of x.
//
//   x       [in,out]  n elements
//   values  [in]      n elements, float or double
void mix(Dense x, double weight, const void* values, int threads);

// sum += addend: `size` elements of the accumulator's type each, sum [in,out] and addend [in].
void add(void* sum, const void* addend, size_t size, bool float64_values, int threads);

// dense = values, rounded to nearest even.
//
//   values  [in]   dense.size elements of the accumulator's type
//   dense   [out]  elements
void narrow(const void* values, Dense dense, int threads);

// Returns whether indices are strictly increasing and in [0, size), and no values are zero. entries [in].
bool well_formed(Sparse entries, size_t begin, size_t end, bool int64_indices, bool float64_values);

// How values travel in the packed format (sparsecomm/wire/packed.py): the codes of sparsecomm/tensors/kinds.py. float64
// values travel as `exact` only.
enum class Kind : int { exact = 0, bfloat16 = 1, float16 = 2, int8 = 3, int4 = 4, int2 = 5, sign = 6 };
constexpr int KINDS = 7;

// Returns the bytes of packed entries.
size_t packed_bytes(Sparse entries, Kind kind, bool int64_indices, bool float64_values);

// Packs entries. It loses nothing of values that `quantize_values` has rounded.
//
//   entries  [in]   entries
//   out      [out]  as many bytes as `packed_bytes` says
void pack(Sparse entries, Kind kind, bool int64_indices, bool float64_values, void* out);

// Returns null if packed entries have the length that their beginning, and their number, say; or what is wrong. Then memory
// for them is no more than 8 entries for each byte. It takes the same time for all.
//
//   data   [in]  `bytes` bytes; any
//   count  [in]  entries
//   size   [in]  elements of the vector
const char* check_packed(const void* data, size_t bytes, size_t count, size_t size, Kind kind, bool float64_values);

// Unpacks entries. Returns null, or why these are not the bytes of so many entries: then what was written means nothing.
// Of any bytes whatever, nothing outside is read. A NaN comes as it was sent, and whether the entries are well formed is
// not checked.
//
//   data, ...        [in]   as of check_packed
//   indices, values  [out]  entries; room for `count`
const char* unpack(const void* data, size_t bytes, size_t count, size_t size, Kind kind, bool int64_indices, bool float64_values,
                   void* indices, void* values);

// Rounds values as their kind travels: finite ones stay finite, infinities stay infinities, zeros are +0, NaN are quiet.
// bfloat16, float16 and int8 to nearest even. Of int8, 64 values in a row share a power of two: drop what becomes zero, and
// round again, until nothing does. Of int4, int2 and sign, 64 values in a row share magnitudes that suit them, none of them
// zero; but where one value is not finite, all stay as they are. Returns how many of `rounded` are zero.
//
//   values   [in]   `count` values; of int4, int2 and sign none is zero
//   rounded  [out]  `count` values
//   errors   [out]  `count` values: values - rounded, and 0 beside what is not finite
size_t quantize_values(const float* values, size_t count, Kind kind, float* rounded, float* errors);

// Returns the name of the instruction set in use: "avx512", "avx2" or "portable".
const char* simd_name();

// Uses another instruction set from now on. Returns false if this processor lacks it.
bool use_simd(const char* name);

}  // namespace sparsecomm
