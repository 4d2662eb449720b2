// Codes of NR outputs at once, to words of a panel: bytes of each are turned to lie side by side, and their values are
// looked up together. They are those of codes.h, bit for bit.
#pragma once
#include "codes.h"

// Codes `in` : in + n of so many outputs, row by row, to a panel of words.
template <class Op, class T>
void panel_by_rows(const Stack& w, long out, long apart, long in, long n, typename Op::Word* to, long outs);

#if defined(__AVX512F__)
#define HAVE_DECODE
// NF4's eight bytes of an output as two words: values of even k, the upper halves of bytes, and those of odd k. Of a word
// four lie in lower halves, then come those in upper ones.
INLINE vu parted(vu bytes) {
    const __m512i other = _mm512_ror_epi64((__m512i)bytes, 32);
    const __m512i moved = _mm512_rolv_epi32((__m512i)bytes, _mm512_set1_epi64(0x40000001c));
    return (vu)_mm512_ternarylogic_epi64(_mm512_set1_epi64(0xf0f0f0f00f0f0f0f), moved, other, 0xca);  // bit by bit
}

// Of each eight bytes the bytes E and O as byte At of two words; what lies below is 0.
template <int E, int O, int At>
INLINE vu two_bytes(vu bytes) {
#if defined(__AVX512VBMI__)
    const __m512i from = _mm512_set1_epi64((8 * E | (long long)(8 * O) << 32) << 8 * At);
    return (vu)_mm512_maskz_multishift_epi64_epi8(0x1111111111111111ull << At, from, (__m512i)bytes);
#else
    const __m512i even = _mm512_srli_epi64((__m512i)bytes, 8 * E), odd = _mm512_srli_epi64((__m512i)bytes, 8 * O);
    return ((vu)_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, _MM_PERM_CCAA) & 0xff) << 8 * At;
#endif
}

// Values 2 P and 2 P + 1 of the eight bytes of each of VL / 2 outputs.
template <int Type, int P>
INLINE vf pair_of(vu bytes, vf table, vf scale) {
    if constexpr (Type == INT8) {  // 2^24 times as large, and scales as much smaller
        const vf value = __builtin_convertvector((vi)two_bytes<2 * P, 2 * P + 1, 3>(bytes), vf);
        return value * scale * INT8_UNIT;
    } else if constexpr (Type == FP8) {
        return e4m3(two_bytes<2 * P, 2 * P + 1, 0>(bytes)) * scale;
    } else {
        const vu codes = bytes >> (8 * P % 32 + P / 4 * 4);  // of an index four bits count
        return (vf)_mm512_permutexvar_ps((__m512i)codes, (__m512)table) * scale;
    }
}

template <class Op, class T, int Type, class Take, int... P>
INLINE void take_pairs(
    const vu* bytes, vf table, const vf* scale, long word, const Take& take, std::integer_sequence<int, P...>
) {
    const auto pair = [&](auto p) __attribute__((always_inline)) {
        vf v[4];
        UNROLL for (int i = 0; i < 4; i++) v[i] = pair_of<Type, p>(bytes[i], table, scale[i]);
        Op::template take_two<T>(v, word + p * 2 / Op::values, take);
    };
    (pair(int_constant<P>()), ...);
}

// A chunk: 64 bytes of each of NR outputs, of which `runs` runs of eight are read. The next panel is asked for from end to
// end, some lines with each run, for more would wait for one another: rows in which it lies, of two parts in turn each
// half of them.
struct Chunk {
    const Stack& w;
    const long out, apart, in, runs, ld, along;  // ld: bytes from one output to the next; along: scales of one
    const uint8_t *from, *&soon;
    INLINE void ask(int lines) const {
        UNROLL for (int l = 0; l < lines; l++) __builtin_prefetch(soon += 64, 0, 3);
    }
};

