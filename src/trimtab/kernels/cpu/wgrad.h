// The gradients of the parameters, from the rows, dy, the pre-activations and their gradients:
//
//     d_up = x[row]^T d_pre, d_down = (h * w)^T dy[row], d_up_bias = sum d_pre, d_down_bias = sum w dy[row]
//
// written over what is there or added to it. A task is a block of one expert's gradient over all its rows.
#pragma once
#include "rows.h"

enum Operand { X, DY, DPRE, H };

// Values [k0 : k0 + kn, n0 : n0 + nn] of one operand of the expert whose rows start at `start`, at `to`.
template <class T, class To>
void bring(const Call& c, Operand which, long start, long k0, long kn, long n0, long nn, const To& to) {
    const long r0 = start + k0, I = width(c);
    switch (which) {
        case X: return gather((const T*)c.x, c.D, c.row_R + r0, kn, n0, nn, to);
        case DY: return gather((const T*)c.dy, c.D, c.row_R + r0, kn, n0, nn, to);
        case DPRE:
            for (long k = 0; k < kn; k++) put_row((const T*)c.d_pre + (r0 + k) * I + n0, to, k, nn);
            return;
        case H: {
            const Activation act = activation(c.act);
            float g[BROUGHT], u[BROUGHT], h[BROUGHT];
            for (long k = 0; k < kn; k++) {
                const T* pre = (const T*)c.pre + (r0 + k) * I + n0;
                widen_row(pre, g, nn);
                blank(rows_of(g, 0), 0, nn);
                if (act.gate) {
                    widen_row(pre + c.F, u, nn);
                    blank(rows_of(u, 0), 0, nn);
                }
                act.forward(g, u, nn, weight_of(c, r0 + k), {c.alpha, c.limit}, h);
                put_row(h, to, k, nn);
            }
        }
    }
}

struct Block {  // of the gradient of `down` or `up` of one expert: rows p0.., columns q0..
    bool down;
    long expert, p0, pn, q0, qn;
};

inline std::vector<Block> blocks(const Call& c, const Wave& wave) {
    std::vector<std::pair<long, long>> order;
    for (long e = wave.first; e < wave.last; e++) order.push_back({c.offsets[e] - c.offsets[e + 1], e});
    std::sort(order.begin(), order.end());
    std::vector<Block> out;
    for (auto [rows, e] : order) {
        for (int down = 0; down < 2; down++) {
            if (!(down ? c.d_down : c.d_up)) continue;
            const long outs = down ? c.D : width(c), ins = down ? c.F : c.D;
            const long P = c.transposed ? ins : outs, Q = c.transposed ? outs : ins;
            for (long q = 0; q < Q; q += QC)
                for (long p = 0, n = (P + PIECES * PC - 1) / (PIECES * PC); p < n; p++)
                    out.push_back({down != 0, e, p * P / n, (p + 1) * P / n - p * P / n, q, std::min(QC, Q - q)});
        }
    }
    return out;
}

template <class G>
void put(const float* got, long pn, long qn, G* to, long ld, bool add) {
    for (long p = 0; p < pn; p++, got += LDC, to += ld) {
        long q = 0;
        if (!add && (uintptr_t)to % 64 == 0)
            for (; q + 2 * VL <= qn; q += 2 * VL) stream(to + q, load(got + q), load(got + q + VL));
        for (; q < qn; q += VL) {
            vf v = load(got + q);
            store(to + q, add ? load(to + q, qn - q) + v : v, qn - q);
        }
    }
}

// The left operand of a gradient, whose k are rows of memory: at `to`, by way of `beside`.
template <class T>
Left<float> bring_left(
    const Call& c, Operand which, long start, long k0, long kn, long n0, long nn, float* to, float*
) {
    bring<T>(c, which, start, k0, kn, n0, nn, Tiles(to, nn));
    return {to, VL, false};
}
#if defined(HAVE_DOT) || defined(HAVE_AMX)
template <class T>
Left<uint32_t> bring_left(
    const Call& c, Operand which, long start, long k0, long kn, long n0, long nn, uint32_t* to, uint32_t* beside
) {
    constexpr long ld = pitch(KC), wide = up_to(PC, NR);
    static_assert(up_to(PC, VL) * ld <= Tiles::floats && TILE * wide <= MC * VL);
    const PairPlace pairs = {beside, wide, NR};
    for (long k = 0; k < kn; k += 2 * TILE) {
        const long n = std::min(2 * TILE, kn - k);
        bring<T>(c, which, start, k0 + k, n, n0, nn, pairs);
        end_block(pairs, n, nn);
        turn(beside, wide, to + k / 2, ld, nn);
    }
    return {to, ld, true};
}
#endif

