// The gradients of the parameters, from the rows, dy, the pre-activations and their gradients:
//
//     d_up = x[row]^T d_pre, d_down = (h * w)^T dy[row], d_up_bias = sum d_pre, d_down_bias = sum w dy[row]
//
// written over what is there or added to it. A task is a block of one expert's gradient over all its rows.
#pragma once
#include "rows.h"

enum Operand { X, DY, DPRE, H };

template <class T>
struct Operands {
    const Call& c;
    // Of the wave's rows, where they would lie among all: d_pre, `ld` apart; h * w [R, F], or null to compute it again.
    const T* d_pre;
    long ld;
    const T* hidden;
};

// Values [k0 : k0 + kn, n0 : n0 + nn] of one operand of the expert whose rows start at `start`, at `to`.
template <class T, class To>
void bring(const Operands<T>& o, Operand which, long start, long k0, long kn, long n0, long nn, const To& to) {
    const Call& c = o.c;
    const long r0 = start + k0;
    switch (which) {
        case X: return gather((const T*)c.x, c.D, c.row_R + r0, kn, n0, nn, to);
        case DY: return gather((const T*)c.dy, c.D, c.row_R + r0, kn, n0, nn, to);
        case DPRE: return put_block(o.d_pre + r0 * o.ld + n0, o.ld, to, kn, nn);
        case H: {
            if (o.hidden) return put_block(o.hidden + r0 * c.F + n0, c.F, to, kn, nn);
            const Activation act = activation(c.act);
            float g[BROUGHT], u[BROUGHT], h[BROUGHT];
            for (long k = 0; k < kn; k++) {
                const T* pre = (const T*)c.pre + (r0 + k) * width(c) + n0;
                widen_row(pre, g, nn);
                blank(rows_of(g, 0), 0, nn);
                if (act.gate) {
                    widen_row(pre + c.F, u, nn);
                    blank(rows_of(u, 0), 0, nn);
                }
                act.forward(g, u, nn, weight_of(c, r0 + k), shape_of(c), h);
                put_row(h, to, k, nn);
            }
        }
    }
}

struct Block {  // of the gradient of `down` or `up` of one expert: rows p0.., columns q0..
    bool down;
    long expert, p0, pn, q0, qn;
};

template <class Op>
std::vector<Block> blocks(const Call& c, const Wave& wave) {
    std::vector<std::pair<long, long>> order;
    for (long e = wave.first; e < wave.last; e++) order.push_back({c.offsets[e] - c.offsets[e + 1], e});
    std::sort(order.begin(), order.end());
    std::vector<Block> out;
    for (auto [rows, e] : order) {
        for (int down = 0; down < 2; down++) {
            if (!(down ? c.d_down : c.d_up)) continue;
            const long outs = down ? c.D : width(c), ins = down ? c.F : c.D;
            if (rows == 0 && (down ? c.add_down : c.add_up)) continue;
            const long P = c.transposed ? ins : outs, Q = c.transposed ? outs : ins;
            const auto [most_p, most_q] = most_of_block(Op(), c, wave, -rows);
            for (long q = 0; q < Q; q += most_q)
                for (long p = 0, n = (P + most_p - 1) / most_p; p < n; p++)
                    out.push_back({down != 0, e, p * P / n, (p + 1) * P / n - p * P / n, q, std::min(most_q, Q - q)});
        }
    }
    return out;
}

// Sums whose rows are `from` apart, to where they belong.
template <class G>
void put(const float* got, long from, long pn, long qn, G* to, long ld, bool add) {
    for (long p = 0; p < pn; p++, got += from, to += ld) {
        long q = 0;
        if (!add && (uintptr_t)to % 64 == 0)
            for (; q + 2 * VL <= qn; q += 2 * VL) stream(to + q, load(got + q), load(got + q + VL));
        for (; q < qn; q += VL) {
            vf v = load(got + q);
            store(to + q, add ? load(to + q, qn - q) + v : v, qn - q);
        }
    }
}

