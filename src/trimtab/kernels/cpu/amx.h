// Products of pairs in AMX tiles: blocks of 32 x 32 sums in four of them, over 16 pairs at a time.
//
// A sum goes over k in the tiles' own order, 16 pairs after 16, on top of what came before: no row of a tile looks at
// another, so a row's bits do not depend on how many there are.
#pragma once
#include "pairs.h"

#if defined(HAVE_AMX)
struct Amx : Pairs {
    struct Session {  // of a thread: tiles that nobody needs any more are not saved at its next pause
        ~Session() { tile_release(); }
    };
};

// Sums in tiles 0 to 3, two rows of them; 4 and 5 hold rows of A, 6 and 7 columns of B.
INLINE void shape_tiles(long first, long second) {
    TileConfig c = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {}};
    const uint8_t a = (uint8_t)first, b = (uint8_t)second;
    const uint8_t rows[8] = {a, a, b, b, a, b, TILE, TILE};
    memcpy(c.rows, rows, sizeof rows);
    if (!second) c.row_bytes[2] = c.row_bytes[3] = c.row_bytes[5] = 0;
    tile_configure(c);
}

template <bool Two>
INLINE void store_tiles(float* to, long ld) {
    tile_store<0>(to, ld * 4);
    tile_store<1>(to + TILE, ld * 4);
    if constexpr (Two) {
        tile_store<2>(to + TILE * ld, ld * 4);
        tile_store<3>(to + TILE * ld + TILE, ld * 4);
    }
}

// `rows` rows, more than 16 if `Two`, as the tiles are shaped; 32 columns.
template <bool Two>
void tile_block(long rows, long K, const uint32_t* a, long lda, const uint32_t* b, const Sums& c) {
    if (c.from) {
        tile_load<0>(c.from, c.ld_from * 4);
        tile_load<1>(c.from + TILE, c.ld_from * 4);
        if constexpr (Two) {
            tile_load<2>(c.from + TILE * c.ld_from, c.ld_from * 4);
            tile_load<3>(c.from + TILE * c.ld_from + TILE, c.ld_from * 4);
        }
    } else {
        tile_zero<0>();
        tile_zero<1>();
        if constexpr (Two) {
            tile_zero<2>();
            tile_zero<3>();
        }
    }
    for (long k = 0; k < K; k += TILE, a += TILE, b += TILE * NR) {
        tile_load<4>(a, lda * 4);
        tile_load<6>(b, NR * 4);
        tile_dot<0, 4, 6>();
        tile_load<7>(b + TILE, NR * 4);
        tile_dot<1, 4, 7>();
        if constexpr (Two) {
            tile_load<5>(a + TILE * lda, lda * 4);
            tile_dot<2, 5, 6>();
            tile_dot<3, 5, 7>();
        }
    }
    if (!c.past) return store_tiles<Two>(c.to, c.ld);
    alignas(64) float part[2 * TILE * NR];
    store_tiles<Two>(part, NR);
    for (long i = 0; i < rows; i++) stream(c.to + i * c.ld, load(part + i * NR), load(part + i * NR + VL));
}

// As `multiply` of gemm.h: all whole blocks of 32 rows, then the rows that are left.
__attribute__((noinline)) inline void multiply(
    Amx, long M, long nn, long k0, long kn, Left<uint32_t> a, const uint32_t* b, Sums c
) {
    constexpr long high = 2 * TILE;
    const long whole = M / high * high, rest = M - whole;
    if (whole) shape_tiles(TILE, TILE);
    for (long n = 0; n < nn; n += NR)
        for (long m = 0; m < whole; m += high)
            tile_block<true>(high, kn, a.at(0, m, k0), a.ld, b + n * KC, c.at(m, n));
    if (rest) shape_tiles(std::min(rest, TILE), std::max(rest - TILE, 0L));
    for (long n = 0; rest && n < nn; n += NR) {
        const uint32_t* rows = a.at(0, whole, k0);
        if (rest > TILE) tile_block<true>(rest, kn, rows, a.ld, b + n * KC, c.at(whole, n));
        else tile_block<false>(rest, kn, rows, a.ld, b + n * KC, c.at(whole, n));
    }
}
#endif
