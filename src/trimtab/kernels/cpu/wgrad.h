// The gradients of the parameters, from the rows, dy, the pre-activations and their gradients:
//
//     d_up = x[row]^T d_pre, d_down = (h * w)^T dy[row], d_up_bias = sum d_pre, d_down_bias = sum w dy[row]
//
//     d_up_b = u_up^T d_pre, d_up_a = x[row]^T v_up, d_down_b = u_down^T dy[row], d_down_a = (h * w)^T v_down
//
// written over what is there or, of the first two, added to it. A task is a block of one expert's gradient over all its rows.
//
// Of adapters they are thin products over an expert's rows, which are read where they lie. A value of these rows takes
// part in r sums and no more: a panel, as wider gradients have, would be written to be read once or twice. Words are made
// of two rows in registers, of r times a register's columns at a time.
#pragma once
#include "gradient.h"

constexpr int THIN = VL == 16 ? 8 : 4;  // rows of sums in registers, of NR columns each

// M rows of A, `words` of K, times NR columns from `n` on of the rows at rows[0 : words * values]. The columns behind
// them are asked for, and, of the first ones, those of the next rows.
template <class Op, class T, int M>
void thin_tile(long words, const typename Op::Word* a, long lda, const T* const* rows, long n, const Sums& c) {
    constexpr long line = 64 / sizeof(T);
    vf acc[M][2];
    UNROLL for (int m = 0; m < M; m++)
        UNROLL for (int j = 0; j < 2; j++) acc[m][j] = c.from ? load(c.from + m * c.ld_from + j * VL) : vf{};
    for (long k = 0; k < words; k++, rows += Op::values) {
        Op::new_row(lda);
        for (int i = 0; i < Op::values; i++) {
            if (n == 0) expect(rows[i + FAR], NR);
            for (long soon = NR; soon < 2 * NR; soon += line) __builtin_prefetch(rows[i] + n + soon);
        }
        decltype(Op::read(a)) right[2];
        Op::read_rows(rows[0] + n, rows[Op::values - 1] + n, right);
        UNROLL for (int m = 0; m < M; m++) {
            const auto v = Op::spread(a[m * lda + k]);
            UNROLL for (int j = 0; j < 2; j++) acc[m][j] = Op::add(acc[m][j], v, right[j]);
        }
    }
    UNROLL for (int m = 0; m < M; m++) {
        if (c.end == NEAR)
            UNROLL for (int j = 0; j < 2; j++) store(c.row(m) + j * VL, acc[m][j]);
        else c.end_row(m, acc[m][0], acc[m][1]);
    }
}

// Of M rows of A, whatever M.
template <class Op, class T>
void thin_strip(
    long M, long words, const typename Op::Word* a, long lda, const T* const* rows, long n, const Sums& c
) {
    long m = 0;
    for (; m + THIN <= M; m += THIN) thin_tile<Op, T, THIN>(words, a + m * lda, lda, rows, n, c.at(m, 0));
    for (; m < M; m++) thin_tile<Op, T, 1>(words, a + m * lda, lda, rows, n, c.at(m, 0));
}

// Whether a block's rows can be read where they lie: they are there, and whole registers. Tiles read panels.
template <class Op, class T>
bool thin(const Operands<T>& o, const Block& t) {
    return Op::tall < NR && t.which > 1 && t.qn % NR == 0 && (t.which != 4 || o.hidden);
}

// Columns from n0 on of rows r0 : r0 + kn of an operand, where they lie; `zeros` for those that are none.
template <class T>
void point_at(const Operands<T>& o, Operand which, long r0, long kn, long n0, const T* zeros, const T** rows) {
    const Call& c = o.c;
    const T* x = (const T*)(which == X ? c.x : c.dy);
    for (long k = 0; k < kn; k++) {
        const long r = r0 + k;
        if (which == DPRE) rows[k] = o.d_pre + r * o.ld + n0;
        else if (which == H) rows[k] = o.hidden + r * c.F + n0;
        else rows[k] = c.row_R[r] < 0 ? zeros : x + c.row_R[r] * c.D + n0;
    }
}

// As `one_block`, of an adapter.
template <class T, class Op>
void thin_block(const Operands<T>& o, Block t, Scratch s) {
    using Word = typename Op::Word;
    constexpr long most = ROWS<Op>, ld_left = pitch(most / Op::values);
    const Gradient g(o.c, t);
    const bool several = g.rows > most, direct = g.direct(t.qn);
    const long ld = several ? pitch(Op::block) : NR;
    const T *rows[most + FAR + Op::values], *zeros = (const T*)s.b;
    memset(s.b, 0, (t.qn + NR) * sizeof(T));
    long k0 = 0;
    do {
        const long kn = std::min(most, g.rows - k0), words = (kn + Op::values - 1) / Op::values;
        const bool last = k0 + most >= g.rows;
        std::fill(rows, rows + most + FAR + Op::values, zeros);
        point_at(o, g.right, g.start + k0, kn, t.q0, zeros, rows);
        for (long p = 0; p < t.pn; p += HIGH) {
            const long pn = std::min(HIGH, t.pn - p);
            bring_turned<Op>(o, g.left, g.start, k0, kn, t.p0 + p, pn, (Word*)s.x, ld_left, (Word*)s.beside);
            for (long q = 0; q < t.qn; q += NR) {
                float* sums = several ? s.c + p * ld + q : s.c;
                Sums way = {k0 > 0 ? sums : nullptr, ld, sums, ld, NEAR};
                if (direct && last) way.to = g.at(p, q), way.ld = g.Q, way.end = g.end();
                thin_strip<Op, T>(pn, words, (const Word*)s.x, ld_left, rows, q, way);
                if (last && !direct) g.put(sums, ld, p, pn, q, NR);
            }
        }
        k0 += most;
    } while (k0 < g.rows);
}

