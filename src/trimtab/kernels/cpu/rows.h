// The parts that forward and backward share: tasks over threads, operands by where they come from, the combine.
#pragma once
#include <omp.h>

#include <vector>

#include "activation.h"
#include "call.h"
#include "gemm.h"

struct Rows {  // expert rows of one expert that one thread takes
    long expert, start, count;
};

// Experts that are worked on together, and their rows. What lies between two products of a wave lives as long as it.
struct Wave {
    long first, last, start, end;
};

// Of a block of gradients: rows that are brought at once at most, rows of the block whose operand is brought at once,
// and its rows at most if an expert has more than the first.
template <class Op>
constexpr long ROWS = 256 * Op::values;
constexpr long HIGH = 256, HIGHEST = 512;

inline bool paired(const Call& c) { return c.type != FLOAT && c.products != WIDENED; }

// Waves of about as many rows: few, so that they stay near and cost little memory, but enough for all threads to share.
inline std::vector<Wave> waves(const Call& c) {
    const long several = std::clamp(c.R / (2048 * c.threads), 1L, 16L);
    const long n = c.threads == 1 ? std::clamp(c.R / 512, 1L, 16L) : several;
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
    const long near = std::clamp((3L << 20) / width(c), paired(c) ? 336L : 56L, MC);
    const long most = c.threads == 1 ? near : std::min(near, std::max(112L, (w.end - w.start) / (2 * c.threads)));
    std::vector<Rows> out;
    for (long e = w.first; e < w.last; e++) {
        const long start = c.offsets[e], rows = c.offsets[e + 1] - start, n = (rows + most - 1) / most;
        for (long i = 0; i < n; i++) out.push_back({e, start + i * rows / n, (i + 1) * rows / n - i * rows / n});
    }
    if (c.threads > 1)
        std::stable_sort(out.begin(), out.end(), [](const Rows& a, const Rows& b) { return a.count > b.count; });
    return out;
}

inline long largest(const Call& c, const std::vector<Wave>& waves) {
    long most = 0;
    for (const Wave& wave : waves)
        for (const Rows& piece : pieces(c, wave)) most = std::max(most, piece.count);
    return up_to(most, 2 * VL);  // tiles are whole
}

// A thread's memory, for pieces of at most so many rows.
struct Scratch {
    float *b, *c, *x, *beside, *sums;
    static bool gradients(const Call& c) { return c.d_up || c.d_down || c.d_up_a || c.d_down_a; }
    static long sums_of(const Call& c, long most) {
        const long block = paired(c) ? HIGHEST * pitch(512) : HIGHEST * LDC;
        return std::max(most * LDC, gradients(c) ? block : 0);
    }
    static long right(const Call& c) { return gradients(c) && paired(c) ? (128 + SPARE / 2) * 2 * 1024 : KC * NC; }
    static long left(const Call& c, long n) { return paired(c) ? up_to(n, 2 * VL) / 2 + VL : n + VL; }
    static long rows(const Call& c, long most) {
        return up_to(std::max(most * left(c, c.D + std::max(c.rank_up, c.rank_down)), HIGH * pitch(256)), VL);
    }
    static long each(const Call& c, long most) {
        return right(c) + sums_of(c, most) + most * VL + rows(c, most) + NC * VL;
    }
    Scratch(const Call& call, int thread, long most) {
        b = call.scratch + thread * each(call, most);
        c = b + right(call);
        sums = c + sums_of(call, most);
        x = sums + most * VL;
        beside = x + rows(call, most);
    }
};

// run(a thread's memory) by every thread of a team.
template <class Op, class Run>
void by_team(const Call& c, long most, Run run) {
    const unsigned word = control_word();
#pragma omp parallel num_threads(c.threads)
    {
        const Controlled controlled(word);
        [[maybe_unused]] const typename Op::Session session;
        run(Scratch(c, omp_get_thread_num(), most));
    }
}

// Whether hidden rows are kept from the backward's first product for the weight gradients behind it.
inline bool keeps_hidden(const Call& c) { return paired(c) && c.dy && !c.d_pre && (c.d_down || c.d_down_a); }

// Whether the weight gradients read a wave's gradients of pre-activations where the second product does. Not those of
// bf16 that is widened: the product's are not rounded.
inline bool reads_operand(const Call& c) { return c.dy && !c.d_pre && (c.type == FLOAT || paired(c)); }
// Whether a wave's left operands of the second product are there together, or a piece's alone.
inline bool by_wave(const Call& c) { return c.threads > 1 || reads_operand(c); }

