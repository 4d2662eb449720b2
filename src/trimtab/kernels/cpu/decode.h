// Codes of VL outputs at once, to words of a panel: eight bytes of each are turned to lie side by side, and values are
// looked up, scaled and rounded: those of codes.h, bit for bit, but for MXFP4's -0 and INT8's with scales above 2^97.
#pragma once
#include "codes.h"

#if defined(__AVX512BW__)
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

// What codes are looked up in: floats, or bf16 by a code's lower five bits. MXFP4's are its values times 2^126, but
// zeros stay zeros; a scale then takes from the exponent. FP8's are 32 values times the scale, to whose
// exponent the upper two bits of the code's are added; denormals have a table of their own.
struct Tables {
    vu values, small;
};
template <int Type, bool Looked>
INLINE Tables tables_of(float scale) {
    const vf floats = load(Type == MXFP4 ? E2M1_VALUES : NF4_VALUES);
    const vhh rounded = narrow(floats, floats);
    if (!Looked) return {(vu)floats, vu{}};
    if (Type == MXFP4) return {(vu)((rounded & 0x7fff) ? rounded + 0x3f00 : 0), vu{}};
    const vu code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf low = (vf)((code << 20) + (120u << 23)) * scale, high = (vf)((code << 20) + (122u << 23)) * scale;
    const vf small = __builtin_convertvector(code, vf) * 0x1p-9f * scale;
    return {(vu)narrow(low, high), (vu)narrow(small, small)};
}

// Values 4 Q to 4 Q + 3 of the eight bytes of each of VL / 2 outputs, as bf16. less: what MXFP4's scale takes from them.
template <int Type, int Q>
INLINE vf four_of(vu bytes, const Tables& by, vf less) {
    const __m512i x = (__m512i)bytes;
    if constexpr (Type == MXFP4) {
        const __m512i four_times = _mm512_set4_epi32(0x09090909, 0x08080808, 0x01010101, 0);
        const __m512i byte = _mm512_shuffle_epi8(x, _mm512_add_epi8(four_times, _mm512_set1_epi8(2 * Q)));
        const __m512i code = _mm512_srlv_epi16(byte, _mm512_set1_epi32(0x40000));
        return (vf)_mm512_subs_epu16(_mm512_permutexvar_epi16(code, (__m512i)by.values), (__m512i)less);
    } else {  // a code in both bytes of a value
        const __m512i twice = _mm512_set4_epi32(0x0b0b0a0a, 0x09090808, 0x03030202, 0x01010000);
        const __m512i code = _mm512_shuffle_epi8(x, _mm512_add_epi8(twice, _mm512_set1_epi8(4 * Q)));
        const __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
        const __m512i value = _mm512_mask_permutexvar_epi16(
            _mm512_permutexvar_epi16(code, (__m512i)by.values), small, code, (__m512i)by.small);
        const __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi16(0x600));
        const __m512i sign = _mm512_set1_epi16(-0x8000);
        return (vf)_mm512_ternarylogic_epi64(_mm512_add_epi16(value, exponent), code, sign, 0x78);  // a ^ (b & c)
    }
}

// Scale `i` of those of a chunk, which lie in eight bytes of each of VL / 2 outputs: for both values of a pair, or what it
// takes from four that are looked up.
template <int Type, bool Looked>
INLINE vf scale_of(vu bytes, long i) {
    if constexpr (Looked) {
        const __m512i e = _mm512_maskz_shuffle_epi8(
            0x5555555555555555, (__m512i)bytes, _mm512_set4_epi32(0x80008, 0x80008, 0, 0) + _mm512_set1_epi16(i));
        return (vf)_mm512_sub_epi16(_mm512_set1_epi16(0x7e80), _mm512_slli_epi16(e, 7));
    }
    if (i && Type != MXFP4) return (vf)_mm512_movehdup_ps((__m512)bytes);
    const vu first = (vu)_mm512_moveldup_ps((__m512)bytes), power = first >> 8 * i & 0xff;
    return (vf)(Type != MXFP4 ? first : power ? power << 23 : vu{} + (1u << 22));
}

// The values of the eight bytes of each of NR outputs.
template <class Op, class T, int Type, bool Looked, class Take, int... P>
INLINE void take_run(
    const vu* bytes, const Tables& by, const vf* scale, long word, const Take& take, std::integer_sequence<int, P...>
) {
    const auto some = [&](auto p) __attribute__((always_inline)) {
        vf v[4];
        const long k = word + p * (Looked ? 4 : 2) / Op::values;
        if constexpr (Looked) {
            UNROLL for (int i = 0; i < 4; i++) v[i] = four_of<Type, p>(bytes[i], by, scale[i]);
            const auto words_of = [&](auto order, long k) __attribute__((always_inline)) {
                const auto of = [](vf a, vf b) { return (vu)_mm512_shuffle_ps((__m512)a, (__m512)b, decltype(order)::value); };
                Op::take_pairs(of(v[0], v[1]), of(v[2], v[3]), k, take);
            };
            words_of(int_constant<0x88>(), k);
            words_of(int_constant<0xdd>(), k + 2 / Op::values);
        } else {
            UNROLL for (int i = 0; i < 4; i++) v[i] = pair_of<Type, p>(bytes[i], (vf)by.values, scale[i]);
            if constexpr (sizeof(T) == 2) Op::take_pairs((vu)narrow(v[0], v[1]), (vu)narrow(v[2], v[3]), k, take);
            else Op::take_two(v, k, take);
        }
    };
    (some(int_constant<P>()), ...);
}

