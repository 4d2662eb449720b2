// From dy: the gradients of the pre-activations, the routing weights and the rows.
//
//     dh = dy[row] down^T, dw = sum(h * dh) (+ bias . dy), d_pre = activation'(pre) (dh * w), dx = the sum of d_pre up^T
#pragma once
#include "forward.h"
#include "wgrad.h"

// d_pre of a row's part of n hidden values in the order of the parameters, in `to` as an operand and in `kept`, if that
// is there.
template <class V, class T>
void keep_gradients(const Call& c, const float* dg, const float* du, long n, V* to, T* kept) {
    const auto lanes = std::make_integer_sequence<int, VL>{};
    for (long i = 0; i < n; i += VL) {
        vf a = load(dg + i), b = load(du + i);
        long at = i, far = c.F, left = n - i, more = gated(c) ? left : 0;
        if (c.interleaved) {
            vf first = zipped<0>(a, b, lanes);
            b = zipped<1>(a, b, lanes);
            a = first;
            at = 2 * i, far = VL, left = 2 * (n - i), more = std::max(0L, left - VL);
        }
        store(to + at, a, left);
        if (kept) store(kept + at, a, left);
        if (more) store(to + at + far, b, more);
        if (kept && more) store(kept + at + far, b, more);
    }
}

// Where rows are kept, as if all were: d_pre [R, I] and h * w [R, F], or null.
template <class T>
struct Kept {
    T *d_pre, *hidden;
};

// Gradients of pre-activations of a piece: left operands of the second product, and what is kept.
template <class T, class W, class Op>
void hidden_gradients(
    const Call& c, Rows t, typename Op::Value* d_pre, const Kept<T>& kept, Scratch s, const Rows* next
) {
    const long D = c.D, F = c.F, I = width(c), K = D + c.rank_down, ldx = Op::pitch(K), ldh = Op::pitch(I + c.rank_up);
    const long step = c.interleaved ? 2 : 1;
    using Word = typename Op::Word;
    auto* rows = (typename Op::Value*)s.x;
    const Activation act = activation(c.act);
    expect_adapters<W>(c, t.expert);
    gather_left<Op>(Gathered<T>{(const T*)c.dy, D, c.row_R + t.start, t.count, 0, D}, rows, ldx);
    append<Op>(c, t, rows, D, c.rank_down, c.scale_down, to_inputs(of_expert<Beside<W>>(c.down_b, t.expert, c.rank_down * D), c.rank_down, D, false), (T*)c.v_down, s);
    memset(s.sums, 0, t.count * VL * sizeof(float));
    gemm<Op>(
        t.count, F, K, {(Word*)rows, ldx / Op::values}, back_of_down<W>(c, t.expert), (Word*)s.b, s.c,
        next ? first_of<Op>(back_of_down<W>(c, next->expert), next->count, K, F)
             : first_of<Op>(back_of_up<W>(c, t.expert), t.count, I, D),
        [&](long m0, long mn, long n0, long nn, const float* dh) {
            float g[NC + VL], u[NC + VL], dg[NC + VL], du[NC + VL], hw[NC + VL];
            for (long i = m0; i < m0 + mn; i++, dh += LDC) {
                const long r = t.start + i;
                const T* pre = (const T*)c.pre + r * I + n0;
                auto* to = d_pre + i * ldh + n0 * step;
                T* beside = kept.d_pre ? kept.d_pre + r * I + n0 * step : nullptr;
                if (i + SOON < t.count) {
                    expect_writes(to + SOON * ldh, step * nn);
                    if (act.gate && step == 1) expect_writes(to + SOON * ldh + F, nn);
                    if (beside) expect_writes(beside + SOON * I, step * nn);
                    if (beside && act.gate && step == 1) expect_writes(beside + SOON * I + F, nn);
                    if (kept.hidden) expect_writes(kept.hidden + (r + SOON) * F + n0, nn);
                    expect(pre + SOON * I, nn);
                    if (act.gate) expect(pre + SOON * I + F, nn);
                }
                widen_row(pre, g, nn);
                if (act.gate) widen_row(pre + F, u, nn);
                const float w = weight_of(c, r);
                act.backward[kept.hidden != nullptr](g, u, dh, nn, w, shape_of(c), hw, dg, du, s.sums + i * VL);
                for (long n = 0; kept.hidden && n < nn; n += VL)
                    store(kept.hidden + r * F + n0 + n, load(hw + n), nn - n);
                keep_gradients(c, dg, du, nn, to, beside);
                Op::end_row(d_pre + i * ldh, I);
            }
        });
    const T* bias = c.down_bias ? (const T*)c.down_bias + t.expert * D : nullptr;
    for (long i = 0; i < t.count; i++) {
        const long slot = c.slot_R[t.start + i];
        vf total = load(s.sums + i * VL);
        for (long d = 0; bias && d < D; d += VL) total += load(bias + d, D - d) * load(rows + i * ldx + d, D - d);
        if (slot >= 0) c.dw[slot] = sum(total);
    }
    append<Op>(c, t, d_pre, I, c.rank_up, c.scale_up, to_inputs(of_expert<Beside<W>>(c.up_b, t.expert, c.rank_up * I), c.rank_up, I, false), (T*)c.v_up, s);
}

template <class T, class W, class Op>
void backward(const Call& c) {
    using Value = typename Op::Value;
    const std::vector<Wave> all = waves(c);
    const Shared shared(c, all);
    by_team<Op>(c, largest(c, all), [&](const Scratch& s) {
        const Combine<T> dx(c, c.dx);
        const long I = width(c), K = I + c.rank_up, ldh = Op::pitch(K);
        const auto kept = [&](const Wave& wave) {
            T* d_pre = c.d_pre ? (T*)c.d_pre : reads_operand(c) ? nullptr : (T*)shared.d_pre - wave.start * I;
            return Kept<T>{d_pre, keeps_hidden(c) ? (T*)shared.hidden - wave.start * c.F : nullptr};
        };
        two_products(
            c, all, (Value*)shared.second, ldh,
            [&](const Wave& wave, Rows t, Value* to, const Rows* next) {
                hidden_gradients<T, W, Op>(c, t, to, kept(wave), s, next);
            },
            [&](Rows t, const Value* from, const Rows* next) {
                const Ahead then = !next ? Ahead()
                    : c.threads == 1 ? first_of<Op>(back_of_down<W>(c, next->expert), next->count, c.D, c.F)
                                     : first_of<Op>(back_of_up<W>(c, next->expert).from(dx.from), next->count, I, dx.wide());
                combined_rows<Op>(c, t, from, K, back_of_up<W>(c, t.expert), (const T*)nullptr, dx, s, then);
            },
            [&](const Wave& wave) {
                if (c.d_pre) return;
                const auto [d_pre, hidden] = kept(wave);
                const T* operand = (T*)shared.second - wave.start * ldh;
                const Operands<T> o = {c, d_pre ? d_pre : operand, d_pre ? I : ldh, hidden};
                weight_gradients<T, Op>(o, wave, s);
            });
        dx.end();
    });
}
