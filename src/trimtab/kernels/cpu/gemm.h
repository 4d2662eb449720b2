// Products of float blocks: C[M, N] = A B with A row-major or transposed, B brought in blocks by a loader.
//
// A sum over K is taken in steps of KC values, each in the order of k, and the steps are added in order: the bits of
// an element depend on its row and column alone, not on M, N or the thread.
#pragma once
#include <algorithm>

#include "simd.h"

constexpr long KC = 256, NC = 128;  // values of K and columns of B that are brought at once
constexpr long MC = 336;            // rows of A that a task takes at most, a multiple of MR
constexpr long PC = 280, QC = 256;  // a gradient's block: rows of A that are brought at once at most, columns
constexpr long PIECES = 2;          // and how many such rows share one block of B
constexpr long BROUGHT = std::max(PC, QC) + NR;  // values of a row that are brought for a gradient, blanks after it
constexpr long pitch(long n) { return n + VL; }  // between rows of n floats: no power of two, for the caches' sake
constexpr long LDC = pitch(QC);  // of every block of sums, the smaller ones too

// Where a block's sums go: to `to`, with `from` added if there is one; past the caches if `past`.
struct Sums {
    const float* from;
    long ld_from;
    float* to;
    long ld;
    bool past;
    Sums at(long m, long n) const {
        return {from ? from + m * ld_from + n : nullptr, ld_from, to + m * ld + n, ld, past};
    }
};

// One block of at most MR x NR, its sums in registers.
template <int M, bool ByRow>
void tile(long K, const float* a, long lda, const float* b, const Sums& c) {
    vf acc[M][2];
    UNROLL for (int i = 0; i < M; i++) acc[i][0] = acc[i][1] = vf{};
    UNROLL for (int i = 0; i < M; i++) {  // what is added at the end may come from far
        if (!c.from) break;
        __builtin_prefetch(c.from + i * c.ld_from);
        __builtin_prefetch(c.from + i * c.ld_from + VL);
    }
    for (long k = 0; k < K; k++, b += NR) {  // no instruction to spare here: prefetches made it slower
        vf b0 = *(const vf*)b, b1 = *(const vf*)(b + VL);
        UNROLL for (int i = 0; i < M; i++) {
            vf v = splat(ByRow ? a[i * lda + k] : a[k * lda + i]);
            acc[i][0] += v * b0;
            acc[i][1] += v * b1;
        }
    }
    UNROLL for (int i = 0; i < M; i++) {
        if (c.from) {
            acc[i][0] += load(c.from + i * c.ld_from);
            acc[i][1] += load(c.from + i * c.ld_from + VL);
        }
        float* to = c.to + i * c.ld;
        if (c.past) {
            stream(to, acc[i][0], acc[i][1]);
        } else {
            store(to, acc[i][0]);
            store(to + VL, acc[i][1]);
        }
    }
}

using Tile = void (*)(long, const float*, long, const float*, const Sums&);
template <bool ByRow, int... M>
Tile pick(long m, std::integer_sequence<int, M...>) {
    static constexpr Tile all[] = {tile<M + 1, ByRow>...};
    return all[m - 1];
}

// Operand A: value (m, k) lies at p[m * ld + k]; or not `by_row`, in a panel of its tile, VL values for each k.
struct Left {
    const float* p;
    long ld;
    bool by_row;
    const float* at(long tile, long m, long k) const { return by_row ? p + m * ld + k : p + (tile * KC + k) * VL; }
};

// M rows in tiles of about the same height.
inline long first_row(long tile, long tiles, long M) { return tile * M / tiles; }

inline long up_to(long n, long step) { return (n + step - 1) / step * step; }

// C[M, nn] = (+) A[:, k0 : k0 + kn] B for one block of B, [kn, nn] in panels of NR columns, KC * NR floats apart.
__attribute__((noinline)) inline void multiply(long M, long nn, long k0, long kn, Left a, const float* b, Sums c) {
    const long tiles = (M + MR - 1) / MR;
    const auto sizes = std::make_integer_sequence<int, MR>{};
    for (long n = 0; n < nn; n += NR) {
        for (long t = 0; t < tiles; t++) {
            const long m = first_row(t, tiles, M), rows = first_row(t + 1, tiles, M) - m;
            const Tile run = a.by_row ? pick<true>(rows, sizes) : pick<false>(rows, sizes);
            run(kn, a.at(t, m, k0), a.ld, b + n * KC, c.at(m, n));
        }
    }
}

// load(part, b, k0, kn, n0, nn) fills [kn, nn] of one of `parts` operands B that share A; columns up to the next
// multiple of NR hold anything finite. done(n0, nn, c) takes the sums, [M, nn] at c + part * NC / parts, rows LDC apart.
template <class Load, class Done>
void gemm(long M, long N, long K, int parts, Left a, float* b, float* c, Load load, Done done) {
    const long width = NC / parts;
    for (long n0 = 0; n0 < N; n0 += width) {
        const long nn = std::min(width, N - n0);
        long k0 = 0;
        do {
            const long kn = std::min(KC, K - k0);
            for (int part = 0; part < parts; part++) {
                load(part, b + part * width * KC, k0, kn, n0, nn);
                float* sums = c + part * width;
                multiply(M, nn, k0, kn, a, b + part * width * KC, {k0 > 0 ? sums : nullptr, LDC, sums, LDC, false});
            }
            k0 += KC;
        } while (k0 < K);
        done(n0, nn, c);
    }
}