// What the threads share: left operands of the second product; a wave's gradients of pre-activations, if they lie apart
// from these, and hidden rows.
struct Shared {
    float *second, *d_pre, *hidden, *end;
    Shared(const Call& c, const std::vector<Wave>& waves) {
        const bool products = c.up;  // else gradients of weights alone
        const long most = wave_rows(waves), piece = products ? largest(c, waves) : 0, size = c.type == FLOAT ? 4 : 2;
        second = c.scratch + c.threads * Scratch::each(c, piece);
        const long rows = c.y || c.dw ? (by_wave(c) ? most : piece) + VL : 0;  // tiles are whole
        const long wide = c.dw ? width(c) + c.rank_up : c.F + c.rank_down;
        d_pre = second + up_to(rows * Scratch::left(c, wide), 16);
        hidden = d_pre + (c.dy && !c.d_pre && !reads_operand(c) ? up_to(most * width(c) * size / 4 + 1, 16) : 0);
        end = hidden + (keeps_hidden(c) ? up_to(most * c.F / 2 + 1, 16) : 0);
    }
};

// An expert's parameters, in a forward's products and in a backward's. An adapter's second matrix lies below them; its
// first makes the columns that this one takes.
template <class W>
Right<W> with_tail(const Matrix<W>& own, long end, const Matrix<Beside<W>>& tail) {
    return tail.w ? Right<W>(own, tail, end) : Right<W>(own);
}
template <class W>
const W* of_expert(const void* all, long e, long each) {
    return all ? (const W*)all + e * each : nullptr;
}
// The parameter itself: [I, D] or [D, F], or turned; codes never are.
template <class W>
Matrix<W> own_up(const Call& c, long e, bool back) {
    const int parts = back || !gated(c) ? 1 : 2;
    const bool interleaved = !back && c.interleaved;
    const long I = width(c);
    if constexpr (std::is_same_v<W, packed<Beside<W>>>) {
        return {(const Beside<W>*)c.up + e * I * c.D, c.D, back, back && c.interleaved, parts, I / 2};
    } else if constexpr (Decoded<W>::codes) {
        const Stack w = Stack::of(c.type_weights, c.up, c.up_scales, e, I, c.D);
        return {w, back, interleaved ? parts : 1, parts, interleaved ? 1 : I / parts};
    } else {
        const W* w = (const W*)c.up + e * I * c.D;
        if (back) return to_inputs(w, c.D, I, c.transposed != 0);
        return to_outputs(w, c.D, I, c.transposed != 0, parts, interleaved);
    }
}
template <class W>
Matrix<W> own_down(const Call& c, long e, bool back) {
    if constexpr (std::is_same_v<W, packed<Beside<W>>>) {
        return {(const Beside<W>*)c.down + e * c.D * c.F, c.F, back};
    } else if constexpr (Decoded<W>::codes) {
        return {Stack::of(c.type_weights, c.down, c.down_scales, e, c.D, c.F), back};
    } else {
        const W* w = (const W*)c.down + e * c.D * c.F;
        return back ? to_inputs(w, c.F, c.D, c.transposed != 0) : to_outputs(w, c.F, c.D, c.transposed != 0);
    }
}
template <class W>
Right<W> up_of(const Call& c, long e) {
    const int parts = gated(c) ? 2 : 1;
    const long I = width(c), r = c.rank_up;
    return with_tail(
        own_up<W>(c, e, false), c.D,
        to_outputs(of_expert<Beside<W>>(c.up_b, e, I * r), r, I, false, parts, c.interleaved != 0));
}
template <class W>
Right<W> down_of(const Call& c, long e) {
    const long r = c.rank_down;
    return with_tail(
        own_down<W>(c, e, false), c.F,
        to_outputs(of_expert<Beside<W>>(c.down_b, e, c.D * r), r, c.D, false));
}
template <class W>
Right<W> back_of_up(const Call& c, long e) {
    const long I = width(c), r = c.rank_up;
    return with_tail(
        own_up<W>(c, e, true), I,
        to_inputs(of_expert<Beside<W>>(c.up_a, e, r * c.D), c.D, r, false));
}
template <class W>
Right<W> back_of_down(const Call& c, long e) {
    const long r = c.rank_down;
    return with_tail(
        own_down<W>(c, e, true), c.D,
        to_inputs(of_expert<Beside<W>>(c.down_a, e, r * c.F), c.F, r, false));
}

