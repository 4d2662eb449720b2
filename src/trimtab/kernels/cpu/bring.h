// Bringing operands to where products read them: rows gathered, widened or rounded, matrices turned.
//
// A left operand lies row by row. A right one lies in panels of NR columns, so that a product reads each from one end to
// the other; columns behind the last one hold zeros.
#pragma once
#include "amx.h"
#include "decode.h"

// Where word k of column n goes, n a multiple of VL.
template <class Word>
struct Panels {
    Word* p;
    long row, panel;
    Word* at(long k, long n) const { return p + k * row + n / NR * panel + n % NR; }
};
template <class Op>
Panels<typename Op::Word> panels_of(typename Op::Word* p) {
    return {p, NR, Op::panel * NR};
}

// Whether a weight lies in the panels of these products (packed.h).
template <class Op, class W>
constexpr bool lies = false;

// Rows 0 : kn of nn values each, from row(k), which is null for zeros; ask(k) asks for what row k is made of.
template <class Op, class T, class Row, class Ask>
void bring_rows(const Row& row, const Ask& ask, long kn, long nn, const Panels<typename Op::Word>& to) {
    static const T zeros[NC] = {};  // no block is wider
    constexpr int values = Op::values;
    for (long k = 0; k < up_to(kn, values * Op::whole); k += values) {
        const T* from[2] = {zeros, zeros};
        for (int i = 0; i < values && k + i < kn; i++) {
            ask(k + i);
            if (const T* there = row(k + i)) from[i] = there;
        }
        const T *even = from[0], *odd = from[1];
        const auto put = [&](long n, const T* even, const T* odd) __attribute__((always_inline)) {
            decltype(Op::read(to.p)) words[2];
            Op::read_rows(even, odd, words);
            store(to.at(k / values, n), words[0]);
            store(to.at(k / values, n) + VL, words[1]);
        };
        long n = 0;
        for (; n + NR <= nn; n += NR) put(n, even + n, odd + n);
        if (n == nn) continue;
        T part[2][NR] = {};
        memcpy(part[0], even + n, (nn - n) * sizeof(T));
        memcpy(part[1], odd + n, (nn - n) * sizeof(T));
        put(n, part[0], part[1]);
    }
}

// Rows are asked for some rows ahead: the hardware foresees the next line of a row, not the next row.
constexpr long SOON = 4, FAR = 16;

// Rows that lie `ld` apart, from memory or from a cache.
template <class Op, bool FromMemory = false, class T>
void bring_block(const T* w, long ld, long kn, long nn, const Panels<typename Op::Word>& to) {
    constexpr long ahead = FromMemory ? FAR : SOON;
    const auto ask = [&](long k) {
        if (k + ahead < kn) expect<FromMemory ? 2 : 3>(w + (k + ahead) * ld, nn);
    };
    bring_rows<Op, T>([&](long k) { return w + k * ld; }, ask, kn, nn, to);
}

// Columns n0 : n0 + nn of the rows numbered rows[0 : kn]; a negative one is zeros.
template <class T>
struct Gathered {
    const T* x;
    long width;
    const int64_t* rows;
    long kn, n0, nn;
    const T* operator()(long k) const { return rows[k] < 0 ? nullptr : x + rows[k] * width + n0; }
    void ask(long k) const {
        if (k + SOON < kn && rows[k + SOON] >= 0) expect((*this)(k + SOON), nn);
    }
};
template <class Op, class T>
void gather(const Gathered<T>& from, const Panels<typename Op::Word>& to) {
    bring_rows<Op, T>(from, [&](long k) { from.ask(k); }, from.kn, from.nn, to);
}
template <class Op, class T>
void gather_left(const Gathered<T>& from, typename Op::Value* to, long ld) {
    for (long k = 0; k < from.kn; k++, to += ld) {
        from.ask(k);
        if (const T* row = from(k)) Op::put_row(row, to, from.nn);
        else memset(to, 0, from.nn * sizeof(*to));
        Op::end_row(to, from.nn);
    }
}

INLINE void every_second_value(const float* from, float* to, long n) {
    const auto lanes = std::make_integer_sequence<int, VL>{};
    long i = 0;
    for (; i + VL < n; i += VL) store(to + i, every_second<0>(load(from + 2 * i), load(from + 2 * i + VL), lanes));
    for (; i < n; i++) to[i] = from[2 * i];
}
INLINE void every_second_value(const rounded* from, rounded* to, long n) {
    every_second_value((const float*)from, (float*)to, n);
}
INLINE void every_second_value(const bf16* from, bf16* to, long n) {
    long i = 0;
    for (; i + VL < n; i += VL) *(vh_any*)(to + i) = __builtin_convertvector(*(const vu_any*)(from + 2 * i), vh);
    for (; i < n; i++) to[i] = from[2 * i];
}

