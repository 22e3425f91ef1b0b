/* Finds the instruction sets that this build was compiled for and the processor lacks.

This file is compiled with the same flags as all others, but must itself run on such a processor. It uses CPUID, because
/proc/cpuinfo may be missing, and inside an emulator describes the host. */
#include <Python.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

typedef struct {
    const char* name;
    unsigned bit; /* of ECX of CPUID's leaf 1 */
} Feature;

/* Features of x86-64-v2 that compilers use by themselves. CMPXCHG16B and LAHF are left out: some virtual machines hide
them, and compilers do not use them by themselves. */
static const Feature compiled_for[] = {
#if defined(__x86_64__) && defined(__SSE3__)
    {"SSE3", 1u << 0},
#endif
#if defined(__x86_64__) && defined(__SSSE3__)
    {"SSSE3", 1u << 9},
#endif
#if defined(__x86_64__) && defined(__SSE4_1__)
    {"SSE4.1", 1u << 19},
#endif
#if defined(__x86_64__) && defined(__SSE4_2__)
    {"SSE4.2", 1u << 20},
#endif
#if defined(__x86_64__) && defined(__POPCNT__)
    {"POPCNT", 1u << 23},
#endif
    {NULL, 0},
};

static unsigned features(void) {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d)) return c;
#endif
    return 0;
}

static PyObject* missing(PyObject* self, PyObject* nothing) {
    const unsigned has = features();
    PyObject* names = PyList_New(0);
    (void)self, (void)nothing;
    for (const Feature* feature = compiled_for; names && feature->name; feature++) {
        if (has & feature->bit) continue;
        PyObject* name = PyUnicode_FromString(feature->name);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

static PyMethodDef methods[] = {
    {"missing", missing, METH_NOARGS,
     "missing()\n--\n\nReturn the names of the instruction sets that this build may use and this processor lacks."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil /* Python 3.13 and later */
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "sparsecomm.processor._features", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__features(void) { return PyModuleDef_Init(&module); }
