// Bringing operands as bf16, in pairs along k: the products of such pairs, and where they lie.
//
// A pair is a word. Left operands lie row by row, k contiguous; right ones as panels of NR columns, whose row is a pair
// of each column. Where k ends, zeros follow up to a multiple of a tile's pairs.
#pragma once
#include "bf16.h"
#include "load.h"

#if defined(HAVE_DOT) || defined(HAVE_AMX)
constexpr long TILE = 16;  // pairs in a row of a tile, and rows
static_assert(VL == TILE);

// 2 VL values as bf16.
INLINE vhh both(const bf16* p) { return *(const vhh_any*)p; }
INLINE vhh both(const float* p) { return narrow(load(p), load(p + VL)); }
INLINE vhh both(const rounded* p) { return both((const float*)p); }

struct Pairs {
    using Word = uint32_t;
    using Value = bf16;
    static constexpr long values = 2;
    static constexpr long wide = NC;
    static constexpr long tall = 8;
    static constexpr long deep = 128;  // a panel of B and as many rows of A as it is wide fit in the nearest cache
    static constexpr long depth = deep * values;
    static constexpr bool by_row = true;
    static constexpr long asks = MC;  // always
    static constexpr long along = deep;  // always
    static constexpr long chunk = 0;
    static constexpr bool adds = true;  // whether sums can be added to what is there straight from registers
    static constexpr long pitch(long n) { return up_to(n, 2 * TILE) + 2 * TILE; }
    struct Session {};
    template <class W>
    static INLINE vf words(const W* p) {  // VL of a row where it lies
        return (vf)both(p);
    }
};

// Pairs of values of two rows, of the first VL columns or the others.
template <int... L>
INLINE vu pairs_of(vhh even, vhh odd, std::integer_sequence<int, L...>, int_constant<0>) {
    return (vu)__builtin_shufflevector(even, odd, (L / 2 + L % 2 * 2 * VL)...);
}
template <int... L>
INLINE vu pairs_of(vhh even, vhh odd, std::integer_sequence<int, L...>, int_constant<1>) {
    return (vu)__builtin_shufflevector(even, odd, (VL + L / 2 + L % 2 * 2 * VL)...);
}
#if defined(HAVE_DOT)
struct Dots : Pairs {
    // Addresses are made anew for each k: as many pointers as there are rows would go to the stack.
    static INLINE void new_row(long& ld) { asm volatile("" : "+r"(ld)); }
    static INLINE vu read(const uint32_t* p) { return *(const vu_any*)p; }
    template <class W>
    static INLINE void read_rows(const W* p, long ld, vu* to) {
        const auto lanes = std::make_integer_sequence<int, 2 * VL>{};
        const vhh even = both(p), odd = both(p + ld);
        to[0] = pairs_of(even, odd, lanes, int_constant<0>());
        to[1] = pairs_of(even, odd, lanes, int_constant<1>());
    }
    static INLINE vu spread(uint32_t pair) { return pair - vu{}; }
    static INLINE vf add(vf sum, vu a, vu b) { return dot(sum, a, b); }
};
#endif

// The first n of VL values in the lower halves of words, of which the others are 0.
INLINE vu halves(const bf16* p) { return __builtin_convertvector((vh)*(const vh_any*)p, vu); }
INLINE vu halves(const float* p) { return __builtin_convertvector(narrow(load(p)), vu); }
INLINE vu halves(const rounded* p) { return halves((const float*)p); }
template <class T>
INLINE vu halves(const T* p, long n) {
    if (n >= VL) return halves(p);
    T part[VL] = {};
    if (n > 0) memcpy(part, p, n * sizeof(T));
    return halves(part);
}

// A left operand's rows.
struct PairRows {
    bf16* p;
    long ld;
};
inline PairRows rows_of(bf16* p, long ld) { return {p, ld}; }
inline void end_row(bf16* row, long n) { memset(row + n, 0, (up_to(n, 2 * TILE) - n) * sizeof(bf16)); }
INLINE void put_row(const bf16* from, const PairRows& to, long k, long nn) {
    bf16* at = to.p + k * to.ld;
    memcpy(at, from, nn * sizeof(bf16));
    end_row(at, nn);
}
template <class T>
INLINE void put_zeros(const PairRows& to, long k, long nn) {
    memset(to.p + k * to.ld, 0, up_to(nn, 2 * TILE) * sizeof(bf16));
}

// Where the pair of value (k, n) of a right operand goes.
struct PairPlace {
    uint32_t* p;
    long row, panel;
    uint32_t* at(long k, long n) const { return p + k / 2 * row + n / NR * panel + n % NR; }
};
inline PairPlace panels_of(uint32_t* p) { return {p, NR, Pairs::deep * NR}; }

