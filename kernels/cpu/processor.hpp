// Which instruction sets this processor has.
#pragma once

namespace sparsecomm {

// Returns whether the processor and the system support an instruction set: portable, avx2, avx512, or
// avx512_vpopcntdq, which includes avx512. False for any other name.
bool supports(const char* name);

}  // namespace sparsecomm
