// Bringing operands into blocks of float: widened, rounded, gathered or transposed on the way.
#pragma once
#include "tile.h"

// Where value (k, n) of a block goes. Left operands lie row by row; right ones as panels of NR columns, so that a
// product reads each from one end to the other.
struct Place {
    float* p;
    long row, panel;
    float* at(long k, long n) const { return p + k * row + n / NR * panel + n % NR; }
};
inline Place rows_of(float* p, long ld) { return {p, ld, NR}; }
inline Place panels_of(float* p) { return {p, NR, KC * NR}; }

// Columns behind the last one, up to a multiple of NR, are read by the products: they must hold numbers.
INLINE void blank(Place to, long k, long nn) {
    for (long n = nn; n < up_to(nn, NR); n++) *to.at(k, n) = 0;
}

// Rows are asked for some rows ahead: the hardware foresees the next line of a row, not the next row.
constexpr long SOON = 4, FAR = 16;

template <class T>
INLINE void widen_row(const T* from, float* to, long n) {
    long i = 0;
    for (; i + 2 * VL <= n; i += 2 * VL) {
        vf a = load(from + i), b = load(from + i + VL);
        store(to + i, a);
        store(to + i + VL, b);
    }
    for (; i < n; i += VL) store(to + i, load(from + i, n - i), n - i);
}

// A left operand that is brought with k as its rows: each tile's columns as a panel.
struct Tiles {
    float* p;
    long tiles, first[PC / MR + 2];
    static constexpr long floats = (PC / MR + 1) * KC * VL;
    Tiles(float* to, long nn) : p(to), tiles((nn + MR - 1) / MR) {
        for (long t = 0; t <= tiles; t++) first[t] = first_row(t, tiles, nn);
    }
};
template <class T>
INLINE void put_row(const T* from, const Tiles& to, long k, long nn) {
    float* at = to.p + k * VL;
    long t = 0;
    for (; t < to.tiles && to.first[t] + VL <= nn; t++, at += KC * VL) store(at, load(from + to.first[t]));
    for (; t < to.tiles; t++, at += KC * VL) store(at, load(from + to.first[t], nn - to.first[t]));
}

// Row k of a block.
template <class T>
INLINE void put_row(const T* from, Place to, long k, long nn) {
    for (long n = 0; n < nn; n += NR) widen_row(from + n, to.at(k, n), std::min<long>(NR, nn - n));
    blank(to, k, nn);
}

template <class T>
INLINE void put_zeros(Place to, long k, long nn) {
    static const T zeros[NR] = {};
    for (long n = 0; n < nn; n += NR) put_row(zeros, {to.at(0, n), to.row, NR}, k, std::min<long>(NR, nn - n));
}
template <class T>
INLINE void put_zeros(const Tiles& to, long k, long) {
    for (long t = 0; t < to.tiles; t++) store(to.p + (t * KC + k) * VL, vf{});
}

// Rows k and k + 1; pairs.h has a way that takes both at once.
template <class T, class To>
INLINE void put_rows(const T* even, const T* odd, const To& to, long k, long nn) {
    put_row(even, to, k, nn);
    put_row(odd, to, k + 1, nn);
}

// Columns n0 : n0 + nn of the rows numbered rows[0 : kn]; a negative one is zeros.
template <class T, class To>
void gather(const T* x, long width, const int64_t* rows, long kn, long n0, long nn, const To& to) {
    const auto row = [&](long k) { return x + rows[k] * width + n0; };
    const auto one = [&](long k) {
        if (rows[k] >= 0) put_row(row(k), to, k, nn);
        else put_zeros<T>(to, k, nn);
    };
    for (long k = 0; k < kn; k += 2) {
        for (long soon = k + SOON; soon < std::min(k + SOON + 2, kn); soon++)
            if (rows[soon] >= 0) expect(row(soon), nn);
        if (k + 1 < kn && rows[k] >= 0 && rows[k + 1] >= 0) {
            put_rows(row(k), row(k + 1), to, k, nn);
            continue;
        }
        one(k);
        if (k + 1 < kn) one(k + 1);
    }
}

