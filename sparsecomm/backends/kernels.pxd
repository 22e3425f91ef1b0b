"""Declarations of the C++ kernels in kernels/cpu. Kernels that compute run in the default float mode: see float_mode.hpp."""

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
        void release(size_t) noexcept

    cdef cppclass Moments:
        void* mean
        void* squares
        int* last
        void* compensation

    cdef cppclass AdamWResults:
        void* weights
        void* mean
        void* squares
        void* changes
        signed char* jumps

    size_t chunk_room(size_t, size_t, size_t)
    void threshold_free(Collected*)
    cbool c_well_formed "sparsecomm::in_default_mode<sparsecomm::well_formed>"(Sparse, size_t, size_t, cbool, cbool)
    size_t packed_bytes(Sparse, Kind, cbool, cbool)
    const char* check_packed(const void*, size_t, size_t, size_t, Kind, cbool)
    const char* c_simd_name "sparsecomm::simd_name"()
    cbool c_use_simd "sparsecomm::use_simd"(const char*)


cdef extern from "float_mode.hpp":
    object call_in_default_mode "sparsecomm::in_default_mode<PyObject_Call>"(object, tuple, dict)


cdef extern from *:
    """
    struct WithoutGil {
        PyThreadState* const state = PyEval_SaveThread();
        ~WithoutGil() noexcept(false) { PyEval_RestoreThread(state); }  // ends a daemon thread when Python exits
    };

    // Calls a kernel without the GIL, in the default float mode.
    template <auto Kernel, class... Arguments>
    auto without_gil(Arguments&&... arguments) {
        const WithoutGil released;
        return sparsecomm::in_default_mode<Kernel>(static_cast<Arguments&&>(arguments)...);
    }
    """
    size_t c_topk "without_gil<sparsecomm::topk>"(Dense, Dense*, size_t, cbool, void*, void*, int, Memory&) except +
    size_t c_take_topk "without_gil<sparsecomm::take_topk>"(Dense, size_t, cbool, void*, void*, int, Memory&) except +
    size_t c_topk_by_chunk "without_gil<sparsecomm::topk_by_chunk>"(Dense, Dense*, size_t, size_t, double, cbool, void*, void*, int, Memory&) except +
    Collected* threshold_collect "without_gil<sparsecomm::threshold_collect>"(Dense, Dense*, double, int, size_t*, Memory&) except +
    void threshold_write "without_gil<sparsecomm::threshold_write>"(Collected*, cbool, void*, void*) except +
    void c_merge "without_gil<sparsecomm::merge>"(Sparse, Sparse, cbool, cbool, SparseOut*) except +
    void c_sum_and_count "without_gil<sparsecomm::sum_and_count>"(const Sparse*, size_t, cbool, cbool, SparseOut*, void*, Memory&) except +
    void c_divide_by "without_gil<sparsecomm::divide_by>"(Sparse, const void*, cbool, cbool, SparseOut*) except +
    void c_merge_topk "without_gil<sparsecomm::merge_topk>"(Sparse, Sparse, size_t, cbool, cbool, SparseOut*, SparseOut*, Memory&) except +
    void c_values_at "without_gil<sparsecomm::values_at>"(Sparse, const void*, size_t, cbool, cbool, void*) except +
    void c_scatter_add "without_gil<sparsecomm::scatter_add>"(Dense, Sparse, cbool) except +
    void c_scatter_add_where "without_gil<sparsecomm::scatter_add_where>"(Dense, Sparse, const void*, size_t, cbool, cbool) except +
    cbool c_densify "without_gil<sparsecomm::densify>"(Dense, Sparse, cbool, int) except +
    void c_widen "without_gil<sparsecomm::widen>"(Dense, const Dense*, void*, int) except +
    cbool c_add_quotient "without_gil<sparsecomm::add_quotient>"(Dense, const void*, double, cbool, void*, int) except +
    double c_largest "without_gil<sparsecomm::largest>"(Dense, int) except +
    size_t c_adamw "without_gil<sparsecomm::adamw>"(
        Dense, Moments, const void*, Sparse, cbool, const void*, size_t, double, double, double, double, int, AdamWResults, int
    ) except +
    void c_change_units "without_gil<sparsecomm::change_units>"(Dense, void*, Sparse, cbool) except +
    void c_store_adamw "without_gil<sparsecomm::store_adamw>"(Dense, Moments, void*, Sparse, cbool, AdamWResults, int, cbool, int) except +
    cbool c_add_difference "without_gil<sparsecomm::add_difference>"(const void*, Dense, double, cbool, void*, int) except +
    void c_mix "without_gil<sparsecomm::mix>"(Dense, double, const void*, int) except +
    void c_add "without_gil<sparsecomm::add>"(void*, const void*, size_t, cbool, int) except +
    void c_narrow "without_gil<sparsecomm::narrow>"(const void*, Dense, int) except +
    void c_pack "without_gil<sparsecomm::pack>"(Sparse, Kind, cbool, cbool, void*)
    const char* c_unpack "without_gil<sparsecomm::unpack>"(const void*, size_t, size_t, size_t, Kind, cbool, cbool, void*, void*)
    size_t c_quantize_values "without_gil<sparsecomm::quantize_values>"(const float*, size_t, Kind, float*, float*)
