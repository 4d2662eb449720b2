// Codes of VL outputs at once, to words of a panel: eight bytes of each are turned to lie side by side, and pairs of
// their values are looked up, scaled and rounded together. Values are those of codes.h, bit for bit.
#pragma once
#include "codes.h"

#if defined(__AVX512F__)
#define HAVE_DECODE
// Of each eight bytes the eight bits from E on and from O on, as byte At of two words: what lies below is 0.
template <int E, int O, int At>
INLINE vu two_fields(vu bytes) {
#if defined(__AVX512VBMI__)
    if constexpr (At == 0) {  // those of four pairs together: shifts leave the port of `permutexvar` free
        constexpr int p = E / 8 % 4 * 8;
        constexpr long long each = 0x01010101, from = 0x18100800 - p * each, both = (from + O * each) << 32 | (from + E * each);
        return (vu)_mm512_multishift_epi64_epi8(_mm512_set1_epi64(both), (__m512i)bytes) >> p;
    }
    const __m512i from = _mm512_set1_epi64((E | (long long)O << 32) << 8 * At);
    return (vu)_mm512_maskz_multishift_epi64_epi8(0x1111111111111111ull << At, from, (__m512i)bytes);
#else
    const __m512i even = _mm512_srli_epi64((__m512i)bytes, E), odd = _mm512_srli_epi64((__m512i)bytes, O);
    return ((vu)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA) & 0xff) << 8 * At;
#endif
}

// Values 2 P and 2 P + 1 of the eight bytes of each of VL / 2 outputs.
template <int Type, int P>
INLINE vf pair_of(vu bytes, vf table, vf scale) {
    if constexpr (Type == INT8) {  // 2^24 times as large
        const vf value = __builtin_convertvector((vi)two_fields<16 * P, 16 * P + 8, 3>(bytes), vf);
        return value * scale * (INT8_UNIT / (1 << 24));
    } else if constexpr (Type == FP8) {
        return e4m3(two_fields<16 * P, 16 * P + 8, 0>(bytes)) * scale;
    } else {
        constexpr int even = 8 * P + (Type == NF4 ? 4 : 0), odd = 8 * P + (Type == NF4 ? 0 : 4);
        const __m512i codes = (__m512i)two_fields<even, odd, 0>(bytes);
        return (vf)_mm512_permutexvar_ps(codes, (__m512)table) * scale;  // of an index four bits count
    }
}

#if defined(__AVX512VBMI__)
// The bf16 of each e4m3 code without its sign.
struct E4m3 {
    alignas(64) uint16_t bits[128] = {};
    constexpr E4m3() {
        for (int code = 1; code < 127; code++) {
            int exponent = code >> 3, mantissa = code & 7;
            for (; code < 8 && !(mantissa & 8); exponent--) mantissa <<= 1;
            bits[code] = (exponent + (code < 8) + 120) << 7 | (mantissa & 7) << 4;
        }
        bits[127] = 0x7fc0;
    }
};
constexpr E4m3 E4M3;

// As `pair_of`, of e4m3 and unscaled, of the eight bytes of each of VL outputs: of the first half of them, and the others.
template <int P>
INLINE void e4m3_pairs(const vu* bytes, vf* to) {
    const auto table = [](int i) { return _mm512_load_si512(E4M3.bits + 32 * i); };
    // In the order that `unpack` turns to that of the outputs.
    const __m512i order = _mm512_set_epi64(
        0x79007800710070, 0x39003800310030, 0x69006800610060, 0x29002800210020,
        0x59005800510050, 0x19001800110010, 0x49004800410040, 0x09000800010000);
    const __m512i from = _mm512_add_epi8(order, _mm512_set1_epi8(2 * P));
    const __m512i code = _mm512_maskz_permutex2var_epi8(
        0x5555555555555555, (__m512i)bytes[0], from, (__m512i)bytes[1]);
    const __m512i low = _mm512_permutex2var_epi16(table(0), code, table(1));
    const __m512i high = _mm512_permutex2var_epi16(table(2), code, table(3));
    const __m512i value = _mm512_mask_mov_epi16(low, _mm512_test_epi16_mask(code, _mm512_set1_epi16(64)), high);
    const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(code, 8), _mm512_set1_epi16(-0x8000));
    const __m512i all = _mm512_or_si512(value, sign), zero = _mm512_setzero_si512();
    to[0] = (vf)_mm512_unpacklo_epi16(zero, all);
    to[1] = (vf)_mm512_unpackhi_epi16(zero, all);
}
#endif

// Scale `i` of those of a chunk, which lie in eight bytes of each of VL / 2 outputs: for both values of a pair.
template <int Type>
INLINE vf scale_of(vu bytes, long i) {
    if (i && Type != MXFP4) return (vf)_mm512_movehdup_ps((__m512)bytes);
    const vu first = (vu)_mm512_moveldup_ps((__m512)bytes), power = first >> 8 * i & 0xff;
    return (vf)(Type != MXFP4 ? first : power ? power << 23 : vu{} + (1u << 22));
}

