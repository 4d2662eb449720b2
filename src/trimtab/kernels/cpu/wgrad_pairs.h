// A block of a gradient from operands of pairs along its rows.
//
// Both operands are brought once for many products: the right one for all rows of the block, the left one, which is
// turned, for all its columns.
#pragma once
#include "wgrad.h"

#if defined(HAVE_DOT) || defined(HAVE_AMX)
constexpr long HIGH = 256;  // rows of the block whose operand is brought at once

// Large where there are enough of them for all threads.
inline std::pair<long, long> most_of_block(Pairs, const Call& c, const Wave& wave, long rows) {
    const long large = rows > PAIRED_ROWS ? PAIRED_BLOCK : PAIRED_COLUMNS;
    const long most = wave.last - wave.first < 2 * c.threads && c.threads > 1 ? QC : large;
    return {most, most};
}

// Columns p0 : p0 + pn of an operand as rows of pairs at `to`, `ld` apart, by way of `beside`.
template <class T>
void bring_turned(
    const Operands<T>& o, Operand which, long start, long k0, long kn, long p0, long pn, uint32_t* to, long ld,
    uint32_t* beside
) {
    static_assert(TILE * HIGH <= NC * VL);  // what `beside` holds
    const PairPlace pairs = {beside, HIGH, NR};
    for (long k = 0; k < kn; k += 2 * TILE) {
        const long n = std::min(2 * TILE, kn - k);
        bring(o, which, start, k0 + k, n, p0, pn, pairs);
        end_block(pairs, n, pn);
        turn(beside, HIGH, to + k / 2, ld, pn);
    }
}

template <class T, class Op>
void one_block(Op, const Operands<T>& o, Block t, Scratch s) {
    constexpr long ld_left = pitch(PAIRED_ROWS / 2), depth = Op::depth;
    static_assert(up_to(HIGH, VL) * ld_left <= KC * LDC && QC + NR <= BROUGHT && HIGH <= QC);
    const Gradient g(o.c, t);
    const bool several = g.rows > PAIRED_ROWS, direct = g.direct(t.qn) && (!g.add || Op::adds);
    const long ld = several ? pitch(PAIRED_BLOCK) : LDC, each = Op::deep * up_to(t.qn, NR);  // words of a step
    const long at_once = several ? depth : PAIRED_ROWS;  // few beside many sums, for the second cache's sake
    // Sums of one step leave at once and wait nowhere: whole rows of them are written in one go.
    const long wide = Op::along && direct && g.rows <= depth ? t.qn : QC;
    uint32_t *right = (uint32_t*)s.b, *left = (uint32_t*)s.x;
    long k0 = 0;
    do {
        const long kn = std::min(at_once, g.rows - k0), steps = std::max(1L, (kn + depth - 1) / depth);
        const bool last = k0 + at_once >= g.rows;
        for (long i = 0; i < steps; i++) {
            const long n = std::min(depth, kn - i * depth);
            for (long q = 0; q < t.qn; q += QC) {
                const long qn = std::min(QC, t.qn - q);
                const PairPlace panels = panels_of(right + i * each + q * Op::deep);
                bring(o, g.right, g.start, k0 + i * depth, n, t.q0 + q, qn, panels);
                end_block(panels, n, qn);
            }
        }
        for (long p = 0; p < t.pn; p += HIGH) {
            const long pn = std::min(HIGH, t.pn - p);
            bring_turned(o, g.left, g.start, k0, kn, t.p0 + p, pn, left, ld_left, (uint32_t*)s.beside);
            for (long q = 0; q < t.qn; q += wide) {
                const long qn = std::min(wide, t.qn - q);
                float* sums = several ? s.c + p * ld + q : s.c;
                for (long i = 0; i < steps; i++) {
                    const long words = (std::min(depth, kn - i * depth) + 1) / 2;
                    Sums way = {k0 > 0 || i > 0 ? sums : nullptr, ld, sums, ld, NEAR};
                    if (direct && last && i + 1 == steps) way.to = g.at(p, q), way.ld = g.Q, way.end = g.end();
                    const uint32_t* b = right + i * each + q * Op::deep;
                    multiply(Op(), pn, qn, i * Op::deep, words, {left, ld_left, true}, b, way);
                }
                if (last && !direct) g.put(sums, ld, p, pn, q, qn);
            }
        }
        k0 += at_once;
    } while (k0 < g.rows);
}
#endif
