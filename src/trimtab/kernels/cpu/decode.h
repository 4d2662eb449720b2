// Codes of VL outputs at once, to words of a panel: four bytes of each are turned to be one register, whose lanes are
// looked up, scaled and rounded together. Values are those of codes.h, bit for bit.
#pragma once
#include "codes.h"

#if defined(__AVX512F__)
#define HAVE_DECODE
// The values of four bytes of each output, in order.
template <int Type>
INLINE void values_of(vu bytes, vf table, vf scale, vf* to) {
    UNROLL for (int i = 0; i < 4; i++) {
        if constexpr (Type == NF4 || Type == MXFP4) {
            constexpr int first = Type == NF4 ? 4 : 0;
            const auto look = [&](vu code) { return (vf)_mm512_permutexvar_ps((__m512i)code, (__m512)table); };
            to[2 * i] = look(bytes >> (8 * i + first)) * scale;
            to[2 * i + 1] = look(bytes >> (8 * i + 4 - first)) * scale;
        } else if constexpr (Type == INT8) {
            to[i] = __builtin_convertvector((vi)(bytes << (24 - 8 * i)) >> 24, vf) * scale * INT8_UNIT;
        } else {
            to[i] = e4m3(bytes >> 8 * i & 0xff) * scale;
        }
    }
}

// The scales at places `at` of a column of them.
template <int Type>
INLINE vf scales_at(const void* column, const int32_t* at) {
    if constexpr (Type == MXFP4) {
        uint8_t powers[VL];
        UNROLL for (int i = 0; i < VL; i++) powers[i] = ((const uint8_t*)column)[at[i]];
        const vu power = wide<uint8_t, vu>(powers);
        return (vf)(power ? power << 23 : vu{} + (1u << 22));
    } else {
        return (vf)_mm512_i32gather_ps(_mm512_loadu_si512(at), column, 4);
    }
}

// Values in : in + n of outputs `out`, `out` + apart, ... to rows of words from `to` on; n is a multiple of 32.
template <class Op, class T, int Type>
void decode_words(const Stack& w, long out, long apart, long in, long n, typename Op::Word* to) {
    constexpr long each = Type == NF4 || Type == MXFP4 ? 8 : 4, scale_bytes = Type == MXFP4 ? 1 : 4;
    const vf table = load(Type == MXFP4 ? E2M1_VALUES : NF4_VALUES);
    const long ld = w.bytes(w.ins) * apart, block = w.block();
    const uint8_t* from = w.at(out, in);
    int32_t at[VL];
    for (int i = 0; i < VL; i++) at[i] = (Type == FP8 ? (out + i * apart) / 128 : out + i * apart) * w.along();
    const char* column = (const char*)w.scales + in / block * scale_bytes;
    vf scale = scales_at<Type>(column, at);
    for (long k = 0, left = block - in % block; k < n; k += VL * each, from += VL * 4) {
        const long words = std::min<long>(VL, (n - k) / each);
        vf turned[VL];
        UNROLL for (int i = 0; i < VL; i++) {
            __builtin_prefetch(from + (i + NR) * ld, 0, 2);  // of the next panel
            turned[i] = (vf)_mm512_maskz_loadu_epi32((1u << words) - 1, from + i * ld);
        }
        transpose(turned);
        alignas(64) uint32_t bytes[VL][VL];
        UNROLL for (int i = 0; i < VL; i++) store(bytes[i], (vu)turned[i]);
        for (long word = 0; word < words; word++) {
            if (left == 0) scale = scales_at<Type>(column += scale_bytes, at), left = block;
            vf values[each];
            values_of<Type>(*(const vu*)bytes[word], table, scale, values);
            UNROLL for (int i = 0; i < each; i += 2) to = Op::template put_two<T>(values[i], values[i + 1], to);
            left -= each;
        }
    }
}
template <class Op, class T>
void decode_words(const Stack& w, long out, long apart, long in, long n, typename Op::Word* to) {
    switch (w.type) {
        case NF4: return decode_words<Op, T, NF4>(w, out, apart, in, n, to);
        case INT8: return decode_words<Op, T, INT8>(w, out, apart, in, n, to);
        case FP8: return decode_words<Op, T, FP8>(w, out, apart, in, n, to);
        default: return decode_words<Op, T, MXFP4>(w, out, apart, in, n, to);
    }
}
#endif
