// Products of blocks: C[M, N] = A B with A row-major or transposed, B in panels.
//
// Operands are words of 4 bytes, floats or pairs of bf16 along k (pairs.h), and sums are floats. A sum over K is taken
// in steps of Op::deep words, each in an order of k, and the steps are added in order: the bits of an element depend on
// its row and column alone, not on M, N or the thread.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr long KC = 384;            // floats of K that are brought at once
constexpr long MC = 512;            // rows of A that a task takes at most
constexpr long NC = 256;            // columns of B that are brought at once, at most
constexpr long SPARE = 64;           // values of K behind the last step of bf16 that need no step of their own
constexpr long CHUNKED = 1 << 18;   // bytes of B that are brought at once for chunks of rows
constexpr int HANDFUL = VL / 2;     // rows of A up to which a weight's values are turned in registers
constexpr long up_to(long n, long step) { return (n + step - 1) / step * step; }
constexpr long pitch(long n) { return n + VL; }  // between rows of n floats: no power of two, for the caches' sake
constexpr long LDC = pitch(NC);  // of every block of sums, the smaller ones too

// Whether sums stay near, go past the caches or are added to what is there; as float or as bf16.
enum End { NEAR, PAST, PAST_NARROW, ADD, ADD_NARROW };

// Of a row, into the nearest cache, 3, or the one behind it, 2.
template <int Cache = 3, class T>
INLINE void expect(const T* row, long n) {
    for (long at = 0; at < n * (long)sizeof(T); at += 64) __builtin_prefetch((const char*)row + at, 0, Cache);
}
template <class T>
INLINE void expect_writes(const T* row, long n) {
    for (long at = 0; at < n * (long)sizeof(T); at += 64) __builtin_prefetch((const char*)row + at, 1);
}

// Where a block's sums go: to `to`, with `from` added if there is one.
struct Sums {
    const float* from;
    long ld_from;
    void* to;  // bf16 if narrow(), else float
    long ld;
    End end;
    bool narrow() const { return end == PAST_NARROW || end == ADD_NARROW; }
    bool adds() const { return end == ADD || end == ADD_NARROW; }
    float* row(long m) const { return (float*)to + m * ld; }
    bf16* narrow_row(long m) const { return (bf16*)to + m * ld; }
    Sums at(long m, long n) const {
        void* there = narrow() ? (void*)(narrow_row(m) + n) : (void*)(row(m) + n);
        return {from ? from + m * ld_from + n : nullptr, ld_from, there, ld, end};
    }
    // A row of NR sums that does not stay near.
    INLINE void end_row(long m, vf a, vf b) const {
        if (end == PAST) stream(row(m), a, b);
        else if (end == PAST_NARROW) stream(narrow_row(m), a, b);
        else if (end == ADD) add_row(row(m), a, b);
        else add_row(narrow_row(m), a, b);
    }
    template <class G>
    static INLINE void add_row(G* p, vf a, vf b) {
        store(p, load(p) + a);
        store(p + VL, load(p + VL) + b);
    }
};

// Where a part of an operand lies: some rows of `bytes`, `ld` bytes apart, and as many `beside` bytes behind them, if they
// are others. What is brought next is asked for meanwhile.
struct Ahead {
    const char* p = nullptr;
    long ld = 0, rows = 0, bytes = 0, beside = 0;
    Ahead and_beside(const Ahead& other) const {  // of columns in turn the bytes are the same
        return {p, ld, rows, bytes, other.p - p < bytes ? 0 : other.p - p};
    }
    // Of `calls` that ask for all of it in turn. Rows far from each other: lines of several pages come sooner than as
    // many of one.
    Ahead share(long call, long calls) const {
        return {p + call * ld, ld * calls, (rows - call + calls - 1) / calls, bytes};
    }
};

