// Products of few rows of A: the weight B is read where it lies, once from end to end, and not brought.
#pragma once
#include "packed.h"

// What takes the sums of rows m0 : m0 + mn and columns n0 : n0 + nn, see `gemm`. It refers to what it is made of.
struct Done {
    const void* what;
    void (*run)(const void*, long, long, long, long, float*);
    template <class F>
    Done(const F& f)
        : what(&f), run([](const void* what, long m0, long mn, long n0, long nn, float* c) {
              (*(const F*)what)(m0, mn, n0, nn, c);
          }) {}
    void operator()(long m0, long mn, long n0, long nn, float* c) const { run(what, m0, mn, n0, nn, c); }
};

// Whether a weight can be read where it lies: it is as the products take it, or float that is rounded in registers.
template <class Op, class W>
constexpr bool in_place = std::is_same_v<W, typename Op::Value> || std::is_same_v<W, rounded>;

// `tall` rows of a weight, from `w` on and `ld` words apart, times the columns of a panel of K words, NR or VL if there
// are no more: their sums, [tall, NR]. The steps are those of `multiply`, so an element has the same bits.
template <class Op>
void swapped_strip(
    Op, long K, long columns, const typename Op::Word* w, long ld, const typename Op::Word* x, float* sums, Ahead ask
) {
    const Tile<typename Op::Word> run = columns > VL ? tile<Op, Op::tall, 2> : tile<Op, Op::tall, 1>;
    for (long k = 0; k < K; k += Op::deep) {
        const long kn = std::min(Op::deep, K - k);
        const Sums way = {k > 0 ? sums : nullptr, NR, sums, NR, NEAR};
        run(kn, w + k, ld, x + k * NR, way, {ask.rows ? ask.p + k * 4 : nullptr, ask.ld, ask.rows, kn * 4});
    }
}
#if defined(HAVE_AMX)
inline void swapped_strip(Amx, long K, long, const uint32_t* w, long ld, const uint32_t* x, float* sums, Ahead ask) {
    tile_block<true, EachRow>(K, w, ld, x, {nullptr, 0, sums, NR, NEAR}, ask);
}
#endif

// VL rows of a weight times M rows of A, fewer than would fill a panel: [M, VL], in the same steps. The weight's values
// are turned in registers.
template <class Op, class W, int M>
void swapped_rows(
    long K, const typename Op::Word* a, long lda, const W* w, long ldw, float* sums, long ld_sums, Ahead ask
) {
    vf total[M];
    for (long k0 = 0; k0 < K; k0 += Op::deep) {
        vf acc[M];
        UNROLL for (int m = 0; m < M; m++) acc[m] = vf{};
        for (long k = k0; k < std::min(K, k0 + Op::deep); k += VL) {
            constexpr int values = Op::values;
            for (long i = 0; i < ask.rows; i++)
                expect<2>((const W*)(ask.p + i * ask.ld) + k * values, VL * values);
            vf r[VL];
            UNROLL for (int i = 0; i < VL; i++) r[i] = Op::words(w + i * ldw + k * values);
            asm volatile("" ::: "memory");  // a compiler would load rows again for each use, and run out of registers
            transpose(r);
            asm volatile("" ::: "memory");
            UNROLL for (int i = 0; i < VL; i++)
                UNROLL for (int m = 0; m < M; m++)
                    acc[m] = Op::add(acc[m], Op::spread(a[m * lda + k + i]), (decltype(Op::read(a)))r[i]);
        }
        UNROLL for (int m = 0; m < M; m++) total[m] = k0 ? acc[m] + total[m] : acc[m];
    }
    UNROLL for (int m = 0; m < M; m++) store(sums + m * ld_sums, total[m]);
}