// A matrix with the contracted axis last: value (k, n) at w[n * ld + k]. VL words of VL columns are turned in registers.
template <class Op, class T>
void bring_transposed(const T* w, long ld, long kn, long nn, const Panels<typename Op::Word>& to) {
    constexpr long wide = VL * Op::values;
    for (long n = 0; n < up_to(nn, NR); n += VL) {
        for (long k = 0; k < kn; k += wide) {
            vf r[VL];
            const long some = std::min(wide, kn - k);
            if (n >= nn) {
                UNROLL for (int i = 0; i < VL; i++) r[i] = vf{};
            } else if (n + VL <= nn && k + wide <= kn) {
                if (n + 2 * VL <= nn)
                    for (long i = n + VL; i < n + 2 * VL; i++) expect(w + i * ld + k, wide);
                UNROLL for (int i = 0; i < VL; i++) r[i] = Op::words(w + (n + i) * ld + k);
            } else {
                for (int i = 0; i < VL; i++) {
                    T part[wide] = {};
                    const T* from = w + (n + i) * ld + k;
                    if (n + i < nn) {
                        if (some == wide / 2) memcpy(part, from, wide / 2 * sizeof(T));  // in one load
                        else memcpy(part, from, some * sizeof(T));
                    }
                    r[i] = Op::words(part);
                }
            }
            transpose(r);
            UNROLL for (int i = 0; i < VL; i++) store((float*)to.at(k / Op::values + i, n), r[i]);
        }
    }
}

// Rows of a left operand from VL rows of words, `pitch` words apart: words m of all rows become row m.
template <class Word>
void turn(const Word* words, long pitch, Word* to, long ld, long nn) {
    for (long m = 0; m < nn; m += VL) {
        vf r[VL];
        UNROLL for (int i = 0; i < VL; i++) r[i] = load((const float*)(words + i * pitch + m));
        transpose(r);
        UNROLL for (int i = 0; i < VL; i++) store((float*)(to + (m + i) * ld), r[i]);
    }
}

// A right operand: the parameters of one expert, [K, N] of one part, or two that lie `beside` values apart. Value (k, n)
// lies at w[k * ld + n * step] where rows lie in memory one after the other, `by_rows`, else at w[n * ld + k].
template <class W>
struct Matrix {
    const W* w;
    long ld;
    bool by_rows;
    int step = 1, parts = 1;
    long beside = 0;
    Matrix from(long n) const {  // columns from n on
        return {w + n * (by_rows ? step : ld), ld, by_rows, step, parts, beside};
    }
    const W* at(int part, long k, long n) const {
        return w + part * beside + (by_rows ? k * ld + n * step : n * ld + k);
    }
    // Block [k0 : k0 + kn, n0 : n0 + nn].
    template <class Op>
    void bring(int part, typename Op::Word* p, long k0, long kn, long n0, long nn) const {
        const W* from = at(part, k0, n0);
        const auto to = panels_of<Op>(p);
        if (!by_rows) return bring_transposed<Op>(from, ld, kn, nn, to);
        if (step == 1) return bring_block<Op, true>(from, ld, kn, nn, to);
        W rows[2][NC];
        const auto row = [&](long k) {
            every_second_value(from + k * ld, rows[k % 2], nn);
            return rows[k % 2];
        };
        bring_rows<Op, W>(row, [](long) {}, kn, nn, to);
    }
    Ahead where(int part, long k0, long kn, long n0, long nn) const {  // what `bring` reads
        const long rows = by_rows ? kn : nn, values = by_rows ? nn * step : kn;
        return {(const char*)at(part, k0, n0), ld * (long)sizeof(W), rows, values * (long)sizeof(W)};
    }
};