inline float weight_of(const Call& c, long r) { return c.slot_R[r] < 0 ? 0.0f : c.w[c.slot_R[r]]; }

constexpr long COMING = 4;  // rows ahead of which a token's sum is asked for: it may lie in memory

// Each token's sum over its expert rows, in the order of the experts, if `to` is there: a row is added where its product
// ends, by the thread that has those columns. Sums are floats while they grow.
template <class T>
struct Combine {
    const Call& c;
    T* to;
    float* sums;
    long from = 0, until = 0;  // this thread's columns
    Combine(const Call& c, void* to) : c(c), to((T*)to), sums(std::is_same_v<T, float> ? (float*)to : c.sums) {
        if (!to) return;
        const long blocks = (c.D + NR - 1) / NR, n = omp_get_num_threads(), i = omp_get_thread_num();
        from = std::min<long>(c.D, i * blocks / n * NR);
        until = std::min<long>(c.D, (i + 1) * blocks / n * NR);
        for (long m = 0; m < c.M; m++) memset(sums + m * c.D + from, 0, (until - from) * sizeof(float));
    }
    // Columns d0 : d0 + n of a row's product.
    INLINE void add(long r, long d0, long n, const float* got) const {
        if (c.row_R[r] < 0) return;
        const float* soon = sums + c.row_R[std::min(r + COMING, c.R - 1)] * c.D;  // a prefetch reads nothing
        float* row = sums + c.row_R[r] * c.D;
        for (long d = d0; d < d0 + n; d += VL, got += VL) {
            __builtin_prefetch(soon + d, 1);
            store(row + d, load(got) + load(row + d, d0 + n - d), d0 + n - d);
        }
    }
    long wide() const { return until - from; }
    void end() const {  // when all rows are added
        if constexpr (!std::is_same_v<T, float>)
            for (long m = 0; to && m < c.M; m++)
                for (long d = from; d < until; d += VL) {
                    const long at = m * c.D + d;
                    store(to + at, load(sums + at, until - d), until - d);
                }
    }
};

// The second product of a piece's rows, [count, K] at `left`, for this thread's columns, and their bias, into their
// tokens' sums: the rows are weighted.
template <class Op, class W, class T>
void combined_rows(
    const Call& c, Rows t, const typename Op::Value* left, long K, const Right<W>& weight, const T* bias,
    const Combine<T>& to, Scratch s, const Ahead& then
) {
    using Word = typename Op::Word;
    if (!to.to) return;
    gemm<Op>(
        t.count, to.wide(), K, {(const Word*)left, Op::pitch(K) / Op::values}, weight.from(to.from), (Word*)s.b, s.c,
        then, [&](long m0, long mn, long n0, long nn, float* got) {
            n0 += to.from;
            for (long i = m0; i < m0 + mn; i++, got += LDC) {
                const float w = weight_of(c, t.start + i);
                for (long n = 0; bias && n < nn; n += VL)
                    store(got + n, load(got + n) + load(bias + n0 + n, nn - n) * w);
                to.add(t.start + i, n0, nn, got);
            }
        });
}

// The two products of all rows: first(piece, place, next) by one thread each, whose left operands of the second product
// are put at `place`, a row every `ld` values; then second(piece, place, next) by all threads, each for its columns, in
// the order of the experts, and what else there is to do for a wave.
template <class Value, class First, class Second, class Rest>
void two_products(
    const Call& c, const std::vector<Wave>& all, Value* places, long ld, First first, Second second, Rest rest
) {
    for (const Wave& wave : all) {
        std::vector<Rows> tasks = pieces(c, wave);
        const long n = tasks.size();
        const auto next = [&](long i) { return i + 1 < n ? &tasks[i + 1] : nullptr; };
        const auto place = [&](long i) { return by_wave(c) ? places + (tasks[i].start - wave.start) * ld : places; };
        if (c.threads == 1) {
            for (long i = 0; i < n; i++) {
                first(wave, tasks[i], place(i), nullptr);
                second(tasks[i], place(i), next(i));
            }
            rest(wave);
            continue;
        }
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < n; i++) first(wave, tasks[i], place(i), next(i));
        std::sort(tasks.begin(), tasks.end(), [](const Rows& a, const Rows& b) { return a.start < b.start; });
        for (long i = 0; i < n; i++) second(tasks[i], place(i), next(i));
        rest(wave);
#pragma omp barrier
    }
}
