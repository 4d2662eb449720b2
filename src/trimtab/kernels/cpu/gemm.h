// Products of blocks: C[M, N] = A B with A row-major or transposed, B brought in blocks by a loader.
//
// Operands are words of 4 bytes, floats or pairs of bf16 along k (pairs.h), and sums are floats. A sum over K is taken
// in steps of Op::deep words, each in an order of k, and the steps are added in order: the bits of an element depend on
// its row and column alone, not on M, N or the thread.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr long KC = 384;            // floats of K that are brought at once: as many as MKL adds up in one go
constexpr long MC = 512;            // rows of A that a task takes at most
constexpr long RC = 256;            // rows that are brought at once for a gradient
constexpr long NC = 256;            // columns of B that are brought at once, at most
constexpr long PC = 280, QC = 256;  // a gradient's block: rows of A that are brought at once at most, columns
constexpr long PIECES = 2;          // and how many such rows share one block of B
constexpr long FEW = 128;           // rows of A up to which bringing B takes as long as the product
constexpr long BROUGHT = std::max(PC, QC) + NR;  // values of a row that are brought for a gradient, blanks after it
constexpr long pitch(long n) { return n + VL; }  // between rows of n floats: no power of two, for the caches' sake
constexpr long LDC = pitch(QC);  // of every block of sums, the smaller ones too

// Whether sums stay near or go past the caches, as float or as bf16.
enum End { NEAR, PAST, PAST_NARROW };

// Where a block's sums go: to `to`, with `from` added if there is one.
struct Sums {
    const float* from;
    long ld_from;
    void* to;  // bf16 if PAST_NARROW, else float
    long ld;
    End end;
    float* row(long m) const { return (float*)to + m * ld; }
    Sums at(long m, long n) const {
        const long at = m * ld + n;
        void* there = end == PAST_NARROW ? (void*)((bf16*)to + at) : (void*)((float*)to + at);
        return {from ? from + m * ld_from + n : nullptr, ld_from, there, ld, end};
    }
    // A row of NR sums past the caches.
    INLINE void stream_row(long m, vf a, vf b) const {
        if (end == PAST) stream(row(m), a, b);
        else stream((bf16*)to + m * ld, a, b);
    }
};

// What a product asks for while it is made, since it is brought next: some rows of `bytes`, `ld` bytes apart.
struct Ahead {
    const char* p = nullptr;
    long ld = 0, rows = 0, bytes = 0;
    // Of `calls` that ask for all of it in turn.
    Ahead share(long call, long calls) const {
        const long from = call * rows / calls;
        return {p + from * ld, ld, (call + 1) * rows / calls - from, bytes};
    }
};

// Operands of float.
struct Floats {
    using Word = float;
    using Value = float;
    static constexpr long values = 1;      // in a word
    static constexpr long deep = KC;       // words of K that are brought at once
    static constexpr long wide = 128;      // columns of B that are brought at once
    static constexpr long depth = deep * values;
    static constexpr bool by_row = false;  // whether left operands always are
    static constexpr bool asks = false;    // whether asking for the next block pays however many rows there are
    static constexpr long pitch(long n) { return ::pitch(n); }
    struct Session {};  // of a thread: what its products need until it has made the last one
    static INLINE void new_row(long&) {}
    static INLINE vf read(const float* p) { return *(const vf*)p; }
    static INLINE vf spread(float x) { return splat(x); }
    static INLINE vf add(vf sum, vf a, vf b) { return sum + a * b; }
};

// One block of at most MR x NR, its sums in registers. With every VL steps over k the next line of each row asked for.
template <class Op, int M, bool ByRow>
void tile(long K, const typename Op::Word* a, long lda, const typename Op::Word* b, const Sums& c, const Ahead& ask) {
    vf acc[M][2];
    UNROLL for (int i = 0; i < M; i++) acc[i][0] = acc[i][1] = vf{};
    UNROLL for (int i = 0; i < M; i++) {  // what is added at the end may come from far
        if (!c.from) break;
        __builtin_prefetch(c.from + i * c.ld_from);
        __builtin_prefetch(c.from + i * c.ld_from + VL);
    }
    long k = 0;
    const auto steps = [&](long until) __attribute__((always_inline)) {
        for (; k < until; k++, b += NR) {
            Op::new_row(lda);
            const auto b0 = Op::read(b), b1 = Op::read(b + VL);
            UNROLL for (int i = 0; i < M; i++) {
                const auto v = Op::spread(ByRow ? a[i * lda + k] : a[k * lda + i]);
                acc[i][0] = Op::add(acc[i][0], v, b0);
                acc[i][1] = Op::add(acc[i][1], v, b1);
            }
        }
    };
    for (long line = 0; ask.rows && line < ask.bytes && k + VL <= K; line += 64) {
        for (long i = 0; i < ask.rows; i++) __builtin_prefetch(ask.p + i * ask.ld + line, 0, 2);
        steps(k + VL);
    }
    steps(K);
    UNROLL for (int i = 0; i < M; i++) {
        if (c.from) {
            acc[i][0] += load(c.from + i * c.ld_from);
            acc[i][1] += load(c.from + i * c.ld_from + VL);
        }
        if (c.end == NEAR) {
            store(c.row(i), acc[i][0]);
            store(c.row(i) + VL, acc[i][1]);
        } else {
            c.stream_row(i, acc[i][0], acc[i][1]);
        }
    }
}

template <class Word>
using Tile = void (*)(long, const Word*, long, const Word*, const Sums&, const Ahead&);
template <class Op, bool ByRow, int... M>
Tile<typename Op::Word> pick(long m, std::integer_sequence<int, M...>) {
    static constexpr Tile<typename Op::Word> all[] = {tile<Op, M + 1, ByRow>...};
    return all[m - 1];
}

