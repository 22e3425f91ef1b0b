// The interface of the CPU kernels. Plain C++: they know neither Python nor MPI.
//
// A dense vector is a pointer, a type and a number of elements. A sparse vector is (indices, values): indices increase
// strictly and are int32, or int64 with `int64_indices`; values have the accumulator type: float for f16, bf16 and f32,
// double for f64 (`float64_values`). A residual r has the type of x, or f32 for a 16-bit x. Sizes and counts are numbers of
// elements and entries, unless named bytes. `threads` is the maximum number of threads, including the caller.
//
// The order of selection is (|v| descending, index ascending), with NaN above infinity. Zeros are never selected, and of
// ties at the k-th place the lower indices win. Results do not depend on `threads` or on the instruction set. Callers are in
// the default float mode (float_mode.hpp). No function keeps a pointer. Every NaN written to values is the quiet NaN of the
// format. Functions that allocate take memory from `scratch`, return it there, and throw std::bad_alloc.
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

// Selects the first k entries of x, or of r + x. Returns their number: min(k, nonzeros).
// One pass over the data: for f32, reads 4n bytes, or with r reads 8n and writes 4n. Scratch memory O(k) per thread; if it
// runs out, nothing was written.
//
//   x                [in]      n elements
//   r                [in,out]  n elements, r = r + x, with 0 at selected entries; or null
//   k                [in]      number of entries to select; at most n are used
//   indices, values  [out]     entries in the order of indices; room for min(k, n)
size_t topk(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch);

// Selects from x without a residual, and sets x to 0 at selected entries.
size_t take_topk(Dense x, size_t k, bool int64_indices, void* indices, void* values, int threads, Scratch& scratch);

// Selects the first k entries of every `chunk` elements of x, or of decay * r + x; the last chunk may be shorter. Returns
// their number: the sum over chunks of min(k, nonzeros). One pass over the data, like `topk`; all further work on a chunk
// happens while it is in the cache. The product, the sum and the stored value are each rounded. Scratch memory O(chunk) per
// thread; if it runs out, nothing was written.
//
//   x                [in]      n elements
//   r                [in,out]  n elements, r = decay * r + x, with 0 at selected entries; or null
//   k, chunk         [in]      1 <= k <= chunk; min(n, chunk) at most 2^31
//   indices, values  [out]     entries in the order of indices; room for `chunk_room`
size_t topk_by_chunk(Dense x, Dense* r, size_t k, size_t chunk, double decay, bool int64_indices, void* indices, void* values,
                     int threads, Scratch& scratch);

// Returns the sum over the chunks of n elements of min(k, elements of the chunk).
size_t chunk_room(size_t n, size_t k, size_t chunk);

// Selects every entry of x, or of r + x, with |v| >= tau, and NaN. Two steps, because the number of entries is not known
// before: collect, then write and free. If memory runs out while collecting, r = r + x with nothing selected.
//
//   x                [in]      n elements
//   r                [in,out]  as for topk
//   tau              [in]      at least 0, not NaN
//   count            [out]     number of entries
//   indices, values  [out]     entries in the order of indices; room for `count`
struct Collected;
Collected* threshold_collect(Dense x, Dense* r, double tau, int threads, size_t* count, Scratch& scratch);
void threshold_write(Collected* collected, bool int64_indices, void* indices, void* values);
void threshold_free(Collected* collected);

// Adds two sparse vectors: values at equal indices as a + b, without zero sums. Reads and writes entries once.
//
//   a, b  [in]   vectors of one size
//   sum   [out]  room for a.count + b.count
void merge(Sparse a, Sparse b, bool int64_indices, bool float64_values, SparseOut* sum);

// Adds vectors in pairs of neighbours, then pairs of sums, and so on, without zero sums. Counts the vectors of each sum.
//
//   vectors  [in]   `number` vectors of one size, at least one
//   sum      [out]  room for all of their entries
//   counts   [out]  one value per sum
void sum_and_count(const Sparse* vectors, size_t number, bool int64_indices, bool float64_values, SparseOut* sum, void* counts,
                   Scratch& scratch);

// value / count, in the accumulator type, without zeros.
//
//   counts  [in]   one value per entry
//   means   [out]  room for all entries
void divide_by(Sparse entries, const void* counts, bool int64_indices, bool float64_values, SparseOut* means);