// Codes of one expert's parameter, decoded piece by piece: from its inputs to its outputs, of which parts lie `beside`
// outputs apart and `step` outputs from one to the next, or back.
template <class T>
struct Matrix<coded<T>> {
    Stack w;
    bool by_rows;  // k is an output and n an input, else n is an output
    int step = 1, parts = 1;
    long beside = 0, first = 0;
    Matrix from(long n) const { return {w, by_rows, step, parts, beside, first + n}; }
    long output(int part, long n) const { return part * beside + (first + n) * step; }
    template <class Op>
    void bring(int part, typename Op::Word* p, long k0, long kn, long n0, long nn) const {
        const auto to = panels_of<Op>(p);
        if (by_rows) {
            T rows[2][NC];
            const auto row = [&](long k) {
                w.decode(k0 + k, first + n0, nn, rows[k % 2]);
                return rows[k % 2];
            };
            const auto ask = [&](long k) {
                if (k + FAR < kn) expect<2>(w.at(k0 + k + FAR, first + n0), w.bytes(nn));
            };
            return bring_rows<Op, T>(row, ask, kn, nn, to);
        }
        constexpr long ld = pitch(KC);
        T rows[NR * ld];
        for (long n = 0; n < nn; n += NR) {
            const long some = std::min<long>(NR, nn - n);
#if defined(HAVE_DECODE)
            if (some == NR && kn % (2 * VL) == 0) {
                with_codes(w.type, [&](auto type) {
                    panel_of_codes<Op, T, type>(w, output(part, n0 + n), step, k0, kn, to.at(0, n));
                });
                continue;
            }
#endif
            for (long i = 0; i < some; i++) w.decode(output(part, n0 + n + i), k0, kn, rows + i * ld);
            bring_transposed<Op>(rows, ld, kn, some, {to.p + n / NR * to.panel, to.row, to.panel});
        }
    }
    // The product of few rows with a panel, if it is made without being brought.
    template <class Op>
    bool multiplied(
        int part, long k0, long kn, long n0, long M, const typename Op::Word* a, long lda, const Sums& c
    ) const {
#if defined(HAVE_DECODE)
        if constexpr (Op::tall < NR)
            if (M > 0 && M <= 4 && kn % (2 * VL) == 0) {
                with_codes(w.type, [&](auto type) {
                    const auto run = M == 1 ? tile_of_codes<Op, T, type, 1>
                        : M == 2 ? tile_of_codes<Op, T, type, 2> : tile_of_codes<Op, T, type, 4>;
                    run(w, output(part, n0), step, k0, kn, M, a, lda, c);
                });
                return true;
            }
#endif
        return false;
    }
    Ahead where(int part, long k0, long kn, long n0, long nn) const {
        if (by_rows) return {(const char*)w.at(k0, first + n0), w.bytes(w.ins), kn, w.bytes(nn)};
        return {(const char*)w.at(output(part, n0), k0), w.bytes(w.ins) * step, nn, w.bytes(kn)};
    }
};

// A parameter, and below its last row those of an adapter, if it has some: of an aligned `end` on (call.h).
template <class W>
struct Right : Matrix<W> {
    Matrix<Beside<W>> tail = {};
    long end = 0;
    Right(const Matrix<W>& own) : Matrix<W>(own) {}
    Right(const Matrix<W>& own, const Matrix<Beside<W>>& tail, long end) : Matrix<W>(own), tail(tail), end(end) {}
    bool whole() const { return !tail.w; }
    Right from(long n) const { return whole() ? Right(Matrix<W>::from(n)) : Right(Matrix<W>::from(n), tail.from(n), end); }
    long own(long k0, long kn) const { return whole() ? kn : std::clamp(end - k0, 0L, kn); }
    template <class Op>
    void bring(int part, typename Op::Word* p, long k0, long kn, long n0, long nn) const {
        const long n = own(k0, kn);
        if (n || n == kn) Matrix<W>::template bring<Op>(part, p, k0, n, n0, nn);
        if (n < kn) tail.template bring<Op>(part, p + n / Op::values * NR, k0 + n - end, kn - n, n0, nn);
    }
    // In panels: where they lie, or brought to `p`.
    template <class Op>
    Panels<const typename Op::Word> panels(
        int part, typename Op::Word* p, long k0, long kn, long n0, long nn
    ) const {
        if constexpr (lies<Op, W>)
            if (!this->by_rows && own(k0, kn) == kn) return Matrix<W>::template lying<Op>(part, k0, n0);
        bring<Op>(part, p, k0, kn, n0, nn);
        return {p, NR, Op::panel * NR};
    }
    Ahead where(int part, long k0, long kn, long n0, long nn) const {
        const long n = own(k0, kn);
        return n || whole() ? Matrix<W>::where(part, k0, n, n0, nn) : Ahead();
    }
};

// A layer's weight, [in, out] or [out, in], from its inputs to its outputs, of which two parts are halves or come in
// turn; and back.
template <class W>
Matrix<W> to_outputs(const W* w, long in, long out, bool transposed, int parts = 1, bool interleaved = false) {
    const int step = interleaved ? parts : 1;
    const long second = interleaved ? 1 : out / parts;
    if (transposed) return {w, out, true, step, parts, second};
    return {w, in * step, false, 1, parts, second * in};
}
template <class W>
Matrix<W> to_inputs(const W* w, long in, long out, bool transposed) {
    return {w, transposed ? out : in, !transposed};
}
