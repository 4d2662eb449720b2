// Products of pairs in AMX tiles: blocks of 32 x 32 sums in four of them, over 16 pairs at a time.
//
// A sum goes over k in the tiles' own order, 16 pairs after 16, on top of what came before: no row of a tile looks at
// another, so a row's bits do not depend on how many there are.
#pragma once
#include "pairs.h"

#if defined(HAVE_AMX)
constexpr long BLOCK_ROWS = 2 * TILE;

// Tiles 0 to 3 hold sums, two rows of them; 4 and 5 rows of A, 6 and 7 columns of B. All are whole.
INLINE void shape_tiles() {
    TileConfig c = {1, 0, {}, {}, {}};
    for (int t = 0; t < 8; t++) c.row_bytes[t] = 64, c.rows[t] = TILE;
    tile_configure(c);
}

struct Amx : Pairs {
    static constexpr long tall = BLOCK_ROWS, chunk = 128, many = 320;
    static constexpr bool adds = false;
    static constexpr long along = 0;  // its `multiply` goes by columns
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

// What a block does beside each step over k, and at the end. It asks for the next line of each of some rows,
struct EachRow {
    using From = Ahead;
    const char *soon, *until;
    long step;
    explicit EachRow(const Ahead& a) : soon(a.p), until(a.p + a.rows * a.ld), step(a.ld) {
        asm("" : "+r"(step));  // in a register, not read again each time
    }
    INLINE void next() {
        for (const char* line = soon; line != until; line += step) __builtin_prefetch(line, 0, 2);
        soon += 64, until += 64;
    }
    INLINE void end() const {}
};
// or for some lines more of all that there are, row by row, and then those beside them;
struct Lines {
    const char* p;
    long ld, across, rows, beside, at = 0, row = 0;
    explicit Lines(const Ahead& a)
        : p(a.p), ld(a.ld), across((a.bytes + 63) / 64), rows(across ? a.rows : 0), beside(a.beside) {}
    long all() const { return rows * across * (beside ? 2 : 1); }
    INLINE void ask() {
        if (row == rows) return;
        __builtin_prefetch(p + row * ld + at * 64, 0, 2);
        if (++at < across) return;
        at = 0;
        if (++row == rows && beside) p += beside, row = beside = 0;
    }
};
struct SomeLines {
    using From = SomeLines;
    Lines& lines;
    long each;
    INLINE void next() const {
        for (long i = 0; i < each; i++) lines.ask();
    }
    INLINE void end() const {}
};

// or it sends some rows of the block before past the caches: all at once, they would keep its operands waiting.
template <class T>
struct SomeRows {
    using From = SomeRows;
    const float* from;
    T* to;
    long ld, left, each;
    INLINE void send(long n) {
        for (const long until = std::max(0L, left - n); left > until; left--, from += NR, to += ld)
            stream(to, load(from), load(from + VL));
    }
    INLINE void next() { send(each); }
    INLINE void end() { send(left); }
};

// 32 rows, or 16 if not `Two`, of 32 columns, whatever rows of A behind the last one hold. Sums stay near.
template <bool Two, class Beside>
void tile_block(
    long K, const uint32_t* a, long lda, const uint32_t* b, const Sums& c, typename Beside::From what
) {
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
    Beside beside(what);
    for (long k = 0; k < K; k += TILE, a += TILE, b += TILE * NR) {
        tile_load<4>(a, lda * 4);
        tile_load<6>(b, NR * 4);
        tile_dot<0, 4, 6>();
        beside.next();
        tile_load<7>(b + TILE, NR * 4);
        tile_dot<1, 4, 7>();
        if constexpr (Two) {
            tile_load<5>(a + TILE * lda, lda * 4);
            tile_dot<2, 5, 6>();
            tile_dot<3, 5, 7>();
        }
    }
    beside.end();
    store_tiles<Two>(c.row(0), c.ld);
}

// The blocks of a product whose sums stay near, each with what `what` gives it. Sums are written up to the end of the
// last tile.
template <class Beside, class What>
INLINE void tile_blocks(
    long M, long nn, long k0, long kn, Left<uint32_t> a, const uint32_t* b, const Sums& c, What what
) {
    for (long n = 0; n < nn; n += NR) {
        for (long m = 0; m < M; m += BLOCK_ROWS) {
            const auto block = M - m > TILE ? tile_block<true, Beside> : tile_block<false, Beside>;
            block(kn, a.at(m, k0), a.ld, b + n * Pairs::panel, c.at(m, n), what());
        }
    }
}

// And past the caches.
template <class T>
void streamed_blocks(long M, long nn, long k0, long kn, Left<uint32_t> a, const uint32_t* b, const Sums& c) {
    alignas(64) float sums[BLOCK_ROWS * NR];
    const long steps = std::max(1L, (kn + TILE - 1) / TILE), each = (BLOCK_ROWS + steps - 1) / steps;
    SomeRows<T> before = {sums, nullptr, c.ld, 0, each};
    for (long n = 0; n < nn; n += NR) {
        for (long m = 0; m < M; m += BLOCK_ROWS) {
            const long rows = std::min(BLOCK_ROWS, M - m);
            const auto block = rows > TILE ? tile_block<true, SomeRows<T>> : tile_block<false, SomeRows<T>>;
            const Sums at = c.at(m, n);
            const Sums here = {at.from, at.ld_from, sums, NR, NEAR};
            block(kn, a.at(m, k0), a.ld, b + n * Pairs::panel, here, before);
            before = {sums, (T*)at.to, c.ld, rows, each};
        }
    }
    before.end();
}

// As `multiply` of tile.h, but nothing is asked for beside sums that go past the caches.
__attribute__((noinline)) inline void multiply(
    Amx, long M, long nn, long k0, long kn, Left<uint32_t> a, const uint32_t* b, Sums c, const Ahead& ahead = {}
) {
    if (c.end == PAST) return streamed_blocks<float>(M, nn, k0, kn, a, b, c);
    if (c.end == PAST_NARROW) return streamed_blocks<bf16>(M, nn, k0, kn, a, b, c);
    const long calls = (nn + NR - 1) / NR * ((M + BLOCK_ROWS - 1) / BLOCK_ROWS);
    long call = 0;
    tile_blocks<EachRow>(M, nn, k0, kn, a, b, c, [&] { return ahead.share(call++, calls); });
}
#endif