// Operands of float.
struct Floats {
    using Word = float;
    using Value = float;
    static constexpr long values = 1;      // in a word
    static constexpr long deep = KC;       // words of K that are brought at once
    static constexpr long wide = 128;      // columns of B that are brought at once
    static constexpr long tall = VL == 16 ? 8 : 4;  // rows of B^T at once, where it is the left operand (few_rows.h)
    static constexpr long depth = deep * values;
    static constexpr long spare = 0, panel = deep;  // values of K that a step takes besides, if they are the last; words
    static constexpr long asks = 256;      // rows of A up to which asking for the next block pays
    static constexpr long along = 64;      // words of K up to which sums that leave do so by rows of tiles
    static constexpr long chunk = 0;       // of `many` rows or more, those whose sums are done with at once; or 0
    static constexpr long whole = 1;       // words of K of which a panel holds a multiple
    static constexpr bool adds = true;     // whether sums can be added to what is there straight from registers
    static constexpr long columns = 256, block = 256;  // of a block of gradients (wgrad.h)
    static constexpr long pitch(long n) { return ::pitch(n); }
    struct Session {};  // of a thread: what its products need until it has made the last one
    static INLINE void new_row(long&) {}
    static INLINE vf read(const float* p) { return load(p); }
    template <class W>
    static INLINE vf words(const W* p) {  // VL of a row where it lies
        return load(p);
    }
    template <class W>
    static INLINE void read_rows(const W* p, const W*, vf* to) {  // NR columns of a word's rows where they lie
        to[0] = load(p);
        to[1] = load(p + VL);
    }
    template <class T>
    static INLINE void put_row(const T* from, float* to, long n) {  // of a left operand, up to a whole register
        for (long i = 0; i < n; i += VL) store(to + i, load(from + i, n - i));
    }
    static INLINE void end_row(float*, long) {}
    // Of an even and an odd k in turn of NR columns the words, from floats or pairs of bf16.
    template <class Take>
    static INLINE void take_two(const vf* v, long k, const Take& take) {
        const auto lanes = std::make_integer_sequence<int, VL>{};
        const vf even[2] = {every_second<0>(v[0], v[1], lanes), every_second<0>(v[2], v[3], lanes)};
        const vf odd[2] = {every_second<1>(v[0], v[1], lanes), every_second<1>(v[2], v[3], lanes)};
        take(k, even);
        take(k + 1, odd);
    }
    template <class Take>
    static INLINE void take_pairs(vu low, vu high, long k, const Take& take) {
        const vf even[2] = {(vf)(low << 16), (vf)(high << 16)};
        const vf odd[2] = {(vf)(low & 0xffff0000u), (vf)(high & 0xffff0000u)};
        take(k, even);
        take(k + 1, odd);
    }
    static INLINE vf spread(float x) { return splat(x); }
    static INLINE vf add(vf sum, vf a, vf b) { return multiply_add(a, b, sum); }
};

// One block of at most MR x NR, its sums in registers: of both registers of columns, or the first. With every VL steps
// over k the next line of each row is asked for, or two of rows that are wider than the products'.
template <class Op, int M, int Wide = 2>
void tile(long K, const typename Op::Word* a, long lda, const typename Op::Word* b, const Sums& c, const Ahead& ask) {
    vf acc[M][Wide];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < Wide; j++) acc[i][j] = vf{};
    UNROLL for (int i = 0; i < M; i++) {  // what is added at the end may come from far
        if (!c.from) break;
        UNROLL for (int j = 0; j < Wide; j++) __builtin_prefetch(c.from + i * c.ld_from + j * VL);
    }
    asm volatile("" ::: "memory");  // where sums go is read again behind the loop, which needs the registers
    long k = 0;
    const auto steps = [&](long count) __attribute__((always_inline)) {
        for (; count > 0; count--, k++, b += NR) {
            Op::new_row(lda);
            decltype(Op::read(b)) right[Wide];
            UNROLL for (int j = 0; j < Wide; j++) right[j] = Op::read(b + j * VL);
            UNROLL for (int i = 0; i < M; i++) {
                const auto v = Op::spread(a[i * lda + k]);
                UNROLL for (int j = 0; j < Wide; j++) acc[i][j] = Op::add(acc[i][j], v, right[j]);
            }
        }
    };
    const long lines = ask.bytes > K / VL * 64 ? 2 : 1;
    for (long line = 0; ask.rows && line < ask.bytes && k + VL <= K; line += 64 * lines)
        for (long part = 1, i = 0; part <= 4; part++) {  // not all at once, for they would wait for one another
            for (; i < part * ask.rows / 4; i++)
                for (long l = 0; l < lines; l++) __builtin_prefetch(ask.p + i * ask.ld + line + 64 * l, 0, 2);
            steps(VL / 4);
        }
    steps(K - k);
    UNROLL for (int i = 0; i < M; i++) {
        if (c.from)
            UNROLL for (int j = 0; j < Wide; j++) acc[i][j] += load(c.from + i * c.ld_from + j * VL);
        if (Wide == 1 || c.end == NEAR)
            UNROLL for (int j = 0; j < Wide; j++) store(c.row(i) + j * VL, acc[i][j]);
        else c.end_row(i, acc[i][0], acc[i][Wide - 1]);
    }
}