// By way of floats.
template <class Op, class T, int Type, class Take>
INLINE void take_floats(const Chunk& c, long word, const Take& take) {
    constexpr long half = VL / 2, each = Type == NF4 ? 16 : 8, blocks = Type == NF4 ? 2 : 1, block = Type == NF4 ? 64 : 128;
    const vf table = load(NF4_VALUES);
    alignas(64) uint64_t scale[NR];
    alignas(64) uint32_t bytes[half][4][VL];
    UNROLL for (int i = 0; i < NR; i++) {
        const long row = c.out + i * c.apart, at = (Type == FP8 ? row / 128 : row) * c.along + (Type == INT8 ? 0 : c.in / block);
        memcpy(scale + i, (const float*)c.w.scales + at, blocks == 2 && c.runs > half / 2 ? 8 : 4);
    }
    for (int part = 0; part < 4; part++) {
        vf turned[half];
        UNROLL for (int i = 0; i < half; i++)
            turned[i] = (vf)_mm512_maskz_loadu_epi64((1u << c.runs) - 1, c.from + (part * half + i) * c.ld);
        exchange<2, 2>(turned);
        UNROLL for (int i = 0; i < half; i++) store(bytes[i][part], Type == NF4 ? parted((vu)turned[i]) : (vu)turned[i]);
    }
    for (long run = 0; run < c.runs;) {
        vf by[4];
        UNROLL for (int part = 0; part < 4; part++) {  // for both values of a pair
            const __m512 both = (__m512)load((const float*)scale + part * VL);
            by[part] = (vf)(run ? _mm512_movehdup_ps(both) : _mm512_moveldup_ps(both));
            if (Type == INT8) by[part] *= 0x1p-24f;
        }
        for (const long end = std::min(c.runs, run + half / blocks); run < end; run++) {
            c.ask(4);
            vu of_run[4];
            UNROLL for (int i = 0; i < 4; i++) {
                of_run[i] = *(const vu*)bytes[run][i];
                asm volatile("" : "+v"(of_run[i]));  // read once
            }
            take_pairs<Op, T, Type>(
                of_run, table, by, word + run * each / Op::values, take,
                std::make_integer_sequence<int, each / 2>{});
        }
    }
}

// bf16 from tables of 32, of a code's lower bits. MXFP4: its values with 0x3f00 added, but for zeros, which stay zeros when
// more is taken away for the scale, a number in the exponent. FP8: times the scale, to which two bits of the exponent are
// added; denormals have a table of their own.
struct Tables {
    vu values, small;
};
alignas(32) constexpr uint16_t RAISED_E2M1[16] = {
    0, 0x7e00, 0x7e80, 0x7ec0, 0x7f00, 0x7f40, 0x7f80, 0x7fc0, 0, 0xfe00, 0xfe80, 0xfec0, 0xff00, 0xff40, 0xff80, 0xffc0};
template <int Type>
INLINE Tables tables(float scale) {
    if (Type == MXFP4) return {(vu)_mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)RAISED_E2M1)), vu{}};
    const vu code = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf low = (vf)((code << 20) + (120u << 23)) * scale, high = (vf)((code << 20) + (122u << 23)) * scale;
    const vf small = __builtin_convertvector(code, vf) * 0x1p-9f * scale;
    return {(vu)narrow(low, high), (vu)narrow(small, small)};
}

// Values 2 P and 2 P + 1 of the four bytes of each of VL outputs. less: what MXFP4's scale takes from both.
template <int Type, int P>
INLINE vu word_of(vu bytes, const Tables& by, vu less) {
    const __m512i x = (__m512i)bytes;
    if constexpr (Type == MXFP4) {
#if defined(__AVX512VBMI__)
        const __m512i from = _mm512_set1_epi64(8 * P * 0x1000100010001 + 0x24002000040000);
        const __m512i code = _mm512_multishift_epi64_epi8(from, x);
#else
        const __m512i odd = P < 2 ? _mm512_slli_epi32(x, (12 - 8 * P) & 31) : _mm512_srli_epi32(x, (8 * P - 12) & 31);
        const __m512i code = _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 8 * P), odd);
#endif
        return (vu)_mm512_subs_epu16(_mm512_permutexvar_epi16(code, (__m512i)by.values), (__m512i)less);
    } else {  // a code in both bytes of a value
        const __m512i code = _mm512_shuffle_epi8(x, _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000) + (__m512i)(vu{} + 0x02020202 * P));
        const __mmask32 small = _mm512_testn_epi16_mask(code, _mm512_set1_epi16(0x78));
        const __m512i value = _mm512_mask_permutexvar_epi16(
            _mm512_permutexvar_epi16(code, (__m512i)by.values), small, code, (__m512i)by.small);
        const __m512i exponent = _mm512_and_si512(_mm512_srli_epi16(code, 4), _mm512_set1_epi16(0x600));
        const __m512i sign = _mm512_set1_epi16(-0x8000);
        return (vu)_mm512_ternarylogic_epi64(_mm512_add_epi16(value, exponent), code, sign, 0x78);  // a ^ (b & c)
    }
}

