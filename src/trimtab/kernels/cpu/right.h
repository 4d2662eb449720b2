// Right operands of products: the parameters of one expert, brought block by block or read where they lie.
#pragma once
#include "amx.h"

// [K, N] of one part, or two that lie `beside` values apart. Value (k, n) lies at w[k * ld + n * step] where rows lie in
// memory one after the other, `by_rows`, else at w[n * ld + k].
template <class W>
struct Right {
    const W* w;
    long ld;
    bool by_rows;
    int step = 1, parts = 1;
    long beside = 0;
    Right from(long n) const {  // columns from n on
        return {w + n * (by_rows ? step : ld), ld, by_rows, step, parts, beside};
    }
    const W* at(int part, long k, long n) const {
        return w + part * beside + (by_rows ? k * ld + n * step : n * ld + k);
    }
    // Block [k0 : k0 + kn, n0 : n0 + nn]; columns up to the next multiple of NR hold anything finite.
    template <class To>
    void bring(int part, const To& to, long k0, long kn, long n0, long nn) const {
        if (by_rows) load_straight(at(part, k0, n0), ld, step, to, kn, nn);
        else load_transposed(at(part, k0, n0), ld, to, kn, nn);
        end_block(to, kn, nn);
    }
    Ahead where(int part, long k0, long kn, long n0, long nn) const {  // what `bring` reads
        const long rows = by_rows ? kn : nn, values = by_rows ? nn * step : kn;
        return {(const char*)at(part, k0, n0), ld * (long)sizeof(W), rows, values * (long)sizeof(W)};
    }
};

// A layer's weight, [in, out] or [out, in], from its inputs to its outputs, of which two parts are halves or come in
// turn; and back.
template <class W>
Right<W> to_outputs(const W* w, long in, long out, bool transposed, int parts = 1, bool interleaved = false) {
    const int step = interleaved ? parts : 1;
    const long second = interleaved ? 1 : out / parts;
    if (transposed) return {w, out, true, step, parts, second};
    return {w, in * step, false, 1, parts, second * in};
}
template <class W>
Right<W> to_inputs(const W* w, long in, long out, bool transposed) {
    return {w, transposed ? out : in, !transposed};
}
