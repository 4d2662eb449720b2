// What gradients of parameters are made of, in blocks, and where they go.
#pragma once
#include "rows.h"

enum Operand { X, DY, DPRE, H, U_UP, V_UP, U_DOWN, V_DOWN };

template <class T>
struct Operands {
    const Call& c;
    // Of the wave's rows, where they would lie among all: d_pre, `ld` apart; h * w [R, F], or null to compute it again.
    const T* d_pre;
    long ld;
    const T* hidden;
};

template <class Op, class T>
void bring_thin(const T* all, long r, long r0, long kn, long n0, long nn, const Panels<typename Op::Word>& to) {
    bring_block<Op>(all + r0 * r + n0, r, kn, nn, to);
}

// Values [k0 : k0 + kn, n0 : n0 + nn] of one operand of the expert whose rows start at `start`, at `to`.
template <class Op, class T>
void bring(
    const Operands<T>& o, Operand which, long start, long k0, long kn, long n0, long nn,
    const Panels<typename Op::Word>& to
) {
    const Call& c = o.c;
    const long r0 = start + k0;
    switch (which) {
        case X: return gather<Op>(Gathered<T>{(const T*)c.x, c.D, c.row_R + r0, kn, n0, nn}, to);
        case DY: return gather<Op>(Gathered<T>{(const T*)c.dy, c.D, c.row_R + r0, kn, n0, nn}, to);
        case U_UP: return bring_thin<Op>((const T*)c.u_up, c.rank_up, r0, kn, n0, nn, to);
        case V_UP: return bring_thin<Op>((const T*)c.v_up, c.rank_up, r0, kn, n0, nn, to);
        case U_DOWN: return bring_thin<Op>((const T*)c.u_down, c.rank_down, r0, kn, n0, nn, to);
        case V_DOWN: return bring_thin<Op>((const T*)c.v_down, c.rank_down, r0, kn, n0, nn, to);
        case DPRE: return bring_block<Op>(o.d_pre + r0 * o.ld + n0, o.ld, kn, nn, to);
        case H: {
            if (o.hidden) return bring_block<Op>(o.hidden + r0 * c.F + n0, c.F, kn, nn, to);
            const Activation act = activation(c.act);
            float g[NC + VL], u[NC + VL], h[2][NC + VL];
            const auto row = [&](long k) {
                const T* pre = (const T*)c.pre + (r0 + k) * width(c) + n0;
                widen_row(pre, g, nn);
                if (act.gate) widen_row(pre + c.F, u, nn);
                act.forward(g, u, nn, weight_of(c, r0 + k), shape_of(c), h[k % 2]);
                return (const float*)h[k % 2];
            };
            bring_rows<Op, float>(row, [](long) {}, kn, nn, to);
        }
    }
}

// One parameter's gradient, of all experts: [outs, ins] each; made turned, and put as it is made or turned back.
struct Kind {
    void* to;
    long outs, ins;
    Operand of_outs, of_ins;
    bool transposed, add, wide, back = false;
    long P() const { return transposed ? ins : outs; }
    long Q() const { return transposed ? outs : ins; }
};
constexpr int KINDS = 6;
inline Kind kind(const Call& c, int which) {
    const long I = width(c), D = c.D, F = c.F, up = c.rank_up, down = c.rank_down;
    const bool turned = c.transposed != 0;
    switch (which) {
        case 0: return {c.d_up, I, D, DPRE, X, turned, c.add_up != 0, c.type_up == FLOAT};
        case 1: return {c.d_down, D, F, DY, H, turned, c.add_down != 0, c.type_down == FLOAT};
        case 2: return {c.d_up_a, up, D, V_UP, X, false, false, true};
        case 3: return {c.d_up_b, I, up, DPRE, U_UP, true, false, true, true};  // the thin operand is turned
        case 4: return {c.d_down_a, down, F, V_DOWN, H, false, false, true};
        default: return {c.d_down_b, D, down, DY, U_DOWN, true, false, true, true};
    }
}

struct Block {  // of the gradient of a kind of one expert: rows p0.., columns q0..
    int which;
    long expert, p0, pn, q0, qn;
};

