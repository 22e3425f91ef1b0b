/* Finds the instruction sets that this build was compiled for and the processor lacks.

This file is compiled with the same flags as all others, but must itself run on such a processor. It uses CPUID, because
/proc/cpuinfo may be missing, and inside an emulator describes the host. */
#include <Python.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static inline void append(PyObject** names, const char* text) {
    PyObject* name = PyUnicode_FromString(text);
    if (*names && (!name || PyList_Append(*names, name) < 0)) Py_CLEAR(*names);
    Py_XDECREF(name);
}

/* Features of x86-64-v2 that compilers use by themselves. CMPXCHG16B and LAHF are left out: some virtual machines hide
them, and compilers do not use them by themselves. */
static PyObject* missing(PyObject* self, PyObject* nothing) {
    PyObject* names = PyList_New(0);
    (void)self, (void)nothing;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    const unsigned has = __get_cpuid(1, &a, &b, &c, &d) ? c : 0;
    (void)has; /* a build may use none of them */
#if defined(__SSE3__)
    if (!(has & bit_SSE3)) append(&names, "SSE3");
#endif
#if defined(__SSSE3__)
    if (!(has & bit_SSSE3)) append(&names, "SSSE3");
#endif
#if defined(__SSE4_1__)
    if (!(has & bit_SSE4_1)) append(&names, "SSE4.1");
#endif
#if defined(__SSE4_2__)
    if (!(has & bit_SSE4_2)) append(&names, "SSE4.2");
#endif
#if defined(__POPCNT__)
    if (!(has & bit_POPCNT)) append(&names, "POPCNT");
#endif
#endif
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