// `swapped_rows` of m >= 1 rows; null where a panel is as fast, as in tiles: they wait for the weights either way.
template <class Op, class W, int... M>
auto pick_rows(long m, std::integer_sequence<int, M...>) {
    using Word = typename Op::Word;
    using Run = void (*)(long, const Word*, long, const W*, long, float*, long, Ahead);
    Run run = nullptr;
    if constexpr (Op::tall < NR) {
        static constexpr Run all[] = {swapped_rows<Op, W, M + 1>...};
        if (m <= HANDFUL) run = all[m - 1];
    }
    return run;
}

// Whether a product is made by `gemm_swapped`, of a B column by column; with more rows, or many columns of zeros in the
// last panel, bringing it takes less time. Of more than a handful of rows it does not round.
template <class Op, class W>
bool swaps(long M, long N, long K) {
    const bool whole = K > 0 && K % (2 * VL) == 0 && N % NR == 0;
    const bool some = M <= NR || (M <= 2 * NR && (M > NR + VL || Op::tall == NR));
    const bool few = std::is_same_v<W, rounded> ? M <= HANDFUL : some;
    return whole && few && up_to(M, NR) * K / Op::values <= KC * NC;
}

// As `gemm`, for few rows of A and a B whose columns lie in memory one after the other: (B^T A^T)^T. B is the left
// operand and stays where it is, A is brought once for all of it.
template <class Op, class W>
void gemm_swapped(
    long M, long N, long K, Left<typename Op::Word> a, const Right<W>& weight, typename Op::Word* b, float* c,
    const Ahead& then, Done done
) {
    using Word = typename Op::Word;
    const int parts = weight.parts;
    const long words = K / Op::values, width = Op::wide / parts;
    const Panels<Word> panels = {b, NR, words * NR};
    const auto few = pick_rows<Op, W>(M, std::make_integer_sequence<int, HANDFUL>());
    constexpr bool strips = std::is_same_v<W, typename Op::Value>;  // multiplied as they lie
    if constexpr (strips)
        if (!few) bring_transposed<Op>((const typename Op::Value*)a.p, a.ld * Op::values, K, M, panels);
    for (long n0 = 0; n0 < N; n0 += width) {
        const long nn = std::min(width, N - n0);
        for (int part = 0; part < parts; part++) {
            const auto row = [&](long n) { return weight.at(part, 0, n); };
            const auto from = [&](long n, long rows) {  // a part's next rows, behind the last part what comes then
                if (n < N) return weight.where(part, 0, K, n, rows);
                return part + 1 == parts && then.rows >= rows ? Ahead{then.p, then.ld, rows} : Ahead();
            };
            for (long n = n0; n < n0 + nn; n += NR) {
                float* to = c + part * width + n - n0;
                if (few) {
                    for (long i = 0; i < NR; i += VL)
                        few(words, a.p, a.ld, row(n + i), weight.ld, to + i, LDC, from(n + i + VL, VL));
                    continue;
                }
                if constexpr (strips) for (long m = 0; m < M; m += NR) {
                    alignas(64) float sums[NR * NR];
                    for (long i = 0; i < NR; i += Op::tall) {
                        const Ahead ask = m ? Ahead() : from(n + i + Op::tall, Op::tall);
                        const Word* strip = (const Word*)row(n + i);
                        const long ld = weight.ld / Op::values;
                        swapped_strip(Op(), words, M - m, strip, ld, b + m * words, sums + i * NR, ask);
                    }
                    for (long i = 0; i < NR; i += VL)
                        for (long j = 0; j < std::min<long>(NR, M - m); j += VL)
                            transpose_block(sums + i * NR + j, NR, to + (m + j) * LDC + i, LDC);
                }
            }
        }
        done(0, M, n0, nn, c);
    }
}

// Words of K whose rows of B `gemm_straight` holds in registers; its sums that wait, at most; and the rows of A up to
// which it takes less time than bringing B, NR, whose sums have room where B would lie: on Zen 4 of 1, 8 and
// 32 rows 0.43, 0.60 and 0.92 of it (float32, 1024 x 2048).
constexpr int HELD = VL == 16 ? 8 : 4;
constexpr long WAITING = 4096;