// What a block is made of and where it goes.
struct Gradient {
    long start, rows, Q;  // of the expert; columns of its gradient
    Operand left, right;
    bool add, wide;
    void* to;
    Gradient(const Call& c, const Block& t) {
        start = c.offsets[t.expert], rows = c.offsets[t.expert + 1] - start;
        const long outs = t.down ? c.D : width(c), ins = t.down ? c.F : c.D;
        Q = c.transposed ? outs : ins;
        const Operand of_outs = t.down ? DY : DPRE, of_ins = t.down ? H : X;
        left = c.transposed ? of_ins : of_outs, right = c.transposed ? of_outs : of_ins;
        add = t.down ? c.add_down : c.add_up, wide = (t.down ? c.type_down : c.type_up) == FLOAT;
        const long at = t.expert * outs * ins + t.p0 * Q + t.q0;
        void* all = t.down ? c.d_down : c.d_up;
        to = wide ? (void*)((float*)all + at) : (void*)((bf16*)all + at);
    }
    void* at(long p, long q) const {
        return wide ? (void*)((float*)to + p * Q + q) : (void*)((bf16*)to + p * Q + q);
    }
    // Whether sums can go straight from registers to where they belong: whole ones, from a boundary on.
    bool direct(long qn) const { return qn % NR == 0 && ((uintptr_t)to | Q * (wide ? 4 : 2)) % 64 == 0; }
    End end() const {
        if (add) return wide ? ADD : ADD_NARROW;
        return wide ? PAST : PAST_NARROW;
    }
    void put(const float* got, long from, long p, long pn, long q, long qn) const {
        if (wide) ::put(got, from, pn, qn, (float*)at(p, q), Q, add);
        else ::put(got, from, pn, qn, (bf16*)at(p, q), Q, add);
    }
};

// Rows and columns of a block.
inline std::pair<long, long> most_of_block(Floats, const Call&, const Wave&, long) { return {PIECES * PC, QC}; }

template <class T>
void one_block(Floats, const Operands<T>& o, Block t, Scratch s) {
    const Gradient g(o.c, t);
    const bool direct = g.direct(t.qn);
    const long parts = (t.pn + PC - 1) / PC;
    long k0 = 0;
    do {
        const long kn = std::min(RC, g.rows - k0);
        const bool last = k0 + RC >= g.rows;
        const Place panels = panels_of(s.b);
        bring(o, g.right, g.start, k0, kn, t.q0, t.qn, panels);
        for (long part = 0; part < parts; part++) {
            const long p = part * t.pn / parts, pn = (part + 1) * t.pn / parts - p;
            float* sums = s.c + p * LDC;
            void* to = g.at(p, 0);
            Sums way = {k0 > 0 ? sums : nullptr, LDC, sums, LDC, NEAR};
            if (direct && last) way = {way.from, LDC, to, g.Q, g.end()};
            bring(o, g.left, g.start, k0, kn, t.p0 + p, pn, Tiles(s.x, pn));
            multiply(Floats(), pn, t.qn, 0, kn, {s.x, VL, false}, panels.p, way);
            if (last && !direct) g.put(sums, LDC, p, pn, 0, t.qn);
        }
        k0 += RC;
    } while (k0 < g.rows);
}

// Column sums of one expert's operand, each row weighted if `weighted`.
template <class T>
void bias_sum(const Operands<T>& o, Operand which, long e, long wide, bool weighted, float* to, Scratch s) {
    const Call& c = o.c;
    const long start = c.offsets[e], rows = c.offsets[e + 1] - start;
    for (long n0 = 0; n0 < wide; n0 += QC) {
        const long nn = std::min(QC, wide - n0);
        memset(s.c, 0, QC * sizeof(float));
        for (long k0 = 0; k0 < rows; k0 += RC) {
            const long kn = std::min(RC, rows - k0);
            bring(o, which, start, k0, kn, n0, nn, rows_of(s.x, LDC));
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
void weight_gradients(const Operands<T>& o, const Wave& wave, Scratch s) {
    const Call& c = o.c;
    const std::vector<Block> tasks = blocks<Op>(c, wave);
#pragma omp for schedule(dynamic, 1) nowait
    for (size_t i = 0; i < tasks.size(); i++) one_block(Op(), o, tasks[i], s);
#pragma omp for schedule(dynamic, 1) nowait
    for (long e = wave.first; e < wave.last; e++) {
        if (c.d_up_bias) bias_sum(o, DPRE, e, width(c), false, (float*)c.d_up_bias, s);
        if (c.d_down_bias) bias_sum(o, DY, e, c.D, true, (float*)c.d_down_bias, s);
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
