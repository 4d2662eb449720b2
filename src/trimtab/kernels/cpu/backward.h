// From dy: the gradients of the pre-activations, the routing weights and the rows.
//
//     dh = dy[row] down^T, dw = sum(h * dh) (+ bias . dy), d_pre = activation'(pre) (dh * w), dx = the sum of d_pre up^T
#pragma once
#include "wgrad.h"

// d_pre of a row's part of n hidden values in the order of the parameters, in `to` as an operand and in `kept`.
template <class V, class T>
void keep_gradients(const Call& c, const float* dg, const float* du, long n, V* to, T* kept) {
    const auto lanes = std::make_integer_sequence<int, VL>{};
    for (long i = 0; i < n; i += VL) {
        vf a = load(dg + i), b = load(du + i);
        long at = i, far = c.F, left = n - i, more = gated(c) ? left : 0;
        if (interleaved(c)) {
            vf first = zipped<0>(a, b, lanes);
            b = zipped<1>(a, b, lanes);
            a = first;
            at = 2 * i, far = VL, left = 2 * (n - i), more = std::max(0L, left - VL);
        }
        store(to + at, a, left);
        store(kept + at, a, left);
        if (more) {
            store(to + at + far, b, more);
            store(kept + at + far, b, more);
        }
    }
}

template <class T, class Op>
void backward_rows(const Call& c, Rows t, Scratch s, const Combine<T>& dx) {
    const long D = c.D, F = c.F, I = width(c), ldx = Op::pitch(D), ldh = Op::pitch(I), step = interleaved(c) ? 2 : 1;
    using Word = typename Op::Word;
    auto *rows = (typename Op::Value*)s.x, *d_pre = (typename Op::Value*)s.h;
    const Activation act = activation(c.act);
    gather((const T*)c.dy, D, c.row_R + t.start, t.count, 0, D, rows_of(rows, ldx));
    const Weight<T> up = up_of<T>(c, t.expert), down = down_of<T>(c, t.expert);
    memset(s.sums, 0, t.count * VL * sizeof(float));
    gemm<Op>(
        t.count, F, D, 1, {(Word*)rows, ldx / Op::values, true}, (Word*)s.b, s.c,
        [&](int, Word* b, long k0, long kn, long n0, long nn) { down.inputs(panels_of(b), k0, kn, n0, nn); },
        [&](long n0, long nn, const float* dh) {
            float g[NC + VL], u[NC + VL], dg[NC + VL], du[NC + VL];
            for (long i = 0; i < t.count; i++, dh += LDC) {
                const long r = t.start + i;
                const T* pre = (const T*)c.pre + r * I + n0;
                widen_row(pre, g, nn);
                blank(rows_of(g, 0), 0, nn);
                if (act.gate) {
                    widen_row(pre + F, u, nn);
                    blank(rows_of(u, 0), 0, nn);
                }
                act.backward(g, u, dh, nn, weight_of(c, r), {c.alpha, c.limit}, dg, du, s.sums + i * VL);
                keep_gradients(c, dg, du, nn, d_pre + i * ldh + n0 * step, (T*)c.d_pre + r * I + n0 * step);
                end_row(d_pre + i * ldh, I);
            }
        });
    const T* bias = c.down_bias ? (const T*)c.down_bias + t.expert * D : nullptr;
    for (long i = 0; i < t.count; i++) {
        const long slot = c.slot_R[t.start + i];
        vf total = load(s.sums + i * VL);
        for (long d = 0; bias && d < D; d += VL) total += load(bias + d, D - d) * load(rows + i * ldx + d, D - d);
        if (slot >= 0) c.dw[slot] = sum(total);
    }
    if (!c.dx) return;
    gemm<Op>(
        t.count, D, I, 1, {(Word*)d_pre, ldh / Op::values, true}, (Word*)s.b, s.c,
        [&](int, Word* b, long k0, long kn, long n0, long nn) { up.inputs(panels_of(b), k0, kn, n0, nn); },
        [&](long n0, long nn, const float* got) {
            for (long i = 0; i < t.count; i++, got += LDC) dx.put(t.start + i, n0, nn, got);
        });
}

template <class T, class Op>
void backward(const Call& c) {
    const std::vector<Wave> all = waves(c);
    const Shared shared(c, all);
    const Ends ends(c);
    const bool later = c.d_pre;
#pragma omp parallel num_threads(c.threads)
    {
        [[maybe_unused]] const typename Op::Session session;
        const Scratch s(c, omp_get_thread_num());
        Call now = c;  // its d_pre [R, I] is where the wave's rows would begin in a whole one
        Combine<T> dx(c, ends, c.dx, shared, false);
        for (const Wave& wave : all) {
            const std::vector<Rows> tasks = pieces(c, wave);
            dx.begin(wave, shared);
            if (!later) now.d_pre = (T*)shared.d_pre - wave.start * width(c);
#pragma omp for schedule(dynamic, 1)
            for (size_t i = 0; i < tasks.size(); i++) backward_rows<T, Op>(now, tasks[i], s, dx);
            if (!later) weight_gradients<T, Op>(now, wave, s);
            dx.end(wave);
        }
    }
}