// Operand A: word (m, k) lies at p[m * ld + k]; or not `by_row`, in a panel of its tile, VL words for each k.
template <class Word>
struct Left {
    const Word* p;
    long ld;
    bool by_row;
    const Word* at(long tile, long m, long k) const { return by_row ? p + m * ld + k : p + (tile * KC + k) * VL; }
};

// M rows in tiles of about the same height.
inline long first_row(long tile, long tiles, long M) { return tile * M / tiles; }

constexpr long up_to(long n, long step) { return (n + step - 1) / step * step; }

// C[M, nn] = (+) A[:, k0 : k0 + kn] B for one block of B, [kn, nn] words in panels of NR columns, Op::deep * NR apart.
template <class Op>
__attribute__((noinline)) void multiply(
    Op, long M, long nn, long k0, long kn, Left<typename Op::Word> a, const typename Op::Word* b, Sums c,
    const Ahead& ahead = {}
) {
    const long tiles = (M + MR - 1) / MR, calls = tiles * ((nn + NR - 1) / NR);
    const auto sizes = std::make_integer_sequence<int, MR>{};
    for (long n = 0, call = 0; n < nn; n += NR) {
        for (long t = 0; t < tiles; t++, call++) {
            const long m = first_row(t, tiles, M), rows = first_row(t + 1, tiles, M) - m;
            const auto run = a.by_row ? pick<Op, true>(rows, sizes) : pick<Op, Op::by_row>(rows, sizes);
            run(kn, a.at(t, m, k0), a.ld, b + n * Op::deep, c.at(m, n), ahead.share(call, calls));
        }
    }
}

// B's block [k0 : k0 + kn, n0 : n0 + nn] is brought; its product with A goes to the sums.
template <class Op>
void add_product(
    long M, long nn, long k0, long kn, Left<typename Op::Word> a, const typename Op::Word* b, float* sums,
    const Ahead& next
) {
    const Sums way = {k0 > 0 ? sums : nullptr, LDC, sums, LDC, NEAR};
    multiply(Op(), M, nn, k0 / Op::values, (kn + Op::values - 1) / Op::values, a, b, way, next);
}

// As `gemm`, for few rows of A and a B whose rows lie in memory one after the other. It is brought row by row, not
// block of columns by block of columns, and the sums of more columns wait: memory is read at its full speed.
template <class Op, class Load, class Done>
void gemm_by_rows(
    long M, long N, long K, int parts, Left<typename Op::Word> a, typename Op::Word* b, float* c, Load load, Done done
) {
    constexpr long depth = Op::depth, beside = QC / Op::wide;  // blocks of sums in a row of them
    const long high = up_to(M, 2 * VL), width = Op::wide / parts, chunk = PIECES * PC / high * beside * width;
    const auto sums = [&](long n) { return c + n / width / beside * high * LDC + n / width % beside * Op::wide; };
    for (long from = 0; from < N; from += chunk) {
        const long until = std::min(N, from + chunk);
        long k0 = 0;
        do {
            const long kn = std::min(depth, K - k0);
            for (long n0 = from; n0 < until; n0 += width) {
                const long nn = std::min(width, until - n0);
                for (int part = 0; part < parts; part++) {
                    load(part, b, k0, kn, n0, nn);
                    add_product<Op>(M, nn, k0, kn, a, b, sums(n0 - from) + part * width, {});
                }
            }
            k0 += depth;
        } while (k0 < K);
        for (long n0 = from; n0 < until; n0 += width) done(n0, std::min(width, until - n0), sums(n0 - from));
    }
}

// load(part, b, k0, kn, n0, nn) fills [kn, nn] of one of `parts` operands B that share A; columns up to the next
// multiple of NR hold anything finite. by_rows: whether B's rows lie in memory one after the other, or its columns.
// where(the same but for b) is what it will read, `then` what is read after all of B. done(n0, nn, c) takes the sums,
// [M, nn] at c + part * Op::wide / parts, rows LDC apart. `c` has room for PIECES * PC rows or more, and A and sums for
// M up to the next multiple of 2 VL, whatever lies there.
template <class Op, class Load, class Where, class Done>
void gemm(
    long M, long N, long K, int parts, Left<typename Op::Word> a, typename Op::Word* b, float* c, bool by_rows,
    Load load, Where where, const Ahead& then, Done done
) {
    if (M <= FEW && by_rows) return gemm_by_rows<Op>(M, N, K, parts, a, b, c, load, done);
    constexpr long depth = Op::depth;
    const bool asks = Op::asks || M <= FEW;
    const long width = Op::wide / parts;
    for (long n0 = 0; n0 < N; n0 += width) {
        const long nn = std::min(width, N - n0);
        long k0 = 0;
        do {
            const long kn = std::min(depth, K - k0), k1 = k0 + depth;
            for (int part = 0; part < parts; part++) {
                typename Op::Word* panels = b + part * width * Op::deep;
                load(part, panels, k0, kn, n0, nn);
                const Ahead next = part + 1 < parts ? where(part + 1, k0, kn, n0, nn)
                    : k1 < K ? where(0, k1, std::min(depth, K - k1), n0, nn)
                    : n0 + width < N ? where(0, 0, std::min(depth, K), n0 + width, std::min(width, N - n0 - width))
                    : then;
                add_product<Op>(M, nn, k0, kn, a, panels, c + part * width, asks ? next : Ahead());
            }
            k0 = k1;
        } while (k0 < K);
        done(n0, nn, c);
    }
}
