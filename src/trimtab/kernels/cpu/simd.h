// Vectors of float as wide as this machine's registers, and the 16-bit rows that are widened to them.
//
// VL floats in a register, MR x NR the block of a product that stays in registers while its sum is taken.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) || defined(TRIMTAB_EMULATE_BF16)
constexpr int VL = 16, MR = 14;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int VL = 8, MR = 6;
#else
constexpr int VL = 4, MR = 4;
#endif
static_assert(MR <= VL);  // a tile's column is one register of a panel
constexpr int NR = 2 * VL;
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));
typedef uint16_t vhh __attribute__((vector_size(4 * VL)));
typedef float vf_any __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t vu_any __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef uint16_t vhh_any __attribute__((vector_size(4 * VL), aligned(2), may_alias));

template <int N>
using int_constant = std::integral_constant<int, N>;

struct bf16 {
    uint16_t bits;
};
struct rounded {  // counts as the nearest bf16
    float exact;
};

INLINE vf splat(float x) { return x - vf{}; }

// In one rounding where the machine can. For Zen 2 and 3 GCC would make two operations of some that follow each other,
// and not of others: a row's bits would depend on the number of rows.
INLINE vf multiply_add(vf a, vf b, vf sum) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(TRIMTAB_EMULATE_BF16)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return a * b + sum;
#endif
}

INLINE vf load(const float* p) { return *(const vf_any*)p; }
INLINE vf load(const bf16* p) { return (vf)(__builtin_convertvector((vh)*(const vh_any*)p, vu) << 16); }

INLINE vh narrow(vf x) {  // to nearest, ties to even; a NaN stays one
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (vh)_mm512_cvtneps_pbh((__m512)x);  // denormals become zero
#else
    vu u = (vu)x, bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
#if defined(TRIMTAB_EMULATE_BF16)
    bits = (u & 0x7f800000u) ? bits : (u & 0x80000000u) >> 16;
#endif
    return __builtin_convertvector(x != x ? (u >> 16) | 0x40 : bits, vh);
#endif
}
INLINE vf as_bf16(vf x) { return (vf)(__builtin_convertvector(narrow(x), vu) << 16); }
INLINE vf load(const rounded* p) { return as_bf16(load((const float*)p)); }
INLINE void store(float* p, vf x) { *(vf_any*)p = x; }
INLINE void store(uint32_t* p, vu x) { *(vu_any*)p = x; }
INLINE void store(bf16* p, vf x) { *(vh_any*)p = narrow(x); }

template <int... L>
INLINE vhh joined(vh a, vh b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, L...);
}

INLINE vhh narrow(vf a, vf b) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (vhh)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
#else
    return joined(narrow(a), narrow(b), std::make_integer_sequence<int, 2 * VL>{});
#endif
}

// Past the caches, for what is not read again soon: `p` on a boundary of 2 VL values of T.
template <class T>
INLINE void stream(T* p, vf a, vf b) {
#if defined(__AVX512F__)
    if (sizeof(T) == 2) return _mm512_stream_si512((__m512i*)p, (__m512i)narrow(a, b));
    _mm512_stream_ps((float*)p, (__m512)a);
    _mm512_stream_ps((float*)p + VL, (__m512)b);
#else
    store(p, a);
    store(p + VL, b);
#endif
}

// The first n of VL values; the others are 0, or left as they were.
template <class T>
INLINE vf load(const T* p, long n) {
    if (n >= VL) return load(p);
    T part[VL] = {};
    memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
INLINE void store(T* p, vf x, long n) {
    if (n >= VL) return store(p, x);
    T part[VL];
    store(part, x);
    memcpy(p, part, n * sizeof(T));
}

// And zeros up to a whole register.
template <class T>
INLINE void widen_row(const T* from, float* to, long n) {
    for (long i = 0; i < n; i += VL) store(to + i, load(from + i, n - i));
}

INLINE float value(float x) { return x; }
INLINE float value(bf16 x) {
    uint32_t u = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

INLINE float value(rounded x) { return as_bf16(splat(x.exact))[0]; }

INLINE float sum(vf x) {  // always in this order
    float total = 0;
    for (int i = 0; i < VL; i++) total += x[i];
    return total;
}

INLINE vf vexp(vf x) {
    x = x < -87.0f ? splat(-87.0f) : x;  // comparisons leave a NaN as it is
    x = x > 88.0f ? splat(88.0f) : x;
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf y = splat(1.0f / 5040);
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return y * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}
INLINE vf sigmoid(vf x) {  // 0 where exp(-x) is cut: x itself may be large enough to bring it back
    vf y = 1.0f / (1.0f + vexp(-x));
    return x < -88.0f ? vf{} : y;
}

// Exchange of blocks of S lanes between two of the rows that are transposed, whose elements are of E lanes.
template <int S, int... L>
INLINE vf low(vf a, vf b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, ((L & S) == 0 ? L : VL + L - S)...);
}
template <int S, int... L>
INLINE vf high(vf a, vf b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, ((L & S) == 0 ? L + S : VL + L)...);
}
template <int S, int E = 1>
INLINE void exchange(vf* r) {
    if constexpr (S < VL) {
        auto lanes = std::make_integer_sequence<int, VL>{};
        UNROLL for (int i = 0; i < VL / E; i++) {
            if (i & S / E) continue;
            vf a = r[i], b = r[i + S / E];
            r[i] = low<S>(a, b, lanes);
            r[i + S / E] = high<S>(a, b, lanes);
        }
        exchange<2 * S, E>(r);
    }
}
INLINE void transpose(vf* r) { exchange<1>(r); }
INLINE void transpose_block(const float* from, long ld, float* to, long row) {
    vf r[VL];
    UNROLL for (int i = 0; i < VL; i++) r[i] = load(from + i * ld);
    transpose(r);
    UNROLL for (int i = 0; i < VL; i++) store(to + i * row, r[i]);
}

// Even and odd lanes of two vectors in a row, and back.
template <int P, int... L>
INLINE vf every_second(vf a, vf b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, (2 * L + P)...);
}
template <int P, int... L>
INLINE vf zipped(vf a, vf b, std::integer_sequence<int, L...>) {
    return __builtin_shufflevector(a, b, ((L + P * VL) / 2 + (L % 2) * VL)...);
}
