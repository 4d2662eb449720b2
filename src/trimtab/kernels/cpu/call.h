// One call of the experts of a rank: what crosses the C ABI. Mirrored by trimtab.kernels.compiled, field by field.
//
// Legend: M rows, K slots per row, R expert rows, E experts, D model dim, F expert hidden dim, I = 2F with a gate,
// else F, r an adapter's rank. Rows are float or bf16, weights too or, beside rows of bf16, float that counts as what it is rounded to. Gate and
// up of `pre` are halves of a row however the parameters hold them.
#pragma once
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Codes from NF4 to MXFP4 (codes.h); PACKED are values of the rows' type (packed.h).
enum Type : int32_t { FLOAT = 0, BFLOAT = 1, NF4 = 2, INT8 = 3, FP8 = 4, MXFP4 = 5, PACKED = 6 };
enum Products : int32_t { WIDENED = 0, AVX512_BF16 = 1, AMX_BF16 = 2 };
enum Act : int32_t { SWIGLU = 0, GEGLU = 1, GEGLU_TANH = 2, CLAMPED = 3, RELU2 = 4, GELU = 5, GELU_TANH = 6 };

struct Call {
    int32_t type, type_weights, products, threads;  // products: of bf16
    int32_t act;
    int32_t transposed;   // up is [E, D, I] and down [E, F, D], else [E, I, D] and [E, D, F]
    int32_t type_up, type_down;  // of the gradients
    int32_t add_up, add_down;    // to what they hold
    int32_t interleaved;         // gate and up are in the parameters, else gate first
    float alpha, limit, shift;   // of CLAMPED
    float scale_up, scale_down;  // of adapters
    int64_t M, R, E, D, F;
    int64_t rank_up, rank_down;  // 0 where there is no adapter
    const int64_t *row_R, *slot_R, *offsets;
    const float* w;                // [M, K]
    const void *x, *up, *down;     // rows [M, D]
    const void *up_bias, *down_bias;  // [E, I], [E, D], or null
    void* pre;                     // [R, I], or null if no backward comes
    void* y;                       // [M, D], or null if pre is all that is wanted
    const void* dy;                // [M, D]
    void* d_pre;                   // [R, I] in the parameters' order; null if the weights' gradients come with the rows'
    void* dx;                      // [M, D], or null where it is not wanted
    float* dw;                     // [M, K], zeros before
    void *d_up, *d_down;           // like the parameters, or null
    void *d_up_bias, *d_down_bias;  // float [E, I], [E, D], or null
    const void *up_a, *up_b, *down_a, *down_b;  // [E, r, D], [E, I, r], [E, r, F], [E, D, r], of the weights' type or, beside codes, the rows'
    void *u_up, *u_down;           // [R, r]: scale x a^T and scale h w a^T, from a forward to its backward, or null
    void *v_up, *v_down;           // [R, r]: scale d_pre b and scale dy b
    float *d_up_a, *d_up_b, *d_down_a, *d_down_b;  // like the adapters, or null
    const void *up_scales, *down_scales;  // of codes
    float* sums;                   // [M, D]: where y or dx are bf16, tokens' sums while they grow
    float* scratch;                // `scratch_floats`
};
inline Call with_memory(Call c, float* sums, float* scratch) {
    c.sums = sums, c.scratch = scratch;
    return c;
}

inline bool gated(const Call& c) { return c.act <= CLAMPED; }
inline int64_t width(const Call& c) { return gated(c) ? 2 * c.F : c.F; }

// How a thread rounds and whether denormals count to it: a team takes the word of the thread that called, for a row's
// bits must not depend on who computes it. On x86 alone.
#if defined(__x86_64__)
inline unsigned control_word() { return _mm_getcsr(); }
inline void set_control_word(unsigned word) { _mm_setcsr(word); }
#else
inline unsigned control_word() { return 0; }
inline void set_control_word(unsigned) {}
#endif

struct Controlled {  // by the caller's word, until its end
    const unsigned own = control_word();
    explicit Controlled(unsigned word) { set_control_word(word); }
    ~Controlled() { set_control_word(own); }
};
