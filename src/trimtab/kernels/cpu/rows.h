// The parts that forward and backward share: tasks over threads, operands by where they come from, the combine.
#pragma once
#include <vector>

#include "activation.h"
#include "call.h"
#include "load.h"

struct Rows {  // expert rows of one expert that one thread takes
    long expert, start, count;
};

// Every expert's rows in pieces, the largest first; few rows stay together, since each piece reads its expert's weights.
inline std::vector<Rows> pieces(const Call& c) {
    const long all = c.offsets[c.E], share = std::max(112L, all / (2 * c.threads));
    const long most = std::min({MC, share, std::max(56L, (1L << 20) / width(c))});
    std::vector<Rows> out;
    for (long e = 0; e < c.E; e++) {
        const long start = c.offsets[e], rows = c.offsets[e + 1] - start, n = (rows + most - 1) / most;
        for (long i = 0; i < n; i++) out.push_back({e, start + i * rows / n, (i + 1) * rows / n - i * rows / n});
    }
    std::stable_sort(out.begin(), out.end(), [](const Rows& a, const Rows& b) { return a.count > b.count; });
    return out;
}

// A thread's memory.
struct Scratch {
    float *b, *c, *x, *h, *sums;
    static constexpr long sums_of = std::max(MC, PIECES * PC) * LDC;
    static long rows(const Call& c) { return up_to(std::max({MC * (c.D + VL), KC * LDC, Tiles::floats}), VL); }
    static long floats(const Call& c) {
        return KC * QC + sums_of + MC * VL + rows(c) + MC * (width(c) + VL);
    }
    Scratch(const Call& call, int thread) {
        b = call.scratch + thread * up_to(floats(call), 16);
        c = b + KC * QC;
        sums = c + sums_of;
        x = sums + MC * VL;
        h = x + rows(call);
    }
};

// [K, N] operands taken from the parameters of one expert: N the outputs of the layer, or with `back` its inputs.
template <class T>
struct Weight {
    const T* w;
    long in, out;
    bool transposed;  // [in, out], else [out, in]
    // Outputs may be every second one from `first` on.
    void outputs(float* b, long k0, long kn, long n0, long nn, long first, int step) const {
        if (transposed) load_straight(w + k0 * out + first + n0 * step, out, step, panels_of(b), kn, nn);
        else load_transposed(w + (first + n0 * step) * in + k0, in * step, panels_of(b), kn, nn);
    }
    void inputs(float* b, long k0, long kn, long n0, long nn) const {
        if (transposed) load_transposed(w + n0 * out + k0, out, panels_of(b), kn, nn);
        else load_straight(w + k0 * in + n0, in, 1, panels_of(b), kn, nn);
    }
};

template <class T>
Weight<T> up_of(const Call& c, long e) {
    return {(const T*)c.up + e * width(c) * c.D, c.D, width(c), c.transposed != 0};
}
template <class T>
Weight<T> down_of(const Call& c, long e) {
    return {(const T*)c.down + e * c.D * c.F, c.F, c.D, c.transposed != 0};
}

inline float weight_of(const Call& c, long r) { return c.slot_R[r] < 0 ? 0.0f : c.w[c.slot_R[r]]; }

// The sum of each row's expert rows in the order of k, each weighted if `weighted`. Shared out over the threads.
template <class T>
void combine(const Call& c, const T* rows, T* to, bool weighted) {
#pragma omp for schedule(static)
    for (long m = 0; m < c.M; m++) {
        const int64_t *at = c.bag_index + c.bag_offsets[m], *end = c.bag_index + c.bag_offsets[m + 1];
        for (long d = 0; d < c.D; d += VL) {
            vf total = {};
            for (const int64_t* r = at; r < end; r++) {
                vf row = load(rows + *r * c.D + d, c.D - d);
                total += weighted ? row * weight_of(c, *r) : row;
            }
            store(to + m * c.D + d, total, c.D - d);
        }
    }
}
