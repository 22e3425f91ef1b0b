"""Declarations of the C++ kernels in kernels/cpu. Kernels that compute run in the default float mode."""

from libcpp cimport bool as cbool


cdef extern from "kernels.hpp" namespace "sparsecomm" nogil:
    cdef enum class Type(int):
        f16
        bf16
        f32
        f64

    cdef cppclass Dense:
        void* data
        Type type
        size_t size

    cdef cppclass Sparse:
        const void* indices
        const void* values
        size_t count

    cdef cppclass SparseOut:
        void* indices
        void* values
        size_t count

    cdef cppclass Collected:
        pass

    cdef enum class Kind(int):
        exact

    cdef cppclass Memory "sparsecomm::Scratch":
        void* take(size_t, size_t*) except +
        void give(void*, size_t) noexcept

    size_t c_topk "sparsecomm::in_default_mode<sparsecomm::topk>"(Dense, Dense*, size_t, cbool, void*, void*, int, Memory&) except +
    size_t c_take_topk "sparsecomm::in_default_mode<sparsecomm::take_topk>"(Dense, size_t, cbool, void*, void*, int, Memory&) except +
    size_t c_topk_by_chunk "sparsecomm::in_default_mode<sparsecomm::topk_by_chunk>"(Dense, Dense*, size_t, size_t, double, cbool, void*, void*, int, Memory&) except +
    size_t chunk_room(size_t, size_t, size_t)
    Collected* threshold_collect "sparsecomm::in_default_mode<sparsecomm::threshold_collect>"(Dense, Dense*, double, int, size_t*, Memory&) except +
    void threshold_write "sparsecomm::in_default_mode<sparsecomm::threshold_write>"(Collected*, cbool, void*, void*) except +
    void threshold_free(Collected*)
    void c_merge "sparsecomm::in_default_mode<sparsecomm::merge>"(Sparse, Sparse, cbool, cbool, SparseOut*) except +
    void c_sum_and_count "sparsecomm::in_default_mode<sparsecomm::sum_and_count>"(const Sparse*, size_t, cbool, cbool, SparseOut*, void*, Memory&) except +
    void c_divide_by "sparsecomm::in_default_mode<sparsecomm::divide_by>"(Sparse, const void*, cbool, cbool, SparseOut*) except +
    void c_merge_topk "sparsecomm::in_default_mode<sparsecomm::merge_topk>"(Sparse, Sparse, size_t, cbool, cbool, SparseOut*, SparseOut*, Memory&) except +
    void c_values_at "sparsecomm::in_default_mode<sparsecomm::values_at>"(Sparse, const void*, size_t, cbool, cbool, void*) except +
    void c_scatter_add "sparsecomm::in_default_mode<sparsecomm::scatter_add>"(Dense, Sparse, cbool) except +
    void c_scatter_add_where "sparsecomm::in_default_mode<sparsecomm::scatter_add_where>"(Dense, Sparse, const void*, size_t, cbool, cbool) except +
    cbool c_densify "sparsecomm::in_default_mode<sparsecomm::densify>"(Dense, Sparse, cbool, int) except +
    void c_widen "sparsecomm::in_default_mode<sparsecomm::widen>"(Dense, const Dense*, void*, int) except +
    cppclass Moments:
        void* mean
        void* squares
        int* last

    cbool c_add_quotient "sparsecomm::in_default_mode<sparsecomm::add_quotient>"(Dense, const void*, double, double, cbool, void*, int) except +
    double c_largest "sparsecomm::in_default_mode<sparsecomm::largest>"(Dense, int) except +
    void c_adamw "sparsecomm::in_default_mode<sparsecomm::adamw>"(Dense, Moments, void*, Sparse, cbool, const void*, size_t, double, double, int, int) except +
    cbool c_add_difference "sparsecomm::in_default_mode<sparsecomm::add_difference>"(const void*, Dense, double, cbool, void*, int) except +
    void c_mix "sparsecomm::in_default_mode<sparsecomm::mix>"(Dense, double, const void*, int) except +
    void c_add "sparsecomm::in_default_mode<sparsecomm::add>"(void*, const void*, size_t, cbool, int) except +
    void c_narrow "sparsecomm::in_default_mode<sparsecomm::narrow>"(const void*, Dense, int) except +
    cbool c_well_formed "sparsecomm::in_default_mode<sparsecomm::well_formed>"(Sparse, size_t, size_t, cbool, cbool)
    size_t packed_bytes(Sparse, Kind, cbool, cbool)
    void c_pack "sparsecomm::in_default_mode<sparsecomm::pack>"(Sparse, Kind, cbool, cbool, void*)
    const char* check_packed(const void*, size_t, size_t, size_t, Kind, cbool)
    const char* c_unpack "sparsecomm::in_default_mode<sparsecomm::unpack>"(const void*, size_t, size_t, size_t, Kind, cbool, cbool, void*, void*)
    size_t c_quantize_values "sparsecomm::in_default_mode<sparsecomm::quantize_values>"(const float*, size_t, Kind, float*, float*)
    const char* c_simd_name "sparsecomm::simd_name"()
    cbool c_use_simd "sparsecomm::use_simd"(const char*)


cdef extern from "float_mode.hpp":
    object call_in_default_mode "sparsecomm::in_default_mode<PyObject_Call>"(object, tuple, dict)