template <class T, class Op>
void one_block(const Call& c, Block t, Scratch s) {
    using Word = typename Op::Word;
    constexpr long depth = KC * Op::values;
    const long start = c.offsets[t.expert], rows = c.offsets[t.expert + 1] - start;
    const long outs = t.down ? c.D : width(c), ins = t.down ? c.F : c.D, Q = c.transposed ? outs : ins;
    const Operand of_outs = t.down ? DY : DPRE, of_ins = t.down ? H : X;
    const Operand left = c.transposed ? of_ins : of_outs, right = c.transposed ? of_outs : of_ins;
    const long at = t.expert * outs * ins + t.p0 * Q + t.q0;
    const bool add = t.down ? c.add_down : c.add_up, wide = (t.down ? c.type_down : c.type_up) == FLOAT;
    void* grad = t.down ? c.d_down : c.d_up;
    float* to = (float*)grad + at;
    // Sums go straight from registers to where they belong, if they are whole registers and come once.
    const bool direct = wide && t.qn % NR == 0 && ((uintptr_t)to | Q * 4) % 64 == 0 && (!add || rows <= depth);
    const long parts = (t.pn + PC - 1) / PC;
    long k0 = 0;
    do {
        const long kn = std::min(depth, rows - k0), words = (kn + Op::values - 1) / Op::values;
        const bool last = k0 + depth >= rows;
        const auto panels = panels_of((Word*)s.b);
        bring<T>(c, right, start, k0, kn, t.q0, t.qn, panels);
        end_block(panels, kn, t.qn);
        for (long part = 0; part < parts; part++) {
            const long p = part * t.pn / parts, pn = (part + 1) * t.pn / parts - p;
            float* sums = s.c + p * LDC;
            Sums way = {k0 > 0 ? sums : nullptr, LDC, sums, LDC, false};
            if (direct && last) way = {add ? to + p * Q : way.from, add ? Q : LDC, to + p * Q, Q, !add};
            const auto a = bring_left<T>(c, left, start, k0, kn, t.p0 + p, pn, (Word*)s.x, (Word*)s.h);
            multiply(Op(), pn, t.qn, 0, words, a, panels.p, way);
            if (!last || direct) continue;
            if (wide) put(sums, pn, t.qn, to + p * Q, Q, add);
            else put(sums, pn, t.qn, (bf16*)grad + at + p * Q, Q, add);
        }
        k0 += depth;
    } while (k0 < rows);
}

// Column sums of one expert's operand, each row weighted if `weighted`; `part` [width] is the thread's.
template <class T>
void bias_sum(const Call& c, Operand which, long e, long wide, bool weighted, float* to, Scratch s) {
    const long start = c.offsets[e], rows = c.offsets[e + 1] - start;
    for (long n0 = 0; n0 < wide; n0 += QC) {
        const long nn = std::min(QC, wide - n0);
        memset(s.c, 0, QC * sizeof(float));
        for (long k0 = 0; k0 < rows; k0 += KC) {
            const long kn = std::min(KC, rows - k0);
            bring<T>(c, which, start, k0, kn, n0, nn, rows_of(s.x, LDC));
            for (long k = 0; k < kn; k++) {
                const float w = weighted ? weight_of(c, start + k0 + k) : 1.0f;
                for (long n = 0; n < nn; n += VL) store(s.c + n, load(s.c + n) + w * load(s.x + k * LDC + n));
            }
        }
        memcpy(to + e * wide + n0, s.c, nn * sizeof(float));
    }
}

// Called by every thread, none waits.
template <class T, class Op>
void weight_gradients(const Call& c, const Wave& wave, Scratch s) {
    const std::vector<Block> tasks = blocks(c, wave);
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < tasks.size(); i++) one_block<T, Op>(c, tasks[i], s);
#pragma omp for schedule(dynamic, 1) nowait
    for (long e = wave.first; e < wave.last; e++) {
        if (c.d_up_bias) bias_sum<T>(c, DPRE, e, width(c), false, (float*)c.d_up_bias, s);
        if (c.d_down_bias) bias_sum<T>(c, DY, e, c.D, true, (float*)c.d_down_bias, s);
    }
}

template <class T, class Op>
void weight_gradients(const Call& c) {
#pragma omp parallel num_threads(c.threads)
    {
        [[maybe_unused]] const typename Op::Session session;
        weight_gradients<T, Op>(c, {0, c.E, 0, c.R}, Scratch(c, omp_get_thread_num()));
    }
}
