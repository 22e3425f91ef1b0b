// Compiles code between BEGIN and END for a larger instruction set than the baseline.
#pragma once

#define SPARSECOMM_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define SPARSECOMM_TARGET_BEGIN(set) \
    SPARSECOMM_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define SPARSECOMM_TARGET_END SPARSECOMM_PRAGMA(clang attribute pop)
#else
#define SPARSECOMM_TARGET_BEGIN(set) SPARSECOMM_PRAGMA(GCC push_options) SPARSECOMM_PRAGMA(GCC target(set))
#define SPARSECOMM_TARGET_END SPARSECOMM_PRAGMA(GCC pop_options)
#endif