// Adds like `merge`, and selects the first k entries.
//
//   a, b      [in]   vectors of one size
//   kept      [out]  the first k in the order of indices; room for min(k, a.count + b.count)
//   rejected  [out]  all others in the order of indices; room for a.count + b.count minus that
void merge_topk(Sparse a, Sparse b, size_t k, bool int64_indices, bool float64_values, SparseOut* kept, SparseOut* rejected,
                Scratch& scratch);

// The values of entries at the indices of others, 0 where there is no entry. Reads both once; with far fewer others, searches.
//
//   others  [in]   `other_count` indices, strictly increasing
//   out     [out]  `other_count` values
void values_at(Sparse entries, const void* others, size_t other_count, bool int64_indices, bool float64_values, void* out);

// dense[index] += value, in the accumulator type, rounded once to the dense type.
//
//   dense    [in,out]  elements
//   entries  [in]      indices below dense.size
void scatter_add(Dense dense, Sparse entries, bool int64_indices);

// scatter_add for the entries whose index is (`present`) or is not among the others. Reads both once; if one side has far
// fewer indices, searches the other for them.
//
//   dense    [in,out]  elements
//   entries  [in]      indices below dense.size
//   others   [in]      `other_count` indices, strictly increasing
void scatter_add_where(Dense dense, Sparse entries, const void* others, size_t other_count, bool int64_indices, bool present);

// dense = 0, then dense[index] = value, rounded to nearest even. Writes every element once. Returns false without writing if
// an index is not below dense.size, because users may have changed the indices.
//
//   dense    [out]  elements
//   entries  [in]   in any order
bool densify(Dense dense, Sparse entries, bool int64_indices, int threads);

// out = x, or r + x as stored in r, in the accumulator type.
//
//   x    [in]   n elements
//   r    [in]   n elements, or null
//   out  [out]  n elements, float or double; may be r's memory
void widen(Dense x, const Dense* r, void* out, int threads);

// r = decay * r + (from - x), in the accumulator type; the difference, the product and the sum are each rounded. With
// `if_finite`, returns false without writing if a difference is not finite. Reads x and `from` once; with `if_finite` twice.
//
//   from  [in]      n elements, float or double
//   x     [in]      n elements
//   r     [in,out]  n elements, float or double
bool add_difference(const void* from, Dense x, double decay, bool if_finite, void* r, int threads);

// r += scale * x / units, in the accumulator type; each operation is rounded. With `if_finite`, returns false without writing
// if a quotient or the square of scale * x is not finite. Reads x and exponents once; with `if_finite` also x again, and
// exponents again if x is large.
//
//   x          [in]      n elements
//   exponents  [in]      n biased exponents of the units, uint8_t; uint16_t if the accumulator type is double
//   r          [in,out]  n elements of the accumulator type
bool add_quotient(Dense x, const void* exponents, double scale, bool if_finite, void* r, int threads);

// The moments of weights, in the accumulator type, the latest step that updated each weight, and what rounding has kept from
// each weight, in the accumulator type, or null.
struct Moments {
    void* mean;
    void* squares;
    int32_t* last;
    void* compensation;
};

// Returns the largest magnitude, or NaN if x contains one. Reads x once.
double largest(Dense x, int threads);

// The results of `adamw`, one element per entry: new weights, means and squares in the accumulator type; the changes of weights,
// or null; and how exponents of units should change, or OVERFLOWS where the step must not be used.
struct AdamWResults {
    void* weights;
    void* mean;
    void* squares;
    void* changes;
    int8_t* jumps;
};

// Makes all AdamW steps of weights since their last update: see `Backend.adamw`. Each operation is rounded. Returns the number
// of entries that overflow.
//
//   weights    [in]   n elements
//   moments    [in]   n elements each
//   exponents  [in]   n exponents, as in `add_quotient`
//   means      [in]   indices below n; or null, with a value for each of the n elements
//   rows       [in]   `count` rows of 6 numbers of the accumulator type, count > 0
size_t adamw(Dense weights, Moments moments, const void* exponents, Sparse means, bool int64_indices, const void* rows,
             size_t count, double unit_eps, double eps, double limit, double margin, int32_t step, AdamWResults to, int threads);

