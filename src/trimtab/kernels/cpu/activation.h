// Activations on registers: h = f(gate, up), and from dh the gradients of both. Without a gate `up` is not read.
#pragma once
#include "call.h"
#include "simd.h"

struct Shape {  // of CLAMPED
    float alpha, limit, shift;
};
inline Shape shape_of(const Call& c) { return {c.alpha, c.limit, c.shift}; }

struct SwiGLU {
    static constexpr bool gate = true;
    static INLINE vf forward(vf g, vf u, Shape) { return g * sigmoid(g) * u; }
    static INLINE vf backward(vf g, vf u, vf dh, vf* dg, vf* du, Shape) {
        vf s = sigmoid(g), silu = g * s;
        *dg = dh * u * (s + silu * (1.0f - s));
        *du = dh * silu;
        return silu * u;
    }
};

struct Clamped {
    static constexpr bool gate = true;
    static INLINE vf forward(vf g, vf u, Shape p) {
        g = g > p.limit ? splat(p.limit) : g;
        u = u > p.limit ? splat(p.limit) : u < -p.limit ? splat(-p.limit) : u;
        return (u + p.shift) * (g * sigmoid(p.alpha * g));  // as the backward has it
    }
    static INLINE vf backward(vf g, vf u, vf dh, vf* dg, vf* du, Shape p) {
        vi g_cut = g > p.limit, u_cut = (u > p.limit) | (u < -p.limit);  // what was cut has no slope
        g = g_cut ? splat(p.limit) : g;
        u = u > p.limit ? splat(p.limit) : u < -p.limit ? splat(-p.limit) : u;
        vf s = sigmoid(p.alpha * g), gs = g * s;
        *dg = g_cut ? vf{} : dh * (u + p.shift) * s * (1.0f + p.alpha * g * (1.0f - s));
        *du = u_cut ? vf{} : dh * gs;
        return (u + p.shift) * gs;
    }
};

struct ReluSquared {
    static constexpr bool gate = false;
    static INLINE vf forward(vf g, vf, Shape) {
        g = g < 0.0f ? vf{} : g;
        return g * g;
    }
    static INLINE vf backward(vf g, vf, vf dh, vf* dg, vf*, Shape) {
        g = g < 0.0f ? vf{} : g;
        *dg = dh * 2.0f * g;
        return g * g;
    }
};

// The normal distribution's cumulative function, within 1e-7: exp(-x^2 / 2) times a polynomial in 1 / (1 + 0.4 |x|),
// whose coefficients are a least-squares fit over 0..6.
INLINE vf normal_cdf(vf x) {
    constexpr float fit[] = {-0.025366783f, 0.12784580f, -0.21607748f, 0.06337912f,
                             0.12020484f, 0.10266592f, 0.16877233f, 0.15857625f};
    vf a = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.4f * a), p = splat(fit[0]);
    for (int i = 1; i < 8; i++) p = p * t + fit[i];
    vf tail = p * t * vexp(-0.5f * a * a);
    return x < 0.0f ? tail : 1.0f - tail;
}

// gelu and its slope, exact or by tanh.
template <bool Tanh>
INLINE vf gelu(vf x, vf* slope) {
    constexpr float root = 0.7978845608f, cubic = 0.044715f;  // sqrt(2 / pi)
    if (Tanh) {  // (1 + tanh(z)) / 2 = sigmoid(2 z)
        vf s = sigmoid(2.0f * root * (x + cubic * x * x * x));
        *slope = s + x * s * (1.0f - s) * (2.0f * root) * (1.0f + 3.0f * cubic * x * x);
        return x * s;
    }
    vf half = 0.5f * x * x, density = 0.3989422804f * vexp(-half), cdf = normal_cdf(x);
    density = half > 87.0f ? vf{} : density;  // where vexp is cut, x itself may be large enough to bring it back
    *slope = cdf + x * density;
    return x * cdf;
}

template <bool Tanh>
struct Gelu {
    static constexpr bool gate = false;
    static INLINE vf forward(vf g, vf, Shape) {
        vf slope;
        return gelu<Tanh>(g, &slope);
    }
    static INLINE vf backward(vf g, vf, vf dh, vf* dg, vf*, Shape) {
        vf slope, h = gelu<Tanh>(g, &slope);
        *dg = dh * slope;
        return h;
    }
};

template <bool Tanh>
struct GeGLU {
    static constexpr bool gate = true;
    static INLINE vf forward(vf g, vf u, Shape) {
        vf slope;
        return gelu<Tanh>(g, &slope) * u;
    }
    static INLINE vf backward(vf g, vf u, vf dh, vf* dg, vf* du, Shape) {
        vf slope, a = gelu<Tanh>(g, &slope);
        *dg = dh * u * slope;
        *du = dh * a;
        return a * u;
    }
};

// One row's part of n values, from floats to floats; up to a multiple of VL is read and written.
struct Activation {
    bool gate;
    void (*forward)(const float* g, const float* u, long n, float w, Shape, float* h);  // h * w
    // From dh: `d_gate` and `d_up` of dh * w. Adds the lanes of h * dh to `dot`, [VL]. The second gives h * w as well.
    void (*backward[2])(
        const float* g, const float* u, const float* dh, long n, float w, Shape, float* hw, float* d_gate, float* d_up,
        float* dot);
};

template <class A>
void forward_part(const float* g, const float* u, long n, float w, Shape p, float* h) {
    for (long i = 0; i < n; i += VL) store(h + i, A::forward(load(g + i), A::gate ? load(u + i) : vf{}, p) * w);
}

template <class A, bool Hidden>
void backward_part(
    const float* g, const float* u, const float* dh, long n, float w, Shape p, float* hw, float* d_gate, float* d_up,
    float* dot
) {
    vf total = load(dot);
    for (long i = 0; i < n; i += VL) {
        vf d = load(dh + i), dg, du, h = A::backward(load(g + i), A::gate ? load(u + i) : vf{}, d * w, &dg, &du, p);
        total += d * h;
        if (Hidden) store(hw + i, h * w);
        store(d_gate + i, dg);
        if (A::gate) store(d_up + i, du);
    }
    store(dot, total);
}

inline Activation activation(int act) {
#define OF(A) \
    Activation { A::gate, forward_part<A>, {backward_part<A, false>, backward_part<A, true>} }
    switch (act) {
        case SWIGLU: return OF(SwiGLU);
        case GEGLU: return OF(GeGLU<false>);
        case GEGLU_TANH: return OF(GeGLU<true>);
        case CLAMPED: return OF(Clamped);
        case RELU2: return OF(ReluSquared);
        case GELU: return OF(Gelu<false>);
        default: return OF(Gelu<true>);
    }
#undef OF
}
