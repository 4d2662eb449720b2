// The gradients of adapters: thin products over an expert's rows, which are read where they lie.
//
// A value of these rows takes part in r sums and no more. A panel, as wider gradients have, would be written to be read
// once or twice; here words are made of two rows in registers, of r times a register's columns at a time.
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