// Without floats between; false where a scale or a code gives numbers that the tables do not have.
template <class Op, int Type, class Take>
INLINE bool take_words(const Chunk& c, long word, const Take& take) {
    constexpr long each = Type == MXFP4 ? 8 : 4;
    alignas(64) uint32_t scale[NR], bytes[VL][2][VL];
    float of_all = 1;
    if constexpr (Type == MXFP4) {
        const uint8_t* from = (const uint8_t*)c.w.scales + c.out * c.along + c.in / 32;
        UNROLL for (int i = 0; i < NR; i++, from += c.apart * c.along) {
            scale[i] = 0x7f7f7f7f;
            if (c.runs == VL / 2) memcpy(scale + i, from, 4);  // in one load
            else memcpy(scale + i, from, c.runs / 2);
        }
        for (int half = 0; half < 2; half++) {
            const __m512i above = _mm512_sub_epi8(_mm512_load_si512(scale + half * VL), _mm512_set1_epi8(2));
            if (_mm512_cmpgt_epu8_mask(above, _mm512_set1_epi8((char)250))) return false;
        }
    } else {
        of_all = c.w.scale(c.out, c.in);
        const float size = of_all < 0 ? -of_all : of_all;
        if (c.out / 128 != (c.out + (NR - 1) * c.apart) / 128 || !(size > 0x1p-110f && size < 0x1p110f)) return false;
    }
    __m512i largest = _mm512_setzero_si512();
    for (int half = 0; half < 2; half++) {
        vf turned[VL];
        UNROLL for (int i = 0; i < VL; i++) {
            const __m512i row = _mm512_maskz_loadu_epi64((1u << c.runs) - 1, c.from + (half * VL + i) * c.ld);
            if (Type == FP8) largest = _mm512_max_epu8(largest, _mm512_add_epi8(row, row));  // without signs
            turned[i] = (vf)row;
        }
        transpose(turned);
        UNROLL for (int i = 0; i < VL; i++) store(bytes[i][half], (vu)turned[i]);
    }
    if (_mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8((char)0xfe))) return false;  // NaN
    const Tables by = tables<Type>(of_all);
    for (long i = 0; i < 2 * c.runs;) {
        vu less[2] = {};
        for (int half = 0; Type == MXFP4 && half < 2; half++) {
            const vu of_one = 0x7e80 - (((vu)load((const float*)scale + half * VL) >> 8 * (i / 4) & 0xff) << 7);
            less[half] = of_one | of_one << 16;
        }
        for (const long end = i + 4; i < end; i++) {
            c.ask(2);
            const vu *lower = (const vu*)bytes[i][0], *upper = (const vu*)bytes[i][1];
            const auto pair = [&](auto p) __attribute__((always_inline)) {
                const vu words[2] = {word_of<Type, p>(*lower, by, less[0]), word_of<Type, p>(*upper, by, less[1])};
                Op::take_words(words, word + (i * each + 2 * p) / Op::values, take);
            };
            pair(int_constant<0>());
            pair(int_constant<1>());
            if constexpr (Type == MXFP4) pair(int_constant<2>()), pair(int_constant<3>());
        }
    }
    return true;
}

// Values in : in + n of outputs `out`, `out` + apart, ...: take(k, words) of each word k has those of NR outputs. `in` is a
// multiple of a chunk's values, n of 32.
template <class Op, class T, int Type, class Take>
INLINE void decode_panel(const Stack& w, long out, long apart, long in, long n, const Take& take) {
    constexpr long each = Type == NF4 || Type == MXFP4 ? 16 : 8, chunk = VL / 2 * each;
    const long ld = w.bytes(w.ins) * apart, along = w.along();
    const uint8_t* from = w.at(out, in);
    const uint8_t* soon = w.at(out + NR * apart + out % apart * (NR - 1), 0) + in / chunk * NR * 64;
    for (long k = 0; k < n; k += chunk, from += 64) {
        const long some = std::min(chunk, n - k), word = k / Op::values;
        const Chunk c = {w, out, apart, in + k, some / each, ld, along, from, soon};
        if constexpr (Type == NF4 || Type == INT8 || (Type == FP8 && sizeof(T) == 4)) {
            take_floats<Op, T, Type>(c, word, take);
        } else if (!take_words<Op, Type>(c, word, take)) {
            typename Op::Word made[chunk / Op::values * NR];
            panel_by_rows<Op, T>(w, out, apart, in + k, some, made, NR);
            for (long i = 0; i < some / Op::values; i++) {
                const decltype(Op::read(made)) words[2] = {Op::read(made + i * NR), Op::read(made + i * NR + VL)};
                take(word + i, words);
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