// Both operands are brought once for many products: the right one for all rows of the block, the left one for all its
// columns.
template <class T, class Op>
void one_block(const Operands<T>& o, Block t, Scratch s) {
    using Word = typename Op::Word;
    constexpr long rows = ROWS<Op>, ld_left = pitch(rows / Op::values), depth = std::min(Op::depth, rows);
    const Gradient g(o.c, t);
    const bool several = g.rows > rows, direct = g.direct(t.qn) && (!g.add || Op::adds);
    const long ld = several ? pitch(Op::block) : LDC, each = Op::panel * up_to(t.qn, NR);  // words of a step
    const long at_once = several ? depth : rows;  // few beside many sums, for the second cache's sake
    // Sums of one step leave at once and wait nowhere: whole rows of them are written in one go.
    const long wide = Op::along && direct && g.rows <= depth ? t.qn : NC;
    Word *right = (Word*)s.b, *left = (Word*)s.x;
    long k0 = 0;
    do {
        const long kn = std::min(at_once, g.rows - k0), steps = std::max(1L, (kn + depth - 1) / depth);
        const bool last = k0 + at_once >= g.rows;
        for (long i = 0; i < steps; i++) {
            const long n = std::min(depth, kn - i * depth);
            for (long q = 0; q < t.qn; q += NC) {
                const auto panels = panels_of<Op>(right + i * each + q * Op::panel);
                bring<Op>(o, g.right, g.start, k0 + i * depth, n, t.q0 + q, std::min(NC, t.qn - q), panels);
            }
        }
        for (long p = 0; p < t.pn; p += HIGH) {
            const long pn = std::min(HIGH, t.pn - p);
            bring_turned<Op>(o, g.left, g.start, k0, kn, t.p0 + p, pn, left, ld_left, (Word*)s.beside);
            for (long q = 0; q < t.qn; q += wide) {
                const long qn = std::min(wide, t.qn - q);
                float* sums = several ? s.c + p * ld + q : s.c;
                for (long i = 0; i < steps; i++) {
                    const long words = (std::min(depth, kn - i * depth) + Op::values - 1) / Op::values;
                    Sums way = {k0 > 0 || i > 0 ? sums : nullptr, ld, sums, ld, NEAR};
                    if (direct && last && i + 1 == steps) way.to = g.at(p, q), way.ld = g.Q, way.end = g.end();
                    const Word* b = right + i * each + q * Op::panel;
                    multiply(Op(), pn, qn, i * depth / Op::values, words, {left, ld_left}, b, way);
                }
                if (last && !direct) g.put(sums, ld, p, pn, q, qn);
            }
        }
        k0 += at_once;
    } while (k0 < g.rows);
}

// Column sums of rows of one expert, row r of it at row(r), null for zeros.
template <class Row>
void bias_sum(const Row& row, long rows, long wide, float* to, Scratch s) {
    for (long n0 = 0; n0 < wide; n0 += NC) {
        const long nn = std::min(NC, wide - n0);
        memset(s.c, 0, NC * sizeof(float));
        for (long k = 0; k < rows; k++) {
            const auto [from, w] = row(k);
            if (!from) continue;
            for (long n = 0; n < nn; n += VL) store(s.c + n, load(s.c + n) + w * load(from + n0 + n, nn - n));
        }
        memcpy(to + n0, s.c, nn * sizeof(float));
    }
}

// Called by every thread, none waits.
template <class T, class Op>
void weight_gradients(const Operands<T>& o, const Wave& wave, Scratch s) {
    const Call& c = o.c;
    const std::vector<Block> tasks = blocks<Op>(c, wave);
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < tasks.size(); i++) {
        if constexpr (Op::tall < NR)
            if (thin<Op>(o, tasks[i])) {
                thin_block<T, Op>(o, tasks[i], s);
                continue;
            }
        one_block<T, Op>(o, tasks[i], s);
    }
#pragma omp for schedule(dynamic, 1) nowait
    for (long e = wave.first; e < wave.last; e++) {
        const long start = c.offsets[e], rows = c.offsets[e + 1] - start, I = width(c);
        const auto d_pre = [&](long k) { return std::pair(o.d_pre + (start + k) * o.ld, 1.0f); };
        const auto dy = [&](long k) {
            const long row = c.row_R[start + k];
            return std::pair(row < 0 ? nullptr : (const T*)c.dy + row * c.D, weight_of(c, start + k));
        };
        if (c.d_up_bias) bias_sum(d_pre, rows, I, (float*)c.d_up_bias + e * I, s);
        if (c.d_down_bias) bias_sum(dy, rows, c.D, (float*)c.d_down_bias + e * c.D, s);
    }
}

template <class T, class Op>
void weight_gradients(const Call& c) {
    const Operands<T> o = {c, (const T*)c.d_pre, width(c), nullptr};
    by_team<Op>(c, 0, [&](const Scratch& s) { weight_gradients<T, Op>(o, {0, c.E, 0, c.R}, s); });
}