// Stores results of `adamw`: see `Backend.store_adamw`. `indices` may be null, as there; `count` is the number of entries.
//
//   weights    [in,out]  n elements; written if `write`
//   moments    [in,out]  n elements each
//   exponents  [in,out]  n exponents, as in `add_quotient`, or null; if null, `from.changes` may be null
void store_adamw(Dense weights, Moments moments, void* exponents, Sparse indices, bool int64_indices, AdamWResults from,
                 int32_t step, bool write, int threads);

// Changes units, and converts residuals: see `Backend.change_units`.
//
//   r          [in,out]  n elements of the accumulator type, float or double
//   exponents  [in,out]  n exponents, as in `add_quotient`
//   changes    [in]      indices below n, and changes of exponents, which are rounded to integers
void change_units(Dense r, void* exponents, Sparse changes, bool int64_indices);

// x = weight * x + (1 - weight) * values, in the accumulator type; both products and the sum are each rounded, then the sum
// to the type of x.
//
//   x       [in,out]  n elements
//   values  [in]      n elements, float or double
void mix(Dense x, double weight, const void* values, int threads);

// sum += addend: `size` elements of the accumulator type each, sum [in,out] and addend [in].
void add(void* sum, const void* addend, size_t size, bool float64_values, int threads);

// dense = values, rounded to nearest even.
//
//   values  [in]   dense.size elements of the accumulator type
//   dense   [out]  elements
void narrow(const void* values, Dense dense, int threads);

// Returns whether indices increase strictly within [begin, end) and no value is zero. entries [in].
bool well_formed(Sparse entries, size_t begin, size_t end, bool int64_indices, bool float64_values);

// The kinds of values in the packed format (sparsecomm/wire/formats.py), with the codes of sparsecomm/tensors/kinds.py.
// float64 values have the kind `exact`.
enum class Kind : int { exact = 0, bfloat16 = 1, float16 = 2, int8 = 3, int4 = 4, int2 = 5, sign = 6 };
constexpr int KINDS = 7;

// Returns the number of bytes of packed entries.
size_t packed_bytes(Sparse entries, Kind kind, bool int64_indices, bool float64_values);

// Packs entries. Loses nothing if `quantize_values` has rounded the values.
//
//   entries  [in]   entries
//   out      [out]  `packed_bytes` bytes
void pack(Sparse entries, Kind kind, bool int64_indices, bool float64_values, void* out);

// Returns null if packed entries have the length that follows from their header and their number, else a description of the
// error. If it returns null, there are at most 8 entries per byte. Takes constant time.
//
//   data   [in]  `bytes` arbitrary bytes
//   count  [in]  number of entries
//   size   [in]  number of elements of the vector
const char* check_packed(const void* data, size_t bytes, size_t count, size_t size, Kind kind, bool float64_values);

// Unpacks entries. Returns null, or a description of the error if these are not the bytes of `count` entries; the output is
// then meaningless. Never reads outside of the bytes, whatever they contain. Does not change a NaN, and does not check that
// the entries are well formed.
//
//   data, ...        [in]   as for check_packed
//   indices, values  [out]  entries; room for `count`
const char* unpack(const void* data, size_t bytes, size_t count, size_t size, Kind kind, bool int64_indices, bool float64_values,
                   void* indices, void* values);

// Rounds values to a kind. Finite values remain finite, infinities remain infinities, zeros become +0, NaN become quiet.
// bfloat16, float16 and int8 round to nearest even. For int8, 64 consecutive values share a power of two: callers drop values
// that become zero and round again until none does. For int4, int2 and sign, 64 consecutive values share nonzero magnitudes;
// if a value is not finite, all values remain unchanged. Returns the number of zeros in `rounded`.
//
//   values   [in]   `count` values; nonzero for int4, int2 and sign
//   rounded  [out]  `count` values
//   errors   [out]  `count` values: values - rounded; 0 if not finite
size_t quantize_values(const float* values, size_t count, Kind kind, float* rounded, float* errors);

// Returns the name of the instruction set in use: "avx512", "avx2" or "portable".
const char* simd_name();

// Uses another instruction set from now on. Returns false if the processor does not support it.
bool use_simd(const char* name);

}  // namespace sparsecomm
