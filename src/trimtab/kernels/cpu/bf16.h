// Sums of products of bf16 pairs by the instructions that are made for them, where the compiler targets them:
//
//     dot       AVX512-BF16: 16 sums, to each the two products of its pair
//     tile_dot  AMX-BF16: 16 x 16 sums in a tile, to each the products of up to 16 pairs
//
// A pair is a word, the value of the even k in its lower half. Both treat denormals as zero.
#pragma once
#include "simd.h"

struct TileConfig {  // as ldtilecfg reads it
    uint8_t palette, start, unused[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

#if defined(TRIMTAB_EMULATE_BF16)
#include "emulated.h"
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