// Whether a product is made by `gemm_straight`, of a B row by row. Tiles cannot.
template <class Op>
bool straight(long M, long N, long K) {
    return Op::tall < NR && M > 0 && M <= NR && K > 0 && K % (2 * VL) == 0 && N % NR == 0;
}

// HELD words of K of NR columns of B, from `w` on, times M rows of A: added to `sums`, or written if they are the first.
template <class Op, class W>
INLINE void straight_block(
    long M, const typename Op::Word* a, long lda, const W* w, long ld, float* sums, long pitch, bool first
) {
    decltype(Op::spread(*a)) right[HELD][2];
    UNROLL for (int k = 0; k < HELD; k++) Op::read_rows(w + k * Op::values * ld, w + (k + 1) * Op::values * ld - ld, right[k]);
    for (int k = 0; k < HELD * Op::values; k++) expect<2>(w + (HELD * Op::values + k) * ld, NR);  // those that come next
    for (long m = 0; m < M; m++, a += lda, sums += pitch) {
        vf x = first ? vf{} : load(sums), y = first ? vf{} : load(sums + VL);
        UNROLL for (int k = 0; k < HELD; k++) {
            const auto v = Op::spread(a[k]);
            x = Op::add(x, v, right[k][0]);
            y = Op::add(y, v, right[k][1]);
        }
        store(sums, x);
        store(sums + VL, y);
    }
}

// As `gemm`, for few rows of A and a B whose rows lie in memory one after the other: read once from end to end, and
// neither brought nor turned. Sums are taken in the steps of `multiply`, so an element has the same bits.
template <class Op, class W>
void gemm_straight(
    long M, long N, long K, Left<typename Op::Word> a, const Right<W>& weight, float* b, float* c, Done done
) {
    const int parts = weight.parts;
    const long step = weight.step, width = Op::wide / parts, words = K / Op::values, ld = weight.ld;
    const int runs = step > 1 ? 1 : parts;  // columns in turn are read together
    const long chunk = std::max(width, WAITING / (M * parts) / width * width), pitch = chunk * step + VL;
    float *total = b, *sums = b + runs * M * pitch;
    for (long from = 0; from < N; from += chunk) {
        const long nn = std::min(chunk, N - from), columns = nn * step;
        for (int run = 0; run < runs; run++) {
            const W* w = weight.at(run, 0, from);
            float* all = total + run * M * pitch;
            for (long k0 = 0; k0 < words; k0 += Op::deep) {
                float* to = k0 ? sums : all;
                for (long k = k0; k < std::min(words, k0 + Op::deep); k += HELD)
                    for (long n = 0; n < columns; n += NR) {
                        const W* block = w + k * Op::values * ld + n;
                        straight_block<Op, W>(M, a.p + k, a.ld, block, ld, to + n, pitch, k == k0);
                    }
                for (long m = 0; k0 && m < M; m++)
                    for (long n = m * pitch; n < m * pitch + columns; n += VL)
                        store(all + n, load(sums + n) + load(all + n));
            }
        }
        const auto lanes = std::make_integer_sequence<int, VL>{};
        for (long n0 = 0; n0 < nn; n0 += width) {
            const long wide = std::min(width, nn - n0);
            for (long m = 0; m < M; m++) {
                for (long n = 0; n < wide; n += VL) {
                    float* to = c + m * LDC + n;
                    const float* got = total + m * pitch + (n0 + n) * step;
                    if (step == 1) {
                        for (int part = 0; part < parts; part++) store(to + part * width, load(got + part * M * pitch));
                        continue;
                    }
                    store(to, every_second<0>(load(got), load(got + VL), lanes));
                    store(to + width, every_second<1>(load(got), load(got + VL), lanes));
                }
            }
            done(0, M, from + n0, wide, c);
        }
    }
}
