// For tests on machines without them: what Intel documents of vdpbf16ps and of the tile instructions, in plain C++.
//
// Denormals are zero going in and coming out, and a product of two bf16 is exact in float. A tile that is not
// configured, or of another shape than its instruction wants, stops the program as the processor would.
#pragma once
INLINE vf flushed(vf x) { return ((vu)x & 0x7f800000u) ? x : (vf)((vu)x & 0x80000000u); }

INLINE vf dot(vf sum, vu a, vu b) {  // the odd k first
    vf high = flushed((vf)(a & 0xffff0000u)) * flushed((vf)(b & 0xffff0000u));
    vf low = flushed((vf)(a << 16)) * flushed((vf)(b << 16));
    return flushed(flushed(flushed(sum) + high) + low);
}

struct EmulatedTiles {  // of a thread, as the registers are
    TileConfig config;
    uint32_t words[8][16][16];
};
inline thread_local EmulatedTiles tiles_here;

INLINE void must(bool legal) {
    if (!legal) __builtin_trap();
}
INLINE uint32_t (&words_of(int t))[16][16] {
    const TileConfig& c = tiles_here.config;
    must(c.palette == 1 && c.rows[t] > 0 && c.rows[t] <= 16 && c.row_bytes[t] > 0 && c.row_bytes[t] <= 64);
    return tiles_here.words[t];
}
inline void tile_configure(const TileConfig& c) {
    must(c.palette == 1 && c.start == 0);
    tiles_here = {c, {}};
}
inline void tile_release() { tiles_here = {}; }
template <int T>
void tile_zero() {
    memset(words_of(T), 0, sizeof tiles_here.words[T]);
}
template <int T>
void tile_load(const void* p, long stride) {
    tile_zero<T>();
    for (int i = 0; i < tiles_here.config.rows[T]; i++)
        memcpy(words_of(T)[i], (const char*)p + i * stride, tiles_here.config.row_bytes[T]);
}
template <int T>
void tile_store(void* p, long stride) {
    for (int i = 0; i < tiles_here.config.rows[T]; i++)
        memcpy((char*)p + i * stride, words_of(T)[i], tiles_here.config.row_bytes[T]);
}
template <int C, int A, int B>
void tile_dot() {
    const TileConfig& c = tiles_here.config;
    auto &sums = words_of(C), &left = words_of(A), &right = words_of(B);
    must(c.rows[C] == c.rows[A] && c.row_bytes[C] == c.row_bytes[B] && c.row_bytes[A] == 4 * c.rows[B]);
    vf low[16], high[16];
    for (int k = 0; k < c.rows[B]; k++) {
        const vu pairs = *(const vu_any*)right[k];
        low[k] = flushed((vf)(pairs << 16)), high[k] = flushed((vf)(pairs & 0xffff0000u));
    }
    for (int m = 0; m < c.rows[C]; m++) {
        vf even{}, odd{};  // sums of their own, which meet at the end
        for (int k = 0; k < c.rows[B]; k++) {
            const vu pair = left[m][k] - vu{};
            even = flushed(even + flushed((vf)(pair << 16)) * low[k]);
            odd = flushed(odd + flushed((vf)(pair & 0xffff0000u)) * high[k]);
        }
        float* to = (float*)sums[m];
        store(to, flushed(flushed(load(to)) + flushed(even + odd)));  // columns that the tile lacks hold zeros
    }
}
