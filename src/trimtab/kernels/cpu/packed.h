// Weights packed in panels as products read them: of 32 outputs each, one after the other, of which word k has all 32
// values of an input, or of bf16 pairs of two. Gate and up are halves, however biases and adapters hold them.
//
// One layout for all machines: where registers are wide enough a panel is read where it lies, elsewhere it is brought.
#pragma once
#include "bring.h"

constexpr long PACKED_OUTS = 32;

template <class T>
struct packed {
    T value;
};
template <class T>
struct Decoded<packed<T>> {
    using type = T;
    static constexpr bool codes = false;
};
template <class Op, class T>
constexpr bool lies<Op, packed<T>> = NR == PACKED_OUTS && std::is_same_v<T, typename Op::Value>;

// From an expert's inputs to its outputs, of which parts lie `beside` outputs apart, or back; then `in_turn` k counts
// outputs of both parts in turn. All widths are multiples of 32.
template <class T>
struct Matrix<packed<T>> {
    static constexpr long values = 4 / sizeof(T);  // in a word
    const T* w;
    long ins;
    bool by_rows;  // k is an output and n an input, else n is an output
    bool in_turn = false;
    int parts = 1;
    long beside = 0, first = 0;
    Matrix from(long n) const { return {w, ins, by_rows, in_turn, parts, beside, first + n}; }
    const float* word(long out, long in) const {
        return (const float*)w + (out / PACKED_OUTS * ins + in) / values * PACKED_OUTS + out % PACKED_OUTS;
    }
    template <class Op>
    Panels<const typename Op::Word> lying(int part, long k0, long n0) const {
        return {(const typename Op::Word*)word(part * beside + first + n0, k0), NR, ins / values * PACKED_OUTS};
    }
    template <class Op>
    void bring(int part, typename Op::Word* p, long k0, long kn, long n0, long nn) const {
        const auto to = panels_of<Op>(p);
        if (by_rows) return bring_back<Op>(to, k0, kn, first + n0, nn);
        for (long n = 0; n < nn; n += VL) {
            const float* from = word(part * beside + first + n0 + n, k0);
            for (long i = 0; i < kn / values; i++, from += PACKED_OUTS) {
                const vu words = (vu)load(from);
                if constexpr (Op::values == values) {
                    store((float*)to.at(i, n), (vf)words);
                } else {  // pairs, to floats
                    store(to.at(2 * i, n), (vf)(words << 16));
                    store(to.at(2 * i + 1, n), (vf)(words & 0xffff0000u));
                }
            }
        }
    }
    // Outputs in rows again, some at a time.
    template <class Op>
    void bring_back(const Panels<typename Op::Word>& to, long k0, long kn, long n0, long nn) const {
        constexpr long ld = pitch(NC / values), half = PACKED_OUTS / 2;
        float rows[PACKED_OUTS * ld];
        for (long k = 0; k < kn; k += PACKED_OUTS) {
            for (long i = 0; i < PACKED_OUTS; i += VL) {
                const long out = in_turn ? (k0 + k) / 2 + i % half + i / half * beside : k0 + k + i;
                float* row = rows + (in_turn ? i % half * 2 + i / half : i) * ld;
                for (long n = 0; n < nn / values; n += VL)
                    transpose_block(word(out, n0 + n * values), PACKED_OUTS, row + n, in_turn ? 2 * ld : ld);
            }
            bring_rows<Op, T>([&](long i) { return (const T*)(rows + i * ld); }, [](long) {}, PACKED_OUTS, nn,
                              {to.p + k / Op::values * to.row, to.row, to.panel});
        }
    }
    // What is read from end to end: all if it is whole panels, else the first panel's.
    Ahead where(int part, long k0, long kn, long n0, long nn) const {
        const long out = !by_rows ? part * beside + first + n0 : in_turn ? k0 / 2 : k0, in = by_rows ? first + n0 : k0;
        const long outs = by_rows ? kn : nn, bytes = (by_rows ? nn : kn) * (long)sizeof(T);
        const long rows = bytes == ins * (long)sizeof(T) ? outs : std::min(outs, PACKED_OUTS);
        return {(const char*)word(out, in), bytes, rows, bytes};
    }
};
