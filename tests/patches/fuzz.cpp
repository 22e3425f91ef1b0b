// Damages coded changes, and checks that `locate` refuses them, or finds another version or the same one. Usage: fuzz RUNS SEED
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "patches.hpp"

using namespace sparsecomm::patches;

namespace {

std::mt19937_64 generator;
uint64_t below(uint64_t bound) { return generator() % bound; }

struct Layout {
    Elements elements;
    const char* name;
};
const Layout LAYOUTS[] = {
    {{1, 3, 15, 2, true}, "float8"},         {{2, 7, 255, 107, true}, "bfloat16"}, {{2, 10, 31, 10, true}, "float16"},
    {{4, 23, 255, 107, true}, "float32"},    {{8, 52, 2047, 1000, true}, "float64"}, {{4, 0, 0, 0, false}, "int32"},
};

std::vector<uint8_t> damaged(std::vector<uint8_t> coded) {
    switch (below(4)) {
        case 0:
            for (uint64_t i = below(4) + 1; i--;) coded[below(coded.size())] ^= uint8_t(1 << below(8));
            break;
        case 1:
            coded.resize(below(coded.size()));
            break;
        case 2:
            for (uint64_t i = below(8) + 1; i--;) coded[below(coded.size())] = uint8_t(generator());
            break;
        default:
            coded.resize(4 + below(64));
            for (uint8_t& byte : coded) byte = uint8_t(generator());
            const uint32_t length = uint32_t(coded.size() - 4);
            std::memcpy(coded.data(), &length, 4);
    }
    return coded;
}

[[noreturn]] void fail(const char* what, const Layout& layout, size_t n) {
    std::printf("%s: %s, %zu elements\n", what, layout.name, n);
    std::exit(1);
}

}  // namespace

int main(int, char** arguments) {
    const long runs = std::atol(arguments[1]);
    generator.seed(uint64_t(std::atol(arguments[2])));
    long refused = 0, other = 0, same = 0;
    for (long run = 0; run < runs;) {
        const Layout& layout = LAYOUTS[below(sizeof LAYOUTS / sizeof *LAYOUTS)];
        use_simd(below(2) ? "portable" : below(2) ? "avx2" : "avx512");
        const size_t n = 1 + below(below(8) ? 300 : 20000), itemsize = layout.elements.itemsize, bytes = n * itemsize;
        const uint64_t one_in = 1 + below(50);
        std::vector<uint8_t> before(bytes), after;
        const bool narrow = below(2);  // few classes
        for (uint8_t& byte : before) byte = uint8_t(narrow ? below(3) : generator());
        after = before;
        for (size_t i = 0; i < n; i++)
            if (!below(one_in)) after[i * itemsize] ^= uint8_t(1 + below(below(2) ? 2 : 255));
        size_t changed;
        Sums sums, found;
        const std::vector<uint8_t> coded = diff(before.data(), after.data(), n, layout.elements, 1, &sums, &changed);
        std::vector<Located> located;
        if (!locate(before.data(), n, layout.elements, coded.data(), coded.size(), 1, &found, &located))
            fail("refused an intact patch", layout, n);
        std::vector<uint8_t> written = before;
        write(written.data(), layout.elements, located, 1);
        if (written != after || found.before != sums.before || found.after != sums.after) fail("wrong elements", layout, n);
        if (coded.empty()) continue;
        for (int i = 0; i < 50; i++, run++) {
            const std::vector<uint8_t> bad = damaged(coded);
            if (!locate(before.data(), n, layout.elements, bad.data(), bad.size(), 1, &found, &located)) {
                refused++;
                continue;
            }
            written = before;
            write(written.data(), layout.elements, located, 1);
            if (found.before != sums.before) fail("wrong digest before", layout, n);
            if (found.after != sum_of_blocks(written.data(), bytes, 1)) fail("wrong digest after", layout, n);
            if ((found.after == sums.after) != (written == after)) fail("digest of another version", layout, n);
            (written == after ? same : other)++;
        }
    }
    std::printf("%ld refused, %ld with another version, %ld with the same\n", refused, other, same);
}