template <class Op, class T, int Type, class Take, int... P>
INLINE void take_pairs(
    const vu* bytes, vf table, const vf* scale, long word, const Take& take, std::integer_sequence<int, P...>
) {
    const auto pair = [&](auto p) __attribute__((always_inline)) {
        vf v[4];
#if defined(__AVX512VBMI__)
        if constexpr (Type == FP8) {
            e4m3_pairs<p>(bytes, v);
            e4m3_pairs<p>(bytes + 2, v + 2);
            UNROLL for (int i = 0; i < 4; i++) v[i] *= scale[i];
        } else
#endif
        UNROLL for (int i = 0; i < 4; i++) v[i] = pair_of<Type, p>(bytes[i], table, scale[i]);
        Op::template take_two<T>(v, word + p * 2 / Op::values, take);
    };
    (pair(int_constant<P>()), ...);
}

// Values in : in + n of outputs `out`, `out` + apart, ..., in chunks of 64 bytes of each: take(k, words) of each word k
// has those of NR outputs. `in` is a multiple of a chunk's values, n of 32.
template <class Op, class T, int Type, class Take>
INLINE void decode_panel(const Stack& w, long out, long apart, long in, long n, const Take& take) {
    constexpr bool halves = Type == NF4 || Type == MXFP4;
    constexpr long each = halves ? 16 : 8, half = VL / 2, chunk = half * each, scale_bytes = Type == MXFP4 ? 1 : 4;
    constexpr long blocks = Type == NF4 ? 2 : Type == MXFP4 ? 4 : 1, along = half / blocks;
    constexpr long block = Type == INT8 ? 1L << 62 : Type == FP8 ? 128 : chunk / blocks;
    const vf table = load(Type == MXFP4 ? E2M1_VALUES : NF4_VALUES);
    const long ld = w.bytes(w.ins) * apart, of_row = w.along();
    const uint8_t* from = w.at(out, in);
    // The next panel is asked for from end to end, some lines with each run, for more would wait for one another: rows in
    // which it lies, of two parts in turn each half of them.
    const uint8_t* soon = w.at(out + NR * apart + out % apart * (NR - 1), 0) + in / chunk * NR * 64;
    for (long k = 0; k < n; k += chunk, from += 64) {
        const long runs = std::min(half, (n - k) / each), scales = (runs + along - 1) / along * scale_bytes;
        alignas(64) uint64_t scale[NR];
        alignas(64) uint32_t bytes[half][4][VL];
        UNROLL for (int i = 0; i < NR; i++) {
            const long row = Type == FP8 ? (out + i * apart) / 128 : out + i * apart;
            const char* column = (const char*)w.scales + (row * of_row + (in + k) / block) * scale_bytes;
            if (runs == half) memcpy(scale + i, column, blocks * scale_bytes);  // in one load
            else memcpy(scale + i, column, scales);
        }
        for (int part = 0; part < 4; part++) {
            vf turned[half];
            UNROLL for (int i = 0; i < half; i++) {
                const uint8_t* row = from + (part * half + i) * ld;
                turned[i] = (vf)_mm512_maskz_loadu_epi64((1u << runs) - 1, row);
            }
            exchange<2, 2>(turned);
            UNROLL for (int i = 0; i < half; i++) store(bytes[i][part], (vu)turned[i]);
        }
        for (long run = 0, i = 0; run < runs; i++) {
            vf by[4];
            UNROLL for (int part = 0; part < 4; part++) by[part] = scale_of<Type>(((const vu*)scale)[part], i);
            for (const long end = std::min(runs, run + along); run < end; run++) {
                UNROLL for (int l = 0; l < 4; l++) __builtin_prefetch(soon += 64, 0, 3);
                take_pairs<Op, T, Type>(
                    (const vu*)bytes[run], table, by, (k + run * each) / Op::values, take,
                    std::make_integer_sequence<int, each / 2>{});
            }
        }
    }
}

// run(a type of codes).
template <class Run>
INLINE void with_codes(int32_t type, const Run& run) {
    switch (type) {
        case NF4: return run(int_constant<NF4>());
        case INT8: return run(int_constant<INT8>());
        case FP8: return run(int_constant<FP8>());
        default: return run(int_constant<MXFP4>());
    }
}

// To a panel of words.
template <class Op, class T, int Type>
void panel_of_codes(const Stack& w, long out, long apart, long in, long n, typename Op::Word* to) {
    decode_panel<Op, T, Type>(w, out, apart, in, n, [&](long k, const auto* words) __attribute__((always_inline)) {
        store(to + k * NR, words[0]);
        store(to + k * NR + VL, words[1]);
    });
}

// Times rows of A, multiplied as they are decoded: as a tile of M rows, of which the last ones may be one row.
template <class Op, class T, int Type, int M>
void tile_of_codes(
    const Stack& w, long out, long apart, long in, long n, long rows, const typename Op::Word* a, long lda,
    const Sums& c
) {
    const typename Op::Word* row[M];
    vf acc[M][2];
    UNROLL for (int m = 0; m < M; m++) row[m] = a + std::min<long>(m, rows - 1) * lda, acc[m][0] = acc[m][1] = vf{};
    decode_panel<Op, T, Type>(w, out, apart, in, n, [&](long k, const auto* words) __attribute__((always_inline)) {
        UNROLL for (int m = 0; m < M; m++) {
            const auto v = Op::spread(row[m][k]);
            UNROLL for (int j = 0; j < 2; j++) acc[m][j] = Op::add(acc[m][j], v, words[j]);
        }
    });
    for (int m = 0; m < std::min<long>(M, rows); m++)
        for (int j = 0; j < 2; j++)
            store(c.row(m) + j * VL, c.from ? acc[m][j] + load(c.from + m * c.ld_from + j * VL) : acc[m][j]);
}
#endif
