// Every kernel on small and hard inputs against a plain oracle, for every instruction set of this processor. Built with
// AddressSanitizer and UndefinedBehaviorSanitizer by test_sanitizers.py; arrays are heap blocks of their exact size.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels.hpp"

using namespace sparsecomm;

namespace {

int checks = 0;
Scratch scratch;

void expect(bool good, const char* what, const char* kind, size_t n, size_t k) {
    checks++;
    if (good) return;
    std::printf("WRONG: %s, %s, n=%zu, k=%zu, %s\n", what, kind, n, k, simd_name());
    std::exit(1);
}

std::vector<double> input(const char* kind, size_t n, std::mt19937_64& random) {
    std::normal_distribution<double> normal;
    std::vector<double> v(n);
    for (size_t i = 0; i < n; i++) {
        const double x = normal(random);
        switch (kind[0]) {
            case 'n': v[i] = x; break;
            case 'e': v[i] = 2; break;
            case 'z': v[i] = random() % 50 ? 0 : x; break;
            case 'a': v[i] = double(i) / double(n); break;
            case 'r': v[i] = std::round(x); break;
            default: v[i] = random() % 9 ? x : random() % 2 ? NAN : INFINITY;
        }
    }
    return v;
}

template <class Format>
bool nan(typename Format::Bits b) { return magnitude(b) > Format::infinity; }

// (|v| descending, index ascending), NaN first, no zeros.
template <class Format>
std::vector<size_t> order(const std::vector<typename Format::Bits>& v, size_t k) {
    std::vector<size_t> found;
    for (size_t i = 0; i < v.size(); i++)
        if (magnitude(v[i])) found.push_back(i);
    const auto rank = [&](size_t i) { return nan<Format>(v[i]) ? INFINITY : std::fabs(double(Format::widen(v[i]))); };
    const auto before = [&](size_t i, size_t j) {
        const bool p = nan<Format>(v[i]), q = nan<Format>(v[j]);
        if (p != q) return p;
        return p || rank(i) == rank(j) ? i < j : rank(i) > rank(j);
    };
    if (k < found.size()) {
        std::nth_element(found.begin(), found.begin() + long(k), found.end(), before);
        found.resize(k);
    }
    std::sort(found.begin(), found.end());
    return found;
}

template <class X, class R>
void select(Type x_type, Type r_type, const char* kind, size_t n, size_t k, std::mt19937_64& random) {
    using Bits = typename R::Bits;
    using Accumulator = typename R::Accumulator;
    const auto values = input(kind, n, random), others = input(kind, n, random);
    std::vector<typename X::Bits> x(n);
    std::vector<Bits> plain(n), r(n), sum(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = X::narrow(Accumulator(values[i]));
        plain[i] = R::narrow(X::widen(x[i]));
        r[i] = R::narrow(Accumulator(others[i]));
        sum[i] = R::narrow(R::widen(r[i]) + X::widen(x[i]));
    }
    for (bool fused : {false, true}) {
        if (!fused && sizeof(Bits) != sizeof(typename X::Bits)) continue;
        const auto& from = fused ? sum : plain;
        const auto best = order<R>(from, k);
        for (int threads : {1, 3}) {
            auto residual = r;
            Dense dense{residual.data(), r_type, n};
            std::vector<int32_t> index(std::min(n, k));
            std::vector<Accumulator> value(std::min(n, k));
            const size_t got = topk({x.data(), x_type, n}, fused ? &dense : nullptr, k, false, index.data(),
                                    value.data(), threads, scratch);
            expect(got == best.size(), "number of entries", kind, n, k);
            auto left = sum;
            for (size_t i = 0; i < got; i++) {
                const Accumulator wanted = R::widen(from[best[i]]);
                expect(size_t(index[i]) == best[i], "index", kind, n, k);
                expect(wanted == value[i] || (wanted != wanted && value[i] != value[i]), "value", kind, n, k);
                left[best[i]] = 0;
            }
            for (size_t i = 0; fused && i < n; i++)
                expect(left[i] == residual[i] || (nan<R>(left[i]) && nan<R>(residual[i])), "residual", kind, n, k);
            size_t count = 0;
            auto again = r;
            Dense second{again.data(), r_type, n};
            Collected* all = threshold_collect({x.data(), x_type, n}, fused ? &second : nullptr, 0.5, threads, &count, scratch);
            std::vector<int64_t> int64_indices(count);
            std::vector<Accumulator> reaching(count);
            threshold_write(all, true, int64_indices.data(), reaching.data());
            size_t wanted = 0;
            for (size_t i = 0; i < n; i++)
                wanted += nan<R>(from[i]) || std::fabs(double(R::widen(from[i]))) >= 0.5;
            expect(count == wanted, "threshold", kind, n, k);
        }
    }
}

template <class X, class R>
void chunks(Type x_type, Type r_type, const char* kind, size_t n, size_t k, size_t chunk, std::mt19937_64& random) {
    using Bits = typename R::Bits;
    using Accumulator = typename R::Accumulator;
    const auto values = input(kind, n, random), others = input(kind, n, random);
    std::vector<typename X::Bits> x(n);
    std::vector<Bits> r(n), sum(n);
    for (size_t i = 0; i < n; i++) {
        x[i] = X::narrow(Accumulator(values[i]));
        r[i] = R::narrow(Accumulator(others[i]));
        sum[i] = R::narrow(Accumulator(0.3) * R::widen(r[i]) + X::widen(x[i]));
    }
    Dense dense{r.data(), r_type, n};
    std::vector<int32_t> index(chunk_room(n, k, chunk));
    std::vector<Accumulator> value(index.size());
    const size_t got =
        topk_by_chunk({x.data(), x_type, n}, &dense, k, chunk, 0.3, false, index.data(), value.data(), 2, scratch);
    size_t o = 0;
    for (size_t begin = 0; begin < n; begin += chunk) {
        const std::vector<Bits> part(sum.begin() + long(begin), sum.begin() + long(std::min(n, begin + chunk)));
        for (size_t i : order<R>(part, k)) {
            expect(o < got && size_t(index[o]) == begin + i, "index of a chunk", kind, n, k);
            const Accumulator wanted = R::widen(part[i]);
            expect(wanted == value[o] || (wanted != wanted && value[o] != value[o]), "value", kind, n, k);
            sum[begin + i] = 0;
            o++;
        }
    }
    expect(o == got, "number of entries of chunks", kind, n, k);
    for (size_t i = 0; i < n; i++)
        expect(sum[i] == r[i] || (nan<R>(sum[i]) && nan<R>(r[i])), "residual of chunks", kind, n, k);
}

void merging(const char* kind, size_t a_count, size_t b_count, size_t k, std::mt19937_64& random) {
    const size_t n = a_count + b_count + 1;
    const auto make = [&](size_t count, std::vector<int32_t>& index, std::vector<float>& value) {
        std::vector<int32_t> all(n);
        for (size_t i = 0; i < n; i++) all[i] = int32_t(i);
        std::shuffle(all.begin(), all.end(), random);
        index.assign(all.begin(), all.begin() + long(count));
        std::sort(index.begin(), index.end());
        const auto v = input(kind, count, random);
        value.resize(count);
        for (size_t i = 0; i < count; i++) value[i] = float(v[i]);
    };
    std::vector<int32_t> ai, bi;
    std::vector<float> av, bv;
    make(a_count, ai, av);
    make(b_count, bi, bv);
    const size_t both = a_count + b_count, rest = both > k ? both - k : 0;
    std::vector<int32_t> ki(std::min(k, both)), ri(rest);
    std::vector<float> kv(std::min(k, both)), rv(rest);
    SparseOut kept{ki.data(), kv.data(), 0}, rejected{ri.data(), rv.data(), 0};
    merge_topk({ai.data(), av.data(), a_count}, {bi.data(), bv.data(), b_count}, k, false, false, &kept, &rejected, scratch);
    std::vector<uint32_t> sum(n, 0);
    std::vector<char> there(n, 0);
    for (size_t i = 0; i < a_count; i++) sum[size_t(ai[i])] = bit_cast<uint32_t>(av[i]), there[size_t(ai[i])] = 1;
    for (size_t i = 0; i < b_count; i++) {
        uint32_t& s = sum[size_t(bi[i])];
        s = bit_cast<uint32_t>(there[size_t(bi[i])] ? bit_cast<float>(s) + bv[i] : bv[i]);
    }
    const auto best = order<F32>(sum, k), all = order<F32>(sum, n);
    expect(kept.count == best.size() && kept.count + rejected.count == all.size(), "merged counts", kind, n, k);
    for (size_t i = 0; i < kept.count; i++) expect(size_t(ki[i]) == best[i], "merged index", kind, n, k);
    expect(well_formed({ki.data(), kv.data(), kept.count}, 0, n, false, false), "well formed", kind, n, k);

    std::vector<uint16_t> half(n);
    densify({half.data(), Type::f16, n}, {ki.data(), kv.data(), kept.count}, false, 2);
    scatter_add({half.data(), Type::f16, n}, {ri.data(), rv.data(), rejected.count}, false);
    for (bool present : {false, true}) {
        std::vector<float> added(n, 0);
        scatter_add_where({added.data(), Type::f32, n}, {ai.data(), av.data(), a_count}, bi.data(), b_count, false, present);
        for (size_t i = 0; i < a_count; i++) {
            const bool hit = av[i] != 0 && std::binary_search(bi.begin(), bi.end(), ai[i]) == present;
            expect(hit == (bit_cast<uint32_t>(added[size_t(ai[i])]) != 0), "added where", kind, n, k);
        }
    }
}

// Indices far apart, near, or both, by `spread`, below 2^31.
std::vector<int64_t> indices_of(size_t count, int spread, std::mt19937_64& random) {
    std::vector<int64_t> found(count);
    int64_t at = int64_t(random() % 100);
    for (auto& index : found) {
        index = at;
        at += 1 + int64_t(spread == 0 ? 0 : random() % (spread == 1 || random() % 9 ? 50 : 100000));
    }
    return found;
}

// Bytes of their exact size, as they are and damaged: refused or taken for as many entries; nothing else is touched.
template <class Index, class Value>
void packing(Kind kind, size_t count, int spread, std::mt19937_64& random) {
    constexpr bool int64_indices = sizeof(Index) == 8, float64_values = sizeof(Value) == 8;
    const auto at = indices_of(count, spread, random);
    const auto plain = input(random() % 2 ? "normal" : "special", count, random);
    const std::vector<Index> index(at.begin(), at.end());
    std::vector<Value> value(plain.begin(), plain.end());
    if constexpr (!float64_values)
        if (kind != Kind::exact) {
            std::vector<float> rounded(count), errors(count), again(count);
            quantize_values(value.data(), count, kind, rounded.data(), errors.data());
            quantize_values(rounded.data(), count, kind, again.data(), errors.data());
            expect(std::equal(rounded.begin(), rounded.end(), again.begin(),
                              [](float a, float b) { return bit_cast<uint32_t>(a) == bit_cast<uint32_t>(b); }),
                   "rounded again", "packed", count, size_t(kind));
            value = rounded;
        }
    const size_t n = count ? size_t(at.back()) + 1 : 1;
    const Sparse entries{index.data(), value.data(), count};
    const size_t bytes = packed_bytes(entries, kind, int64_indices, float64_values);
    std::vector<char> sent(bytes);
    pack(entries, kind, int64_indices, float64_values, sent.data());
    std::vector<Index> index_back(count);
    std::vector<Value> value_back(count);
    expect(!unpack(sent.data(), bytes, count, n, kind, int64_indices, float64_values, index_back.data(), value_back.data()) &&
               index == index_back,
           "unpacked indices", "packed", count, size_t(kind));
    for (size_t i = 0; i < count; i++)
        expect(value[i] == value_back[i] || (value[i] != value[i] && value_back[i] != value_back[i]),
               "unpacked values", "packed", count, size_t(kind));
    for (int trial = 0; trial < 60; trial++) {
        std::vector<char> bad(trial % 3 ? bytes : random() % (bytes + 20));
        std::copy_n(sent.begin(), std::min(bytes, bad.size()), bad.begin());
        const size_t reach = random() % 2 ? bad.size() : std::min(bad.size(), size_t(48));
        for (size_t i = random() % 4; reach && i > 0; i--) bad[random() % reach] ^= char(1 << random() % 8);
        if (trial % 10 == 0)
            for (size_t i = trial % 20 ? 0 : 16; i < bad.size(); i++) bad[i] = char(random());
        const size_t others = trial % 5 ? count : random() % (count + 4);
        const size_t size = trial % 7 ? n : size_t(random() >> random() % 64);
        std::vector<Index> indices(others);
        std::vector<Value> values(others);
        const char* wrong =
            unpack(bad.data(), bad.size(), others, size, kind, int64_indices, float64_values, indices.data(), values.data());
        if (!wrong) well_formed({indices.data(), values.data(), others}, 0, size, int64_indices, float64_values);
        checks++;
    }
}

}  // namespace

