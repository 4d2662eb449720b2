// Operands of bf16, in pairs along k: a word is the values of an even k, in its lower half, and the next one.
//
// Where k ends, zeros follow up to a multiple of a tile's pairs.
#pragma once
#include "tile.h"

// The instructions, where the compiler targets them:
//
//     dot       AVX512-BF16: 16 sums, to each the two products of its pair
//     tile_dot  AMX-BF16: 16 x 16 sums in a tile, to each the products of up to 16 pairs
//
// Both treat denormals as zero.
struct TileConfig {  // as ldtilecfg reads it
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

#if defined(TRIMTAB_EMULATE_BF16)
#include TRIMTAB_EMULATE_BF16
#define HAVE_DOT
#define HAVE_AMX
#else

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define HAVE_DOT
INLINE vf dot(vf sum, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define HAVE_AMX
// Not the compiler's own: GCC's say nothing of the memory that they read, so what was written to it may come later.
INLINE void tile_configure(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>  // rows lie `stride` bytes apart
INLINE void tile_load(const void* p, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int T>
INLINE void tile_store(void* p, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>  // C += A B: rows of A are pairs along k, rows of B a pair of each column
INLINE void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif
#endif

#if defined(HAVE_DOT) || defined(HAVE_AMX)
constexpr long TILE = 16;  // pairs in a row of a tile, and rows
static_assert(VL == TILE);

// 2 VL values as bf16.
INLINE vhh both(const bf16* p) { return *(const vhh_any*)p; }
INLINE vhh both(const float* p) { return narrow(load(p), load(p + VL)); }
INLINE vhh both(const rounded* p) { return both((const float*)p); }

// Pairs of values of two rows: of the first VL columns, or the others.
template <int... L>
INLINE vu low_pairs(vhh even, vhh odd, std::integer_sequence<int, L...>) {
    return (vu)__builtin_shufflevector(even, odd, (L / 2 + L % 2 * 2 * VL)...);
}
template <int... L>
INLINE vu high_pairs(vhh even, vhh odd, std::integer_sequence<int, L...>) {
    return (vu)__builtin_shufflevector(even, odd, (VL + L / 2 + L % 2 * 2 * VL)...);
}

struct Pairs {
    using Word = uint32_t;
    using Value = bf16;
    static constexpr long values = 2;
    static constexpr long wide = NC;
    static constexpr long tall = 8;
    static constexpr long deep = 128;  // a panel of B and as many rows of A as it is wide fit in the nearest cache
    static constexpr long depth = deep * values;
    static constexpr long spare = SPARE, panel = deep + spare / values;
    static constexpr long whole = TILE;
    static constexpr long asks = MC;  // always
    static constexpr long along = deep;  // always
    static constexpr long chunk = 0;
    static constexpr bool adds = true;
    static constexpr long columns = 1024, block = 512;
    static constexpr long pitch(long n) { return up_to(n, 2 * TILE) + 2 * TILE; }
    struct Session {};
    template <class W>
    static INLINE vf words(const W* p) {
        return (vf)both(p);
    }
    template <class W>
    static INLINE void read_rows(const W* even, const W* odd, vu* to) {
        const auto lanes = std::make_integer_sequence<int, 2 * VL>{};
        const vhh a = both(even), b = both(odd);
        to[0] = low_pairs(a, b, lanes);
        to[1] = high_pairs(a, b, lanes);
    }
    template <class Take>
    static INLINE void take_pairs(vu low, vu high, long k, const Take& take) {
        const vu words[2] = {low, high};
        take(k, words);
    }
    static INLINE vu read(const uint32_t* p) { return *(const vu_any*)p; }
    static INLINE void put_row(const bf16* from, bf16* to, long n) { memcpy(to, from, n * sizeof(bf16)); }
    static INLINE void put_row(const float* from, bf16* to, long n) {
        for (long i = 0; i < n; i += VL) store(to + i, load(from + i), n - i);
    }
    static INLINE void end_row(bf16* row, long n) {
        const long left = up_to(n, 2 * TILE) - n;
        if (left == TILE) memset(row + n, 0, TILE * sizeof(bf16));  // in one store
        else if (left) memset(row + n, 0, left * sizeof(bf16));
    }
};

#if defined(HAVE_DOT)
struct Dots : Pairs {
    // Addresses are made anew for each k: as many pointers as there are rows would go to the stack.
    static INLINE void new_row(long& ld) { asm volatile("" : "+r"(ld)); }
    static INLINE vu spread(uint32_t pair) { return pair - vu{}; }
    static INLINE vf add(vf sum, vu a, vu b) { return dot(sum, a, b); }
};
#endif
#endif
