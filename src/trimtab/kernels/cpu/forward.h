// pre = x[row] up + bias, h = activation(pre) * w, out = h down + w bias, y = the sum of a token's outs. Where there is
// no y, pre is all that is made.
#pragma once
#include "rows.h"

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

// The first blocks of weights that an expert's products bring.
template <class W, class Op>
Ahead first_of_up(const Call& c, const Rows& t) {
    const Right<W> up = up_of<W>(c, t.expert);
    const Brought b = brought<Op>(t.count, c.D, up.parts);
    const auto part = [&](int part) { return up.where(part, 0, b.k, 0, std::min(c.F, b.n)); };
    return up.parts > 1 ? part(0).and_beside(part(1)) : part(0);
}
template <class W, class Op>
Ahead first_of_down(const Call& c, const Rows& t, long from, long until) {
    const Brought b = brought<Op>(t.count, c.F, 1);
    return down_of<W>(c, t.expert).where(0, 0, b.k, from, std::min(until - from, b.n));
}

template <class T, class W, class Op>
void hidden_rows(const Call& c, Rows t, typename Op::Value* hidden, Scratch s, const Rows* next) {
    const long D = c.D, F = c.F, I = width(c), ldx = Op::pitch(D), ldh = Op::pitch(F);
    using Word = typename Op::Word;
    auto* rows = (typename Op::Value*)s.x;
    const Activation act = activation(c.act);
    const int parts = act.gate ? 2 : 1, step = c.interleaved ? 2 : 1;
    const long second = c.interleaved ? 1 : F;
    gather((const T*)c.x, D, c.row_R + t.start, t.count, 0, D, rows_of(rows, ldx));
    const T* bias = c.up_bias ? (const T*)c.up_bias + t.expert * I : nullptr;
    gemm<Op>(
        t.count, F, D, {(Word*)rows, ldx / Op::values, true}, up_of<W>(c, t.expert), (Word*)s.b, s.c,
        next ? first_of_up<W, Op>(c, *next) : c.y ? first_of_down<W, Op>(c, t, 0, D) : Ahead(),
        [&](long m0, long mn, long n0, long nn, float* got) {
            float shift[2][NC + VL], beside[NC + VL];
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
                const float w = c.folded ? weight_of(c, r) : 1.0f;
                typename Op::Value* row = hidden + i * ldh;
                float* h = open_row(row + n0, beside);
                act.forward(got, got + Op::wide / 2, nn, w, shape_of(c), h);
                close_row(row + n0, h, nn);
                end_row(row, F);
            }
        });
}

template <class T, class W, class Op>
void out_rows(
    const Call& c, Rows t, const typename Op::Value* hidden, Scratch s, const Combine<T>& y, const Rows* next
) {
    using Word = typename Op::Word;
    const long F = c.F, first = y.from;
    const T* shift = c.down_bias ? (const T*)c.down_bias + t.expert * c.D : nullptr;
    gemm<Op>(
        t.count, y.until - first, F, {(const Word*)hidden, Op::pitch(F) / Op::values, true},
        down_of<W>(c, t.expert).from(first), (Word*)s.b, s.c,
        !next               ? Ahead()
        : c.threads == 1    ? first_of_up<W, Op>(c, *next)
                            : first_of_down<W, Op>(c, *next, first, y.until),
        [&](long m0, long mn, long n0, long nn, float* got) {
            n0 += first;
            for (long i = m0; i < m0 + mn; i++, got += LDC) {
                const float w = c.folded ? weight_of(c, t.start + i) : 1.0f;
                for (long n = 0; shift && n < nn; n += VL)
                    store(got + n, load(got + n) + load(shift + n0 + n, nn - n) * w);
                y.add(t.start + i, n0, nn, got);
            }
        });
}

template <class T, class W, class Op>
void forward(const Call& c) {
    using Value = typename Op::Value;
    const std::vector<Wave> all = waves(c);
    const long most = largest(c, all);
    const Shared shared(c, all);
    const Ends ends(c);
    const unsigned word = control_word();
#pragma omp parallel num_threads(c.threads)
    {
        const Controlled controlled(word);
        [[maybe_unused]] const typename Op::Session session;
        const Scratch s(c, omp_get_thread_num(), most);
        const Combine<T> y(c, ends, c.y, !c.folded);
        two_products(
            c, all, (Value*)shared.second, Op::pitch(c.F),
            [&](const Wave&, Rows t, Value* to, const Rows* next) { hidden_rows<T, W, Op>(c, t, to, s, next); },
            [&](Rows t, const Value* from, const Rows* next) {
                if (c.y) out_rows<T, W, Op>(c, t, from, s, y, next);
            },
            [](const Wave&) {});
    }
}
