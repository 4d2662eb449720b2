// Whole products: C[M, N] = A B for the rows A of an expert and a weight B, block by block.
#pragma once
#include "few_rows.h"

// How much of B a product brings at once that is made block by block: of K, and columns of each of `parts`; and
// whether `gemm_by_chunks` makes it.
struct Brought {
    long k, n;
    bool chunks;
};
template <class Op>
Brought brought(long M, long K, int parts) {
    if constexpr (Op::chunk > 0) {
        const long columns = CHUNKED / (std::max(1L, up_to(K, Op::depth)) * (long)sizeof(typename Op::Value));
        if (M >= Op::many && columns >= Op::wide / 2) return {K, std::min(columns, Op::wide) / parts / NR * NR, true};
    }
    return {std::min(K, Op::depth), Op::wide / parts, false};
}

// Where the step over K from k0 on ends. An adapter's few rows behind the others are no step of their own.
template <class Op, class W>
long step_end(const Right<W>& weight, long k0, long K) {
    const long k1 = k0 + Op::depth;
    return K <= k1 + (weight.whole() ? 0 : Op::spare) ? K : k1;
}

constexpr long FEW_ROWS = 64;  // beside which it is a weight in panels that is waited for
#if defined(__SSE4A__)  // beside so many rows AMD's hardware foresees more of a panel, Intel's less than what is asked for
constexpr long FORESEEN = 8;
#else
constexpr long FORESEEN = 0;
#endif

// Whether a product of few rows reads a weight panel by panel, each from one end to the other.
template <class Op, class W>
bool by_panel(const Right<W>& weight, long M) {
    return (lies<Op, W> || Decoded<W>::codes) && !weight.by_rows && M <= FEW_ROWS;
}

// The first block that a product of M rows brings.
template <class Op, class W>
Ahead first_of(const Right<W>& weight, long M, long K, long N) {
    const Brought b = brought<Op>(M, K, weight.parts);
    const long n = std::min(N, by_panel<Op>(weight, M) ? NR : b.n);
    const auto part = [&](int part) { return weight.where(part, 0, b.k, 0, n); };
    return weight.parts > 1 ? part(0).and_beside(part(1)) : part(0);
}

// The product of A with B's block [k0 : k0 + kn, n0 : n0 + nn] goes to the sums: at once, or panel by panel where B
// lies so. What comes next is asked for meanwhile, unless the hardware foresees it.
template <class Op>
void add_product(
    long M, long nn, long k0, long kn, Left<typename Op::Word> a, const Panels<const typename Op::Word>& b,
    float* sums, const Ahead& next
) {
    const long words = (kn + Op::values - 1) / Op::values, bytes = words * sizeof(*b.p);
    const bool whole = b.panel == Op::panel * NR;
    for (long n = 0, wide = whole ? nn : NR; n < nn; n += wide) {
        const Sums way = {k0 > 0 ? sums + n : nullptr, LDC, sums + n, LDC, NEAR};
        const Ahead beside = {(const char*)b.at(0, n + NR), bytes, NR, bytes};
        const Ahead& soon = n + wide < nn ? beside : next;
        const bool asks = M <= Op::asks && (whole || M > FORESEEN);
        multiply(Op(), M, wide, k0 / Op::values, words, a, b.at(0, n), way, asks ? soon : Ahead());
    }
}

