// What lies between the two products of experts whose products are made elsewhere, in one pass over memory:
//
//     h = activation(pre) * w                                                          forward
//     h = activation(pre) * w over dh, dw = sum(activation * dh), d_pre                backward
//
// Rows of float, gate and up as halves of a row of `pre`. A row's bits depend on that row alone.
#pragma once
#include "activation.h"
#include "control.h"

struct Between {  // mirrored by trimtab.kernels.abi, field by field
    int32_t act, threads;
    int64_t R, F;
    const float *pre, *w;     // [R, I], [R] or null for 1
    float *h, *d_pre, *dw;    // [R, F], in the backward dh before; [R, I]; [R]
};

// A row's whole registers where they lie, then what is left, in registers filled up with zeros.
template <class Part>
INLINE void by_parts(long n, const Part& part) {
    const long whole = n / VL * VL;
    part(0, whole, false);
    if (whole < n) part(whole, n - whole, true);
}

// run(row, gate, up, weight) for each row; gate and up are one without a gate.
template <class Run>
void by_rows(const Between& c, long I, const Run& run) {
    const unsigned word = control_word();
#pragma omp parallel num_threads(c.threads)
    {
        const Controlled controlled(word);
#pragma omp for schedule(static) nowait
        for (int64_t r = 0; r < c.R; r++) {
            const float* g = c.pre + r * I;
            run(r, g, g + I - c.F, c.w ? c.w[r] : 1.0f);
        }
    }
}

inline void between_forward(const Between& c) {
    const Activation act = activation(c.act);
    by_rows(c, act.gate ? 2 * c.F : c.F, [&](int64_t r, const float* g, const float* u, float w) {
        float* h = c.h + r * c.F;
        by_parts(c.F, [&](long at, long n, bool end) {
            if (!end) return act.forward(g, u, n, w, {}, h);
            float ends[3][VL];
            store(ends[0], load(g + at, n));
            store(ends[1], load(u + at, n));
            act.forward(ends[0], ends[1], n, w, {}, ends[2]);
            store(h + at, load(ends[2]), n);
        });
    });
}

inline void between_backward(const Between& c) {
    const Activation act = activation(c.act);
    const long F = c.F, I = act.gate ? 2 * F : F;
    by_rows(c, I, [&](int64_t r, const float* g, const float* u, float w) {
        float *h = c.h + r * F, *dg = c.d_pre + r * I, *du = dg + I - F, dot[VL] = {};
        by_parts(F, [&](long at, long n, bool end) {
            if (!end) return act.both(g, u, h, n, w, {}, h, dg, du, dot);
            float ends[5][VL];
            store(ends[0], load(g + at, n));
            store(ends[1], load(u + at, n));
            store(ends[2], load(h + at, n));
            act.both(ends[0], ends[1], ends[2], n, w, {}, ends[2], ends[3], ends[4], dot);
            store(h + at, load(ends[2]), n);
            store(dg + at, load(ends[3]), n);
            if (act.gate) store(du + at, load(ends[4]), n);
        });
        if (c.dw) c.dw[r] = sum(load(dot));
    });
}
