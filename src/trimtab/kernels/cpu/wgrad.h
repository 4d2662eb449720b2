// The gradients of the parameters, from the rows, dy, the pre-activations and their gradients:
//
//     d_up = x[row]^T d_pre, d_down = (h * w)^T dy[row], d_up_bias = sum d_pre, d_down_bias = sum w dy[row]
//
//     d_up_b = u_up^T d_pre, d_up_a = x[row]^T v_up, d_down_b = u_down^T dy[row], d_down_a = (h * w)^T v_down
//
// written over what is there or, of the first two, added to it. A task is a block of one expert's gradient over all its rows.
#pragma once
#include "thin.h"

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
    const unsigned word = control_word();
#pragma omp parallel num_threads(c.threads)
    {
        const Controlled controlled(word);
        [[maybe_unused]] const typename Op::Session session;
        const Operands<T> o = {c, (const T*)c.d_pre, width(c), nullptr};
        weight_gradients<T, Op>(o, {0, c.E, 0, c.R}, Scratch(c, omp_get_thread_num(), 0));
    }
}
