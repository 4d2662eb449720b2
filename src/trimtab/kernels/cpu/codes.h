// Weights as codes: runs of values of one output of a weight [outs, ins], decoded to where products bring them from.
//
// A value is that of its code times its block's scale in float, rounded to the rows' type: as
// trimtab.experts.quantized has it, bit for bit, but for denormals of bf16, which count as zero in products.
#pragma once
#include "call.h"
#include "tile.h"

template <class T>
struct coded {  // counts as what it decodes to, a T
    uint8_t code;
};
template <class W>
struct Decoded {
    using type = W;
    static constexpr bool codes = false;
};
template <class T>
struct Decoded<coded<T>> {
    using type = T;
    static constexpr bool codes = true;
};
template <class W>
using Beside = typename Decoded<W>::type;  // what an adapter's matrices are beside weights of W

constexpr float NF4_VALUES[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
constexpr float INT8_UNIT = 7.874015718698502e-3f;
constexpr float E2M1_VALUES[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// VL bytes as numbers of 4 bytes.
template <class C, class V>
INLINE V wide(const C* p) {
#if defined(__AVX512F__)  // compilers take detours
    const __m128i bytes = _mm_loadu_si128((const __m128i*)p);
    return (V)(C(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#else
    typedef C bytes __attribute__((vector_size(VL), aligned(1), may_alias));
    return __builtin_convertvector(*(const bytes*)p, V);
#endif
}
INLINE vf widened(const int8_t* p) { return __builtin_convertvector((wide<int8_t, vi>(p)), vf); }
INLINE vf e4m3(vu code) {  // a sign, 4 bits of exponent, 3 of mantissa; all ones are NaN
    const vu bits = (code & 0x7f) << 20;
    const vf normal = (vf)(bits + (120u << 23)), small = (vf)(bits + (121u << 23)) - 0.015625f;
    const vu value = bits < (1u << 23) ? (vu)small : (vu)normal;
    return (vf)((code & 0x7f) == 0x7f ? value | 0x7fc00000u : value | (code & 0x80) << 24);
}
INLINE vf widened(const uint8_t* p) { return e4m3(wide<uint8_t, vu>(p)); }

template <class C, class V>
INLINE void scaled_bytes(const C* from, long n, float scale, float more, V* to) {
    long i = 0;
    for (; i + VL <= n; i += VL) store(to + i, widened(from + i) * scale * more);
    if (i == n) return;
    C part[VL] = {};
    memcpy(part, from + i, n - i);
    store(to + i, widened(part) * scale * more, n - i);
}

// Two values in a byte: the upper half comes first, or the lower one. n is a multiple of 8.
template <class V>
INLINE void scaled_halves(const uint8_t* from, long n, const float* values, bool high, float scale, V* to) {
    long i = 0;
#if defined(__AVX512F__)
    const __m512 table = _mm512_loadu_ps(values), s = _mm512_set1_ps(scale);
    for (; i + 32 <= n; i += 32) {
        const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(from + i / 2)));
        const __m512 up = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(byte, 4), table), s);
        const __m512 low = _mm512_mul_ps(_mm512_permutexvar_ps(byte, table), s);  // of an index four bits count
        const vf even = (vf)(high ? up : low), odd = (vf)(high ? low : up);
        if constexpr (sizeof(V) == 2) {
            const vu pairs = __builtin_convertvector(narrow(even), vu) | __builtin_convertvector(narrow(odd), vu) << 16;
            store((uint32_t*)(to + i), pairs);
        } else {
            const auto lanes = std::make_integer_sequence<int, VL>{};
            store(to + i, zipped<0>(even, odd, lanes));
            store(to + i + VL, zipped<1>(even, odd, lanes));
        }
    }
#endif
    for (; i < n; i += VL) {
        float wide[VL];
        for (int j = 0; j < VL; j += 2) {
            const uint8_t byte = from[(i + j) / 2];
            wide[j] = values[high ? byte >> 4 : byte & 15] * scale;
            wide[j + 1] = values[high ? byte & 15 : byte >> 4] * scale;
        }
        store(to + i, load(wide), n - i);
    }
}

// One expert's codes.
struct Stack {
    int32_t type;
    const uint8_t* codes;
    const void* scales;
    long outs, ins;
    static Stack of(int32_t type, const void* codes, const void* scales, long e, long outs, long ins) {
        Stack s = {type, nullptr, nullptr, outs, ins};
        s.codes = (const uint8_t*)codes + e * outs * s.bytes(ins);
        const long each = type == FP8 ? up_to(outs, 128) / 128 * s.along() : outs * s.along();
        s.scales = (const char*)scales + e * each * (type == MXFP4 ? 1 : 4);
        return s;
    }
    long bytes(long n) const { return type == NF4 || type == MXFP4 ? n / 2 : n; }
    long block() const { return type == NF4 ? 64 : type == MXFP4 ? 32 : type == FP8 ? 128 : ins; }
    long along() const { return (ins + block() - 1) / block(); }  // scales of an output
    const uint8_t* at(long out, long in) const { return codes + out * bytes(ins) + bytes(in); }
    float scale(long out, long in) const {
        const long at = (type == FP8 ? out / 128 : out) * along() + in / block();
        if (type != MXFP4) return ((const float*)scales)[at];
        const uint32_t e = ((const uint8_t*)scales)[at], bits = e ? e << 23 : 1u << 22;
        float power;
        memcpy(&power, &bits, 4);
        return power;
    }
    // Values in : in + n of an output.
    template <class V>
    void decode(long out, long in, long n, V* to) const {
        for (long run; n > 0; n -= run, in += run, to += run) {
            run = std::min(n, block() - in % block());
            const uint8_t* from = at(out, in);
            const float s = scale(out, in);
            if (type == NF4) scaled_halves(from, run, NF4_VALUES, true, s, to);
            else if (type == MXFP4) scaled_halves(from, run, E2M1_VALUES, false, s, to);
            else if (type == INT8) scaled_bytes((const int8_t*)from, run, s, INT8_UNIT, to);
            else scaled_bytes(from, run, s, 1.0f, to);
        }
    }
};