template <class Word>
using Tile = void (*)(long, const Word*, long, const Word*, const Sums&, const Ahead&);
template <class Op, int... M>
Tile<typename Op::Word> pick(long m, bool narrow, std::integer_sequence<int, M...>) {
    static constexpr Tile<typename Op::Word> all[] = {tile<Op, M + 1>...}, half[] = {tile<Op, M + 1, 1>...};
    return narrow ? half[m - 1] : all[m - 1];
}

// Operand A: word (m, k) lies at p[m * ld + k].
template <class Word>
struct Left {
    const Word* p;
    long ld;
    const Word* at(long m, long k) const { return p + m * ld + k; }
};

// M rows in tiles of about the same height.
inline long first_row(long tile, long tiles, long M) { return tile * M / tiles; }

// The tiles of a block in turn: column of tiles by column, or `along` its rows.
struct Walk {
    const long tiles, strips;
    const bool along;
    long tile = 0, strip = 0;
    void step() {
        if (along ? ++strip < strips : ++tile < tiles) return;
        if (along) strip = 0, tile++;
        else tile = 0, strip++;
    }
};
constexpr long EARLY = 4;  // tiles ahead of which what sums are added to is asked for

// C[M, nn] = (+) A[:, k0 : k0 + kn] B for one block of B, [kn, nn] words in panels of NR columns, Op::panel * NR apart.
template <class Op>
__attribute__((noinline)) void multiply(
    Op, long M, long nn, long k0, long kn, Left<typename Op::Word> a, const typename Op::Word* b, Sums c,
    const Ahead& ahead = {}
) {
    const long tiles = (M + MR - 1) / MR, strips = (nn + NR - 1) / NR, calls = tiles * strips;
    const auto sizes = std::make_integer_sequence<int, MR>{};
    // Behind few words of K it is memory that sums wait for as they leave, and it is fastest from end to end.
    Walk at = {tiles, strips, c.end != NEAR && kn <= Op::along}, soon = at;
    const auto expect_target = [&] {
        for (long m = first_row(soon.tile, tiles, M); m < first_row(soon.tile + 1, tiles, M); m++) {
            if (c.narrow()) expect_writes(c.narrow_row(m) + soon.strip * NR, NR);
            else expect_writes(c.row(m) + soon.strip * NR, NR);
        }
        soon.step();
    };
    for (long call = 0; c.adds() && call < std::min(EARLY, calls); call++) expect_target();
    for (long call = 0; call < calls; call++, at.step()) {
        if (c.adds() && call + EARLY < calls) expect_target();
        const long m = first_row(at.tile, tiles, M), rows = first_row(at.tile + 1, tiles, M) - m, n = at.strip * NR;
        const bool narrow = c.end == NEAR && nn - n <= VL;  // nobody reads columns behind the last
        pick<Op>(rows, narrow, sizes)(kn, a.at(m, k0), a.ld, b + n * Op::panel, c.at(m, n), ahead.share(call, calls));
    }
}