int main() {
    std::mt19937_64 random(1);
    for (const char* simd : {"portable", "avx2", "avx512"}) {
        if (!use_simd(simd)) continue;
        for (const char* kind : {"normal", "equal", "zeros", "ascending", "rounded", "special"}) {
            select<F32, F32>(Type::f32, Type::f32, kind, 530000, 999, random);  // where threads share the work
            for (size_t n : {0, 1, 15, 64, 129, 5000})
                for (size_t k : {size_t(1), size_t(7), n / 50, n / 3, n}) {
                    if (k == 0) continue;
                    select<F32, F32>(Type::f32, Type::f32, kind, n, k, random);
                    select<F16, F16>(Type::f16, Type::f16, kind, n, k, random);
                    select<BF16, BF16>(Type::bf16, Type::bf16, kind, n, k, random);
                    select<F16, F32>(Type::f16, Type::f32, kind, n, k, random);
                    select<BF16, F32>(Type::bf16, Type::f32, kind, n, k, random);
                    select<F64, F64>(Type::f64, Type::f64, kind, n, k, random);
                }
            chunks<F32, F32>(Type::f32, Type::f32, kind, 530000, 64, 4096, random);
            chunks<F64, F64>(Type::f64, Type::f64, kind, 30000, 90, 20001, random);
            for (size_t n : {1, 129, 5000, 9001})
                for (size_t chunk : {1, 63, 1000, 4160, 10000})
                    for (size_t k : {size_t(1), chunk / 60, chunk}) {
                        if (k == 0) continue;
                        chunks<F32, F32>(Type::f32, Type::f32, kind, n, k, chunk, random);
                        chunks<BF16, BF16>(Type::bf16, Type::bf16, kind, n, k, chunk, random);
                        chunks<F16, F32>(Type::f16, Type::f32, kind, n, k, chunk, random);
                        chunks<F64, F64>(Type::f64, Type::f64, kind, n, k, chunk, random);
                    }
            for (size_t a : {0, 1, 16, 2000})
                for (size_t b : {0, 5, 1999})
                    for (size_t k : {1, 17, 1000, 5000}) merging(kind, a, b, k, random);
        }
        for (size_t count : {0, 1, 2, 3, 4, 63, 64, 65, 130, 1000})
            for (int spread : {0, 1, 2}) {
                for (int kind = 0; kind < KINDS; kind++) {
                    packing<int32_t, float>(Kind(kind), count, spread, random);
                    packing<int64_t, float>(Kind(kind), count, spread, random);
                }
                packing<int64_t, double>(Kind::exact, count, spread, random);
            }
        std::printf("%s ", simd);
    }
    std::printf("passed, %d checks\n", checks);
}
