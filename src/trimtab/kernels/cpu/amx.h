// Products of pairs in AMX tiles: blocks of 32 x 32 sums in four of them, over 16 pairs at a time.
//
// A sum goes over k in the tiles' own order, 16 pairs after 16, on top of what came before: no row of a tile looks at
// another, so a row's bits do not depend on how many there are.
#pragma once
#include "pairs.h"

#if defined(HAVE_AMX)
// Tiles 0 to 3 hold sums, two rows of them; 4 and 5 rows of A, 6 and 7 columns of B. All are whole.
INLINE void shape_tiles() {
    TileConfig c = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; t++) c.row_bytes[t] = 64, c.rows[t] = TILE;
    tile_configure(c);
}

struct Amx : Pairs {
    static constexpr long tall = 2 * TILE;
    struct Session {  // of a thread: tiles that nobody needs any more are not saved at its next pause
        Session() { shape_tiles(); }
        ~Session() { tile_release(); }
    };
};

template <bool Two>
INLINE void load_tiles(const float* from, long ld) {
    tile_load<0>(from, ld * 4);
    tile_load<1>(from + TILE, ld * 4);
    if constexpr (Two) {
        tile_load<2>(from + TILE * ld, ld * 4);
        tile_load<3>(from + TILE * ld + TILE, ld * 4);
    }
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

// `rows` rows, more than 16 if `Two`, of 32 columns. Rows of A up to the end of the last tile are read, whatever they
// hold, and so are near sums, which are also written there. With each step over k the next line of each row that is
// asked for.
template <bool Two>
void tile_block(long rows, long K, const uint32_t* a, long lda, const uint32_t* b, const Sums& c, Ahead ask) {
    constexpr long high = Two ? 2 * TILE : TILE;
    if (!c.from) {
        tile_zero<0>();
        tile_zero<1>();
        if constexpr (Two) {
            tile_zero<2>();
            tile_zero<3>();
        }
    } else {
        load_tiles<Two>(c.from, c.ld_from);
    }
    const char *soon = ask.p, *end = ask.p + ask.rows * ask.ld;
    long step = ask.ld;
    asm("" : "+r"(step));  // in a register, not read again each time
    for (long k = 0; k < K; k += TILE, a += TILE, b += TILE * NR) {
        tile_load<4>(a, lda * 4);
        tile_load<6>(b, NR * 4);
        tile_dot<0, 4, 6>();
        for (const char* line = soon; line != end; line += step) __builtin_prefetch(line, 0, 2);
        soon += 64, end += 64;
        tile_load<7>(b + TILE, NR * 4);
        tile_dot<1, 4, 7>();
        if constexpr (Two) {
            tile_load<5>(a + TILE * lda, lda * 4);
            tile_dot<2, 5, 6>();
            tile_dot<3, 5, 7>();
        }
    }
    if (c.end == NEAR) return store_tiles<Two>(c.row(0), c.ld);
    alignas(64) float part[high * NR];
    store_tiles<Two>(part, NR);
    for (long i = 0; i < rows; i++) c.stream_row(i, load(part + i * NR), load(part + i * NR + VL));
}

// As `multiply` of tile.h.
__attribute__((noinline)) inline void multiply(
    Amx, long M, long nn, long k0, long kn, Left<uint32_t> a, const uint32_t* b, Sums c, const Ahead& ahead = {}
) {
    constexpr long high = 2 * TILE;
    const long calls = (nn + NR - 1) / NR * ((M + high - 1) / high);
    for (long n = 0, call = 0; n < nn; n += NR) {
        for (long m = 0; m < M; m += high, call++) {
            const long rows = std::min(high, M - m);
            const auto block = rows > TILE ? tile_block<true> : tile_block<false>;
            const Ahead ask = ahead.share(call, calls);
            block(rows, kn, a.at(0, m, k0), a.ld, b + n * Pairs::deep, c.at(m, n), ask);
        }
    }
}
#endif