// Row k of a block: of even k in words of its own, so that no pair stays half; of odd k into these.
template <bool Odd, class T>
INLINE void put_halves(const T* from, const PairPlace& to, long k, long nn) {
    for (long n = 0; n < nn; n += NR) {
        uint32_t* at = to.at(k, n);
        UNROLL for (int i = 0; i < NR; i += VL) {
            vu v = halves(from + n + i, nn - n - i);
            if (Odd) v = v << 16 | *(const vu_any*)(at + i);
            *(vu_any*)(at + i) = v;
        }
    }
}
template <class T>
INLINE void put_row(const T* from, const PairPlace& to, long k, long nn) {
    if (k % 2) put_halves<true>(from, to, k, nn);
    else put_halves<false>(from, to, k, nn);
}
// Rows k and k + 1, k even.
template <class T>
INLINE void put_rows(const T* even, const T* odd, const PairPlace& to, long k, long nn) {
    const auto lanes = std::make_integer_sequence<int, 2 * VL>{};
    long n = 0;
    for (; n + NR <= nn; n += NR) {
        const vhh a = both(even + n), b = both(odd + n);
        uint32_t* at = to.at(k, n);
        *(vu_any*)at = pairs_of(a, b, lanes, int_constant<0>());
        *(vu_any*)(at + VL) = pairs_of(a, b, lanes, int_constant<1>());
    }
    if (n == nn) return;
    put_row(even + n, {to.at(0, n), to.row, NR}, k, nn - n);
    put_row(odd + n, {to.at(0, n), to.row, NR}, k + 1, nn - n);
}
template <class T>
INLINE void put_zeros(const PairPlace& to, long k, long nn) {
    if (k % 2) return;
    for (long n = 0; n < nn; n += NR) memset(to.at(k, n), 0, NR * sizeof(uint32_t));
}
inline void end_block(const PairPlace& to, long kn, long nn) {
    for (long k = up_to(kn, 2); k < up_to(kn, 2 * TILE); k += 2) put_zeros<bf16>(to, k, nn);
}

INLINE void put_every_second(const bf16* w, const PairPlace& to, long k, long nn) {
    bf16 row[NC];
    long n = 0;
    for (; n + VL <= nn - 1; n += VL) *(vh_any*)(row + n) = __builtin_convertvector(*(const vu_any*)(w + 2 * n), vh);
    for (; n < nn; n++) row[n] = w[2 * n];
    put_row(row, to, k, nn);
}
INLINE void put_every_second(const rounded* w, const PairPlace& to, long k, long nn) {
    float row[NC];
    put_every_second((const float*)w, rows_of(row, 0), 0, nn);
    put_row(row, to, k, nn);
}

// A matrix with the contracted axis last: value (k, n) at w[n * ld + k]. Words of bf16 are pairs already.
template <class T>
void load_transposed(const T* w, long ld, const PairPlace& to, long kn, long nn) {
    constexpr long wide = 2 * VL;
    for (long n = 0; n < up_to(nn, NR); n += VL) {
        for (long k = 0; k < kn; k += wide) {
            vf r[VL];
            if (n + VL <= nn && k + wide <= kn) {
                if (n + 2 * VL <= nn)
                    for (long i = n + VL; i < n + 2 * VL; i++) expect(w + i * ld + k, wide);
                UNROLL for (int i = 0; i < VL; i++) r[i] = (vf)both(w + (n + i) * ld + k);
            } else {
                for (int i = 0; i < VL; i++) {
                    T part[wide] = {};
                    if (n + i < nn) memcpy(part, w + (n + i) * ld + k, std::min(wide, kn - k) * sizeof(T));
                    r[i] = (vf)both(part);
                }
            }
            transpose(r);
            UNROLL for (int i = 0; i < VL; i++) store((float*)to.at(k + 2 * i, n), r[i]);
        }
    }
}

// Rows of a left operand from TILE rows of pairs, `pitch` words apart: words m of all rows become row m.
inline void turn(const uint32_t* pairs, long pitch, uint32_t* to, long ld, long nn) {
    for (long m = 0; m < nn; m += VL) {
        vf r[VL];
        UNROLL for (int i = 0; i < VL; i++) r[i] = load((const float*)(pairs + i * pitch + m));
        transpose(r);
        UNROLL for (int i = 0; i < VL; i++) store((float*)(to + (m + i) * ld), r[i]);
    }
}

// Hidden rows are computed as floats beside where they belong.
INLINE float* open_row(bf16*, float* beside) { return beside; }
INLINE void close_row(bf16* row, const float* from, long n) {
    for (long i = 0; i < n; i += VL) store(row + i, load(from + i), n - i);
}
#endif