#if defined(HAVE_AMX)
// As `gemm`, where all of K is brought at once: the sums of some rows are done with while they are near. Those of all
// rows would leave no room in the second cache for the operands.
template <class W>
void gemm_by_chunks(
    long M, long N, long K, Left<uint32_t> a, const Right<W>& weight, uint32_t* b, float* c, const Ahead& then,
    Done done
) {
    const int parts = weight.parts;
    constexpr long depth = Amx::depth, chunk = Amx::chunk;
    static_assert(
        chunk % BLOCK_ROWS == 0 && CHUNKED / Amx::deep * Amx::panel <= KC * NC * (long)sizeof(uint32_t));
    constexpr long steps = CHUNKED / sizeof(bf16) / (Amx::wide / 2) / depth;  // at most
    const long width = brought<Amx>(M, K, parts).n;
    for (long n0 = 0; n0 < N; n0 += width) {
        const long nn = std::min(width, N - n0), after = std::min(width, N - n0 - nn);
        const auto place = [&](long k0, int part) { return b + (k0 / depth * parts + part) * width * Amx::panel; };
        const auto steps_of = [&](auto step) {  // one at least
            long k0 = 0;
            do {
                const long k1 = step_end<Amx>(weight, k0, K);
                step(k0, k1 - k0);
                k0 = k1;
            } while (k0 < K);
        };
        Panels<const uint32_t> panels[2][steps + 1];
        steps_of([&](long k0, long kn) {
            for (int part = 0; part < parts; part++)
                panels[part][k0 / depth] = weight.template panels<Amx>(part, place(k0, part), k0, kn, n0, nn);
        });
        const auto next = [&](int part) { return weight.where(part, 0, K, n0 + nn, after); };
        Lines lines(!after ? then : parts > 1 ? next(0).and_beside(next(1)) : next(0));
        const long tiles = up_to(M, BLOCK_ROWS) / BLOCK_ROWS * (up_to(nn, NR) / NR) * parts;
        const long blocks = tiles * std::max(1L, up_to(K, 2 * TILE) / (2 * TILE));
        const long each = (lines.all() + blocks - 1) / blocks;
        for (long m = 0; m < M; m += chunk) {
            const long rows = std::min(chunk, M - m);
            steps_of([&](long k0, long kn) {
                for (int part = 0; part < parts; part++) {
                    float* sums = c + part * Amx::wide / parts;
                    const Sums way = {k0 > 0 ? sums : nullptr, LDC, sums, LDC, NEAR};
                    const auto& b = panels[part][k0 / depth];
                    for (long n = 0; n < nn; n += NR)
                        tile_blocks<SomeLines>(
                            rows, NR, k0 / 2, (kn + 1) / 2, {a.at(m, 0), a.ld}, b.at(0, n), way.at(0, n),
                            [&] { return SomeLines{lines, each}; });
                }
            });
            done(m, rows, n0, nn, c);
        }
    }
}
#endif

// `b` has room for what is brought of B, `c` for as many rows of sums, and A and sums for M up to the next
// multiple of 2 VL, whatever lies there. `then` is what is read after all of B. done(m0, mn, n0, nn, c) takes sums,
// [mn, nn] of each part at c + part * Op::wide / parts, rows LDC apart.
template <class Op, class W>
void gemm(
    long M, long N, long K, Left<typename Op::Word> a, const Right<W>& weight, typename Op::Word* b, float* c,
    const Ahead& then, Done done
) {
    const bool by_rows = weight.by_rows;
    constexpr bool tiles = Op::tall == NR;
    if constexpr (in_place<Op, W> && !tiles)
        if (weight.whole() && by_rows && straight<Op>(M, N, K))
            return gemm_straight<Op>(M, N, K, a, weight, (float*)b, c, done);
    if constexpr (in_place<Op, W> && !(tiles && std::is_same_v<W, rounded>))
        if (weight.whole() && !by_rows && swaps<Op, W>(M, N, K))
            return gemm_swapped<Op>(M, N, K, a, weight, b, c, then, done);
    const int parts = weight.parts;
#if defined(HAVE_AMX)
    if constexpr (Op::chunk > 0)
        if (brought<Op>(M, K, parts).chunks) return gemm_by_chunks(M, N, K, a, weight, b, c, then, done);
#endif
    const long side = Op::wide / parts, width = by_panel<Op>(weight, M) ? NR : side;
    for (long n0 = 0; n0 < N; n0 += width) {
        const long nn = std::min(width, N - n0), n1 = n0 + width;
        long k0 = 0;
        do {
            const long k1 = step_end<Op>(weight, k0, K), kn = k1 - k0;
            for (int part = 0; part < parts; part++) {
                if constexpr (Decoded<W>::codes) {
                    float* sums = c + part * side;
                    const Sums way = {k0 > 0 ? sums : nullptr, LDC, sums, LDC, NEAR};
                    const auto* rows = a.at(0, k0 / Op::values);
                    const bool alone = nn == NR && weight.own(k0, kn) == kn && !by_rows;
                    if (alone && weight.template multiplied<Op>(part, k0, kn, n0, M, rows, a.ld, way)) continue;
                }
                const auto panels = weight.template panels<Op>(part, b + part * side * Op::panel, k0, kn, n0, nn);
                const Ahead next = part + 1 < parts ? weight.where(part + 1, k0, kn, n0, nn)
                    : k1 < K ? weight.where(0, k1, step_end<Op>(weight, k1, K) - k1, n0, nn)
                    : n1 < N ? weight.where(0, 0, step_end<Op>(weight, 0, K), n1, std::min(width, N - n1))
                    : then;
                add_product<Op>(M, nn, k0, kn, a, panels, c + part * side, next);
            }
            k0 = k1;
        } while (k0 < K);
        done(0, M, n0, nn, c);
    }
}