// Large where there are enough of them for all threads.
template <class Op>
std::vector<Block> blocks(const Call& c, const Wave& wave) {
    std::vector<std::pair<long, long>> order;
    for (long e = wave.first; e < wave.last; e++) order.push_back({c.offsets[e] - c.offsets[e + 1], e});
    std::sort(order.begin(), order.end());
    const bool few = wave.last - wave.first < 2 * c.threads && c.threads > 1;
    std::vector<Block> out;
    for (auto [rows, e] : order) {
        const bool several = -rows > ROWS<Op>;
        const long most_p = few ? NC : several ? HIGHEST : std::max(HIGHEST, Op::columns);
        const long most_q = few ? NC : several ? Op::block : Op::columns;
        for (int which = 0; which < KINDS; which++) {
            const Kind g = kind(c, which);
            if (!g.to || (rows == 0 && g.add)) continue;
            const long P = g.P(), Q = g.Q();
            for (long q = 0; q < Q; q += most_q)
                for (long p = 0, n = (P + most_p - 1) / most_p; p < n; p++)
                    out.push_back({which, e, p * P / n, (p + 1) * P / n - p * P / n, q, std::min(most_q, Q - q)});
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

// Sums [pn, qn] whose rows are `from` apart, turned: to `to`, whose rows are `ld` apart.
inline void put_turned(const float* got, long from, long pn, long qn, float* to, long ld) {
    for (long p = 0; p < pn; p += VL) {
        for (long q = 0; q < qn; q += VL) {
            vf r[VL];
            UNROLL for (int i = 0; i < VL; i++) r[i] = load(got + std::min(p + i, pn - 1) * from + q);
            transpose(r);
            for (long i = 0; i < std::min<long>(VL, qn - q); i++) store(to + (q + i) * ld + p, r[i], pn - p);
        }
    }
}

// What a block is made of and where it goes.
struct Gradient {
    long start, rows, Q;  // of the expert; columns of its gradient
    Operand left, right;
    bool add, wide, back;
    void* to;
    Gradient(const Call& c, const Block& t) {
        start = c.offsets[t.expert], rows = c.offsets[t.expert + 1] - start;
        const Kind g = kind(c, t.which);
        Q = g.back ? g.P() : g.Q(), add = g.add, wide = g.wide, back = g.back;
        left = g.transposed ? g.of_ins : g.of_outs, right = g.transposed ? g.of_outs : g.of_ins;
        const long at = t.expert * g.outs * g.ins + (back ? t.q0 * Q + t.p0 : t.p0 * Q + t.q0);
        to = wide ? (void*)((float*)g.to + at) : (void*)((bf16*)g.to + at);
    }
    void* at(long p, long q) const {
        return wide ? (void*)((float*)to + p * Q + q) : (void*)((bf16*)to + p * Q + q);
    }
    // Whether sums can go straight from registers to where they belong: whole ones, from a boundary on.
    bool direct(long qn) const { return !back && qn % NR == 0 && ((uintptr_t)to | Q * (wide ? 4 : 2)) % 64 == 0; }
    End end() const {
        if (add) return wide ? ADD : ADD_NARROW;
        return wide ? PAST : PAST_NARROW;
    }
    void put(const float* got, long from, long p, long pn, long q, long qn) const {
        if (back) put_turned(got, from, pn, qn, (float*)to + q * Q + p, Q);
        else if (wide) ::put(got, from, pn, qn, (float*)at(p, q), Q, add);
        else ::put(got, from, pn, qn, (bf16*)at(p, q), Q, add);
    }
};

// Columns p0 : p0 + pn of an operand as rows of words at `to`, `ld` apart, by way of `beside`.
template <class Op, class T>
void bring_turned(
    const Operands<T>& o, Operand which, long start, long k0, long kn, long p0, long pn, typename Op::Word* to, long ld,
    typename Op::Word* beside
) {
    constexpr long step = VL * Op::values;
    for (long k = 0; k < kn; k += step) {
        bring<Op>(o, which, start, k0 + k, std::min(step, kn - k), p0, pn, {beside, HIGH, NR});
        turn(beside, HIGH, to + k / Op::values, ld, pn);
    }
}
