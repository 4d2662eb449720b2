// An adapter beside an expert's products: its thin columns lie behind the others of a left operand.
#pragma once
#include "rows.h"

// An expert's adapters are asked for before its rows are gathered: they are too short for the hardware to foresee them.
template <class W>
void expect_adapters(const Call& c, long e) {
    const auto all = [&](const void* p, long each) {
        if (p) expect<2>(of_expert<Beside<W>>(p, e, each), each);
    };
    all(c.up_a, c.rank_up * c.D);
    all(c.up_b, c.rank_up * width(c));
    all(c.down_a, c.rank_down * c.F);
    all(c.down_b, c.rank_down * c.D);
}

// scale * (a piece's left operand [count, K] times an adapter's matrix [K, r]), behind its K columns and in `kept` [R, r].
template <class Op, class W, class T>
void append(
    const Call& c, Rows t, typename Op::Value* left, long K, long r, float scale, const Matrix<W>& thin, T* kept,
    Scratch s
) {
    using Word = typename Op::Word;
    if (r == 0) return;
    const long ld = Op::pitch(K + r);
    gemm<Op>(
        t.count, r, K, {(const Word*)left, ld / Op::values}, Right<W>(thin), (Word*)s.b, s.c, Ahead(),
        [&](long m0, long mn, long n0, long nn, float* got) {
            for (long i = m0; i < m0 + mn; i++, got += LDC) {
                for (long n = 0; n < nn; n += VL) store(got + n, load(got + n) * scale);
                Op::put_row((const float*)got, left + i * ld + K + n0, nn);
                Op::end_row(left + i * ld, K + r);
                for (long n = 0; kept && n < nn; n += VL)
                    store(kept + (t.start + i) * r + n0 + n, load(got + n), nn - n);
            }
        });
}