// Values in : in + n of outputs `out`, `out` + apart, ..., in chunks of 64 bytes of each: take(k, words) of each word k
// has those of NR outputs. `in` is a multiple of a chunk's values, n of 32.
template <class Op, class T, int Type, class Take>
INLINE void decode_panel(const Stack& w, long out, long apart, long in, long n, const Take& take) {
    constexpr bool halves = Type == NF4 || Type == MXFP4;
    constexpr long each = halves ? 16 : 8, half = VL / 2, chunk = half * each, scale_bytes = Type == MXFP4 ? 1 : 4;
    constexpr long blocks = Type == NF4 ? 2 : Type == MXFP4 ? 4 : 1, along = half / blocks;
    constexpr long block = Type == INT8 ? 1L << 62 : Type == FP8 ? 128 : chunk / blocks;
    const long ld = w.bytes(w.ins) * apart, of_row = w.along();
    const uint8_t* from = w.at(out, in);
    // The next panel is asked for from end to end, some lines with each run, for more would wait for one another: rows in
    // which it lies, of two parts in turn each half of them.
    const uint8_t* soon = w.at(out + NR * apart + out % apart * (NR - 1), 0) + in / chunk * NR * 64;
    // A chunk. `looked` up as bf16: false, and nothing is taken, where a scale or a code is not as the tables have it.
    const auto take_chunk = [&](auto looked, long k) __attribute__((always_inline)) {
        constexpr bool fp8 = looked && Type == FP8, mxfp4 = looked && Type == MXFP4;
        const long runs = std::min(half, (n - k) / each), scales = (runs + along - 1) / along * scale_bytes;
        // Which output: those looked up are put in order by `words_of`.
        const auto nth = [&](int p, int i) { return looked ? p / 2 * VL + p % 2 * 2 + i / 2 * 4 + i % 2 : p * half + i; };
        alignas(64) uint64_t scale[NR];
        alignas(64) uint32_t bytes[half][4][VL];
        const float all = fp8 ? w.scale(out, in + k) : 1, size = __builtin_fabsf(all);
        if (fp8 && (out / 128 != (out + (NR - 1) * apart) / 128 || !(size > 0x1p-110f && size < 0x1p110f))) return false;
        __m512i largest = _mm512_setzero_si512();  // of codes without signs: 0xfe is NaN; or of powers - 2: to 250
        for (int part = 0; part < 4; part++) {
            for (int i = 0; !fp8 && i < half; i++) {
                const long row = (out + nth(part, i) * apart) / (Type == FP8 ? 128 : 1);
                const char* column = (const char*)w.scales + (row * of_row + (in + k) / block) * scale_bytes;
                if (runs == half) memcpy(scale + part * half + i, column, blocks * scale_bytes);  // in one load
                else memcpy(scale + part * half + i, column, scales);
            }
            vf turned[half];
            UNROLL for (int i = 0; i < half; i++) {
                const __m512i row = _mm512_maskz_loadu_epi64((1u << runs) - 1, from + nth(part, i) * ld);
                if (fp8) largest = _mm512_max_epu8(largest, _mm512_add_epi8(row, row));
                turned[i] = (vf)row;
            }
            const __m512i given = _mm512_load_si512(scale + part * half), two = _mm512_set1_epi8(2);
            const __mmask64 known = 0x0101010101010101 * ((1 << scales) - 1);
            if (mxfp4) largest = _mm512_max_epu8(largest, _mm512_maskz_sub_epi8(known, given, two));
            exchange<2, 2>(turned);
            UNROLL for (int i = 0; i < half; i++) store(bytes[i][part], (vu)turned[i]);
        }
        if (looked && _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(fp8 ? 0xfd - 256 : 250 - 256))) return false;
        const Tables tables = tables_of<Type, looked>(all);
        for (long run = 0, i = 0; run < runs; i++) {
            vf by[4];
            UNROLL for (int part = 0; part < 4; part++) by[part] = scale_of<Type, looked>(((const vu*)scale)[part], i);
            for (const long end = std::min(runs, run + along); run < end; run++) {
                UNROLL for (int l = 0; l < 4; l++) __builtin_prefetch(soon += 64, 0, 3);
                take_run<Op, T, Type, looked>(
                    (const vu*)bytes[run], tables, by, (k + run * each) / Op::values, take,
                    std::make_integer_sequence<int, each / (looked ? 4 : 2)>{});
            }
        }
        return true;
    };
    for (long k = 0; k < n; k += chunk, from += 64) {
        if constexpr ((Type == FP8 || Type == MXFP4) && sizeof(T) == 2)
            if (take_chunk(std::true_type(), k)) continue;
        take_chunk(std::false_type(), k);
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
