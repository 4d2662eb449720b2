// The parts that forward and backward share: tasks over threads, operands by where they come from, the combine.
#pragma once
#include <omp.h>

#include <vector>

#include "activation.h"
#include "amx.h"
#include "call.h"
#include "load.h"

struct Rows {  // expert rows of one expert that one thread takes
    long expert, start, count;
};

// Experts that are worked on together, and their rows. What lies between two products of a wave lives as long as it.
struct Wave {
    long first, last, start, end;
};

// Waves of about as many rows: few, so that they stay near and cost little memory, but enough for all threads to share.
inline std::vector<Wave> waves(const Call& c) {
    const long n = c.threads == 1 ? std::clamp(c.R / 512, 1L, 16L) : std::clamp(c.R / (2048 * c.threads), 1L, 2L);
    std::vector<Wave> out = {{0, 0, 0, 0}};
    for (long e = 0; e < c.E; e++) {
        if (out.back().end * n >= (long)out.size() * c.R) out.push_back({e, e, c.offsets[e], c.offsets[e]});
        out.back().last = e + 1;
        out.back().end = c.offsets[e + 1];
    }
    return out;
}

inline long wave_rows(const std::vector<Wave>& waves) {
    long most = 0;
    for (const Wave& wave : waves) most = std::max(most, wave.end - wave.start);
    return most;
}

// A wave's rows in pieces; few rows stay together, since each piece reads its expert's weights. Of several threads the
// largest come first, of one they come in order.
inline std::vector<Rows> pieces(const Call& c, const Wave& w) {
    const long share = c.threads == 1 ? MC : std::max(112L, (w.end - w.start) / (2 * c.threads));
    const long most = std::min({MC, share, std::max(56L, (1L << 21) / width(c))});
    std::vector<Rows> out;
    for (long e = w.first; e < w.last; e++) {
        const long start = c.offsets[e], rows = c.offsets[e + 1] - start, n = (rows + most - 1) / most;
        for (long i = 0; i < n; i++) out.push_back({e, start + i * rows / n, (i + 1) * rows / n - i * rows / n});
    }
    if (c.threads > 1)
        std::stable_sort(out.begin(), out.end(), [](const Rows& a, const Rows& b) { return a.count > b.count; });
    return out;
}

// A thread's memory.
struct Scratch {
    float *b, *c, *x, *h, *sums;
    static constexpr long sums_of = std::max(MC, PIECES * PC) * LDC;
    static long left(long n) { return MC * std::max(n + VL, up_to(n, 2 * VL) / 2 + VL); }  // rows of floats, of pairs
    static long rows(const Call& c) { return up_to(std::max({left(c.D), KC * LDC, Tiles::floats}), VL); }
    static long floats(const Call& c) { return KC * QC + sums_of + MC * VL + rows(c) + left(width(c)); }
    static long each(const Call& c) { return up_to(floats(c), 16); }
    Scratch(const Call& call, int thread) {
        b = call.scratch + thread * each(call);
        c = b + KC * QC;
        sums = c + sums_of;
        x = sums + MC * VL;
        h = x + rows(call);
    }
};

// What the threads share: a wave's rows before they are combined, gradients of pre-activations, and sums by token.
struct Shared {
    float *rows, *d_pre, *sums, *end;  // a thread that is alone needs no rows
    Shared(const Call& c, const std::vector<Wave>& waves) {
        const long most = wave_rows(waves), size = c.type == FLOAT ? 4 : 2;
        rows = c.scratch + c.threads * Scratch::each(c);
        d_pre = rows + (c.threads > 1 && (c.y || c.dx) ? up_to(most * c.D, 16) : 0);
        sums = d_pre + (c.dy && !c.d_pre ? up_to(most * width(c) * size / 4 + 1, 16) : 0);
        end = sums + ((c.y || c.dx) && c.type != FLOAT ? c.M * c.D : 0);
    }
};

