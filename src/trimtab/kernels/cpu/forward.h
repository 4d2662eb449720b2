// pre = x[row] up + bias, h = activation(pre) * w, out = h down + w bias, y = the sum of a token's outs. Where there is
// no y, pre is all that is made.
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

// The bits that are kept: the activation sees what its backward will see.
template <class T>
void keep_row(float* v, long n, const float* bias, T* kept) {
    for (long i = 0; i < n; i += VL) {
        vf x = load(v + i);
        if (bias) x += load(bias + i);
        if constexpr (sizeof(T) == 2) x = as_bf16(x);
        store(v + i, x);
        if (kept) store(kept + i, x, n - i);
    }
}

template <class T, class W, class Op>
void hidden_rows(const Call& c, Rows t, typename Op::Value* hidden, Scratch s, const Rows* next) {
    const long D = c.D, F = c.F, I = width(c), K = D + c.rank_up, ldx = Op::pitch(K), ldh = Op::pitch(F + c.rank_down);
    using Word = typename Op::Word;
    auto* rows = (typename Op::Value*)s.x;
    const Activation act = activation(c.act);
    expect_adapters<W>(c, t.expert);
    const int parts = act.gate ? 2 : 1, step = c.interleaved ? 2 : 1;
    const long second = c.interleaved ? 1 : F;
    gather_left<Op>(Gathered<T>{(const T*)c.x, D, c.row_R + t.start, t.count, 0, D}, rows, ldx);
    append<Op>(c, t, rows, D, c.rank_up, c.scale_up, to_outputs(of_expert<Beside<W>>(c.up_a, t.expert, c.rank_up * D), D, c.rank_up, false), (T*)c.u_up, s);
    const T* bias = c.up_bias ? (const T*)c.up_bias + t.expert * I : nullptr;
    gemm<Op>(
        t.count, F, K, {(Word*)rows, ldx / Op::values}, up_of<W>(c, t.expert), (Word*)s.b, s.c,
        next ? first_of<Op>(up_of<W>(c, next->expert), next->count, K, F)
        : c.y ? first_of<Op>(down_of<W>(c, t.expert), t.count, F, D) : Ahead(),
        [&](long m0, long mn, long n0, long nn, float* got) {
            float shift[2][NC + VL];
            for (long n = 0; bias && n < nn; n++)
                for (int part = 0; part < parts; part++) shift[part][n] = value(bias[part * second + (n0 + n) * step]);
            for (long i = m0; i < m0 + mn; i++, got += LDC) {
                const long r = t.start + i;
                T* pre = c.pre ? (T*)c.pre + r * I + n0 : nullptr;
                if (pre && i + SOON < t.count)
                    for (int part = 0; part < parts; part++) expect_writes(pre + SOON * I + part * F, nn);
                for (int part = 0; part < parts; part++) {
                    float* v = got + part * Op::wide / 2;
                    keep_row(v, nn, bias ? shift[part] : nullptr, pre ? pre + part * F : nullptr);
                }
                if (!c.y) continue;
                typename Op::Value* row = hidden + i * ldh;
                act.forward(got, got + Op::wide / 2, nn, weight_of(c, r), shape_of(c), got);
                Op::put_row(got, row + n0, nn);
                Op::end_row(row, F);
            }
        });
    if (!c.y) return;
    append<Op>(c, t, hidden, F, c.rank_down, c.scale_down, to_outputs(of_expert<Beside<W>>(c.down_a, t.expert, c.rank_down * F), F, c.rank_down, false), (T*)c.u_down, s);
}

template <class T, class W, class Op>
void forward(const Call& c) {
    using Value = typename Op::Value;
    const std::vector<Wave> all = waves(c);
    const Shared shared(c, all);
    by_team<Op>(c, largest(c, all), [&](const Scratch& s) {
        const Combine<T> y(c, c.y);
        two_products(
            c, all, (Value*)shared.second, Op::pitch(c.F + c.rank_down),
            [&](const Wave&, Rows t, Value* to, const Rows* next) { hidden_rows<T, W, Op>(c, t, to, s, next); },
            [&](Rows t, const Value* from, const Rows* next) {
                const Ahead then = !next ? Ahead()
                    : c.threads == 1 ? first_of<Op>(up_of<W>(c, next->expert), next->count, c.D, c.F)
                                     : first_of<Op>(down_of<W>(c, next->expert).from(y.from), next->count, c.F, y.wide());
                const T* bias = c.down_bias ? (const T*)c.down_bias + t.expert * c.D : nullptr;
                combined_rows<Op>(c, t, from, c.F + c.rank_down, down_of<W>(c, t.expert), bias, y, s, then);
            },
            [](const Wave&) {});
        y.end();
    });
}
