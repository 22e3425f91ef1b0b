// What the CPU kernels do. Plain C++: they know neither Python nor MPI.
//
// Vectors are given by pointer and number of elements. Sparse vectors are (indices, values): indices strictly
// increasing, int32 or, if `int64_indices`, int64; values in the accumulator of the dense type: float for f16, bf16, f32, double for
// f64. A residual r has the type of x, or is f32 beside a 16-bit x. No function keeps a pointer. Every NaN that is
// written to values is the quiet NaN of the format. Functions that allocate throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../formats.hpp"

namespace sparsecomm {

struct Dense {
    void* data;
    Type type;
    size_t size;
};

// The k entries of x, or of r + x, that come first by (|v| descending, index ascending), zeros excluded; written in
// order of index to indices and values (room for min(k, n)). Returns how many: min(k, non-zeros).
// With a residual: r = r + x, and 0 where an entry was taken. One pass over the data: 4n bytes for f32, 12n with r.
// Exact and deterministic whatever the number of threads. Scratch memory O(k) per thread.
// If scratch cannot be had, nothing was written.
size_t topk(Dense x, Dense* r, size_t k, bool int64_indices, void* indices, void* values, int threads);

// Every entry of x, or of r + x, with |v| >= tau, and NaN; zeros excluded. Two steps, as the number is not known
// before: collect, then write (which also frees). If memory runs out while collecting, r = r + x with nothing taken.
struct Collected;
Collected* threshold_collect(Dense x, Dense* r, double tau, int threads, size_t* count);
void threshold_write(Collected* collected, bool int64_indices, void* indices, void* values);
void threshold_free(Collected* collected);

struct Sparse {
    const void* indices;
    const void* values;
    size_t count;
};
struct SparseOut {
    void* indices;
    void* values;
    size_t count;  // set by the function
};

// Add two sparse vectors, equal indices added as a + b. Sums that are zero leave. Room for a.count + b.count.
void merge(Sparse a, Sparse b, bool int64_indices, bool float64_values, SparseOut* sum);

// The same, then the first k in the order of selection to `kept`, all others to `rejected`; both in order of index.
// Room for min(k, a.count + b.count) in `kept`, and for the others in `rejected`.
void merge_topk(Sparse a, Sparse b, size_t k, bool int64_indices, bool float64_values, SparseOut* kept, SparseOut* rejected);

// dense[index] += value, in the accumulator, rounded once to the dense type. Indices must be below dense.size.
void scatter_add(Dense dense, Sparse entries, bool int64_indices);

// dense = 0, then dense[index] = value rounded to the dense type.
void densify(Dense dense, Sparse entries, bool int64_indices, int threads);

// out = x, or r + x, in the accumulator (out: f32 or f64). sum += addend, both of the accumulator's type.
void widen(Dense x, const Dense* r, void* out, int threads);
void add(void* sum, const void* addend, size_t size, bool float64_values, int threads);

// dense = values of the accumulator's type, rounded to nearest even.
void narrow(const void* values, Dense dense, int threads);

// Are the indices strictly increasing and in [0, size)? Are no values zero?
bool well_formed(Sparse entries, size_t size, bool int64_indices, bool float64_values);

// How values travel in the packed format (sparsecomm/wire/packed.py): the codes of sparsecomm/tensors/kinds.py. float64
// values travel as `exact` only.
enum class Kind : int { exact = 0, bfloat16 = 1, float16 = 2, int8 = 3 };

// Bytes of `count` entries of which the last index is the first one plus `span`.
size_t packed_bytes(size_t count, uint64_t span, Kind kind, bool float64_values);

// Entries to the bytes of just that length. Nothing is lost of values that quantize_values has rounded to the kind.
void pack(Sparse entries, Kind kind, bool int64_indices, bool float64_values, void* out);

// The bytes of `count` entries of a vector of `size` elements, back; nullptr. Or why they cannot be that: then what was
// written means nothing. Of any bytes whatever nothing outside is read. A NaN comes as it was sent, and whether the
// entries are well formed is not asked.
const char* unpack(const void* data, size_t bytes, size_t count, size_t size, Kind kind, bool int64_indices, bool float64_values,
                   void* indices, void* values);

// Values as they arrive when sent as bf16, f16 or int8, to nearest even: finite ones stay finite, zeros are +0, NaN are
// quiet, as are infinities in int8. errors = values - rounded, and 0 beside what is not finite. Returns how many are
// zero. Of int8, 64 values in a row share a power of two: leave out what becomes zero, and round again, until none does.
size_t quantize_values(const float* values, size_t count, Kind kind, float* rounded, float* errors);

const char* simd_name();
bool use_simd(const char* name);
void release_scratch();

}  // namespace sparsecomm
