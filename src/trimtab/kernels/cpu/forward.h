// pre = x[row] up + bias, h = activation(pre) * w, out = h down + w bias, y = the sum of a token's outs.
#pragma once
#include "rows.h"

// The bits that are kept: the activation sees what its backward will see.
template <class T>
void keep_row(float* v, long n, const float* bias, T* kept) {
    for (long i = 0; i < n; i += VL) {
        vf x = load(v + i);
        if (bias) x += load(bias + i);
        if constexpr (sizeof(T) == 2) x = (vf)(__builtin_convertvector(narrow(x), vu) << 16);
        store(v + i, x);
        if (kept) store(kept + i, x, n - i);
    }
}

template <class T, class Op>
void forward_rows(const Call& c, Rows t, Scratch s, const Combine<T>& y) {
    const long D = c.D, F = c.F, I = width(c), ldx = Op::pitch(D), ldh = Op::pitch(F);
    using Word = typename Op::Word;
    auto *rows = (typename Op::Value*)s.x, *hidden = (typename Op::Value*)s.h;
    const Activation act = activation(c.act);
    const int parts = act.gate ? 2 : 1, step = interleaved(c) ? 2 : 1;
    const long second = interleaved(c) ? 1 : F;
    gather((const T*)c.x, D, c.row_R + t.start, t.count, 0, D, rows_of(rows, ldx));
    const Weight<T> up = up_of<T>(c, t.expert), down = down_of<T>(c, t.expert);
    const T* bias = c.up_bias ? (const T*)c.up_bias + t.expert * I : nullptr;
    gemm<Op>(
        t.count, F, D, parts, {(Word*)rows, ldx / Op::values, true}, (Word*)s.b, s.c,
        [&](int part, Word* b, long k0, long kn, long n0, long nn) {
            up.outputs(panels_of(b), k0, kn, n0, nn, part * second, step);
        },
        [&](long n0, long nn, float* got) {
            float shift[2][NC + VL], beside[NC + VL];
            for (long n = 0; bias && n < nn; n++)
                for (int part = 0; part < parts; part++) shift[part][n] = value(bias[part * second + (n0 + n) * step]);
            for (long i = 0; i < t.count; i++, got += LDC) {
                const long r = t.start + i;
                T* pre = c.pre ? (T*)c.pre + r * I + n0 : nullptr;
                for (int part = 0; part < parts; part++)
                    keep_row(got + part * NC / 2, nn, bias ? shift[part] : nullptr, pre ? pre + part * F : nullptr);
                const float w = c.folded ? weight_of(c, r) : 1.0f;
                typename Op::Value* row = hidden + i * ldh;
                float* h = open_row(row + n0, beside);
                act.forward(got, got + NC / 2, nn, w, {c.alpha, c.limit}, h);
                close_row(row + n0, h, nn);
                end_row(row, F);
            }
        });
    const T* shift = c.down_bias ? (const T*)c.down_bias + t.expert * D : nullptr;
    gemm<Op>(
        t.count, D, F, 1, {(Word*)hidden, ldh / Op::values, true}, (Word*)s.b, s.c,
        [&](int, Word* b, long k0, long kn, long n0, long nn) { down.outputs(panels_of(b), k0, kn, n0, nn, 0, 1); },
        [&](long n0, long nn, float* got) {
            for (long i = 0; i < t.count; i++, got += LDC) {
                const float w = c.folded ? weight_of(c, t.start + i) : 1.0f;
                for (long n = 0; shift && n < nn; n += VL)
                    store(got + n, load(got + n) + load(shift + n0 + n, nn - n) * w);
                y.put(t.start + i, n0, nn, got);
            }
        });
}

template <class T, class Op>
void forward(const Call& c) {
    const std::vector<Wave> all = waves(c);
    const Shared shared(c, all);
    const Ends ends(c);
#pragma omp parallel num_threads(c.threads)
    {
        [[maybe_unused]] const typename Op::Session session;
        const Scratch s(c, omp_get_thread_num());
        Combine<T> y(c, ends, c.y, shared, !c.folded);
        for (const Wave& wave : all) {
            const std::vector<Rows> tasks = pieces(c, wave);
            y.begin(wave, shared);
#pragma omp for schedule(dynamic, 1) nowait
            for (size_t i = 0; i < tasks.size(); i++) forward_rows<T, Op>(c, tasks[i], s, y);
            y.end(wave);
        }
    }
}