// [K, N] operands taken from the parameters of one expert: from inputs to `outputs` of the layer, or back to `inputs`.
template <class T>
struct Weight {
    const T* w;
    long in, out;
    bool transposed;  // [in, out], else [out, in]
    // Outputs may be every second one from `first` on.
    template <class To>
    void outputs(const To& to, long k0, long kn, long n0, long nn, long first, int step) const {
        if (transposed) load_straight(w + k0 * out + first + n0 * step, out, step, to, kn, nn);
        else load_transposed(w + (first + n0 * step) * in + k0, in * step, to, kn, nn);
        end_block(to, kn, nn);
    }
    template <class To>
    void inputs(const To& to, long k0, long kn, long n0, long nn) const {
        if (transposed) load_transposed(w + n0 * out + k0, out, to, kn, nn);
        else load_straight(w + k0 * in + n0, in, 1, to, kn, nn);
        end_block(to, kn, nn);
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

// Which expert rows are the first and the last of their token.
struct Ends {
    std::vector<uint8_t> first, last;
    std::vector<long> none;  // tokens without any
    explicit Ends(const Call& c) : first(c.R, 0), last(c.R, 0) {
        std::vector<long> seen(c.M, -1);
        for (long r = 0; r < c.offsets[c.E]; r++) {
            if (c.row_R[r] < 0) continue;
            long& before = seen[c.row_R[r]];
            if (before < 0) first[r] = 1;
            before = r;
        }
        for (long m = 0; m < c.M; m++) {
            if (seen[m] < 0) none.push_back(m);
            else last[seen[m]] = 1;
        }
    }
};

// Each token's sum over its expert rows, in the order of the experts, if `to` is there. A thread that is alone adds a
// row where its product ends; of several each has columns of its own, and all add when the wave's rows are there.
template <class T>
struct Combine {
    const Call& c;
    const Ends& ends;
    T* to;
    float *sums, *rows;  // while they grow, `to` itself if that is float; [R, D] of which the wave's are there
    const bool weighted, alone;
    long from, until;
    Combine(const Call& c, const Ends& ends, void* to, const Shared& shared, bool weighted)
        : c(c), ends(ends), to((T*)to), weighted(weighted), alone(c.threads == 1) {
        const long D = to ? c.D : 0, blocks = (D + VL - 1) / VL, n = omp_get_num_threads(), i = omp_get_thread_num();
        sums = sizeof(T) == sizeof(float) ? (float*)to : shared.sums;
        from = std::min<long>(D, i * blocks / n * VL);
        until = std::min<long>(D, (i + 1) * blocks / n * VL);
        for (long m : ends.none) memset(this->to + m * c.D + from, 0, (until - from) * sizeof(T));
    }
    void begin(const Wave& wave, const Shared& shared) { rows = shared.rows - wave.start * c.D; }

    // Columns d0 : d0 + n of a row's product.
    INLINE void put(long r, long d0, long n, const float* got) const {
        if (alone) return add(r, d0, d0 + n, got);
        for (long i = 0; i < n; i += VL) store(rows + r * c.D + d0 + i, load(got + i), n - i);
    }
    INLINE void add(long r, long first, long last, const float* row) const {
        if (c.row_R[r] < 0) return;
        const long at = c.row_R[r] * c.D, next = c.row_R[std::min(r + 1, c.R - 1)] * c.D;  // a prefetch reads nothing
        const float w = weighted ? weight_of(c, r) : 1.0f;
        const bool begins = ends.first[r], ends_here = ends.last[r];
        for (long d = first; d < last; d += VL) {
            __builtin_prefetch(sums + next + d, 1);
            vf v = w * load(row + d - first, last - d);
            if (!begins) v += load(sums + at + d, last - d);
            if (ends_here) store(to + at + d, v, last - d);
            else store(sums + at + d, v, last - d);
        }
    }
    void end(const Wave& wave) const {
        if (alone) return;
#pragma omp barrier
        for (long r = wave.start; r < wave.end; r++) add(r, from, until, rows + r * c.D + from);
#pragma omp barrier
    }
};