template <class T>
INLINE void put_every_second(const T* w, Place to, long k, long nn) {
    const auto lanes = std::make_integer_sequence<int, VL>{};
    long n = 0;
    for (; n + VL <= nn - 1; n += VL)
        store(to.at(k, n), every_second<0>(load(w + 2 * n), load(w + 2 * n + VL), lanes));
    for (; n < nn; n++) *to.at(k, n) = value(w[2 * n]);
    blank(to, k, nn);
}

// Rows that lie `ld` apart. Those from memory are asked for from farther away.
template <bool FromMemory = false, class T, class To>
void put_block(const T* from, long ld, const To& to, long kn, long nn) {
    constexpr long ahead = FromMemory ? FAR : SOON;
    for (long k = 0; k < kn; k += 2, from += 2 * ld) {
        for (long soon = k + ahead; soon < std::min(k + ahead + 2, kn); soon++)
            expect<FromMemory ? 2 : 3>(from + (soon - k) * ld, nn);
        if (k + 1 < kn) put_rows(from, from + ld, to, k, nn);
        else put_row(from, to, k, nn);
    }
}

// A matrix with the contracted axis first: value (k, n) at w[k * ld + n * step], step 1 or 2.
template <class T, class To>
void load_straight(const T* w, long ld, int step, const To& to, long kn, long nn) {
    if (step == 1) return put_block<true>(w, ld, to, kn, nn);
    for (long k = 0; k < kn; k++, w += ld) put_every_second(w, to, k, nn);
}

// VL rows `ld` apart; unless there are All, those from `rows` on are not read and count as zeros.
template <bool All = true, class T>
INLINE void transpose_block(const T* w, long ld, float* to, long row, long rows = VL) {
    vf r[VL];
    UNROLL for (int i = 0; i < VL; i++) r[i] = All || i < rows ? load(w + i * ld) : vf{};
    transpose(r);
    UNROLL for (int i = 0; i < VL; i++) store(to + i * row, r[i]);
}
template <bool All = true>
INLINE void transpose_block(const bf16* w, long ld, float* to, long row, long rows = VL) {  // pairs are moved as one
    vf r[VL];
    UNROLL for (int i = 0; i < VL; i++) r[i] = All || i < rows ? load_pairs(w + i * ld) : vf{};
    transpose(r);
    UNROLL for (int i = 0; i < VL; i++) {
        store(to + 2 * i * row, (vf)((vu)r[i] << 16));
        store(to + (2 * i + 1) * row, (vf)((vu)r[i] & 0xffff0000u));
    }
}

// A matrix with the contracted axis last: value (k, n) at w[n * ld + k].
template <class T>
void load_transposed(const T* w, long ld, Place to, long kn, long nn) {
    constexpr long wide = VL * 4 / sizeof(T);
    for (long n = 0; n < nn; n += VL) {
        long k = 0;
        for (; k + wide <= kn; k += wide) {
            if (n + 2 * VL <= nn)
                for (long i = n + VL; i < n + 2 * VL; i++) expect(w + i * ld + k, 1);
            const T* from = w + n * ld + k;
            if (n + VL <= nn) transpose_block(from, ld, to.at(k, n), to.row);
            else transpose_block<false>(from, ld, to.at(k, n), to.row, nn - n);
        }
        for (; k < kn; k++)
            for (long i = n; i < n + VL; i++) *to.at(k, i) = i < nn ? value(w[i * ld + k]) : 0.0f;
    }
    const long end = up_to(nn, VL);
    for (long k = 0; end < up_to(nn, NR) && k < kn; k++) store(to.at(k, end), vf{});
}

// What pairs.h needs at the ends of rows and blocks, and beside rows, floats do not.
inline void end_row(float*, long) {}
inline void end_block(const Place&, long, long) {}
INLINE float* open_row(float* row, float*) { return row; }
INLINE void close_row(float*, const float*, long) {}
