// Expert MLPs on the CPU: the C ABI. See trimtab.kernels.compiled for what calls it.
#include "places.h"
#include "products.h"

#pragma GCC visibility push(default)
extern "C" {
int64_t trimtab_call_bytes() { return sizeof(Call); }
int64_t trimtab_scratch_floats(const Call* c) { return Shared(*c, waves(*c)).end - c->scratch; }
void trimtab_forward(const Call* c, float* sums, float* scratch) {
    const Call call = with_memory(*c, sums, scratch);
    with_weights(call, [&](auto t, auto w, auto op) { forward<decltype(t), decltype(w), decltype(op)>(call); });
}
void trimtab_backward(const Call* c, float* sums, float* scratch) {
    const Call call = with_memory(*c, sums, scratch);
    with_weights(call, [&](auto t, auto w, auto op) { backward<decltype(t), decltype(w), decltype(op)>(call); });
}
void trimtab_weight_gradients(const Call* c, float* sums, float* scratch) {
    const Call call = with_memory(*c, sums, scratch);
    with_operands(call, [&](auto t, auto op) { weight_gradients<decltype(t), decltype(op)>(call); });
}
int64_t trimtab_count_slots(
    const int64_t* ids, int64_t N, int64_t E, int64_t alignment, int64_t* counts, int64_t* offsets
) {
    return count_slots(ids, N, E, alignment, counts, offsets);
}
void trimtab_place_slots(
    const int64_t* ids, int64_t M, int64_t K, int64_t E, int64_t* counts, const int64_t* offsets, int64_t* slot_R,
    int64_t* row_R, int64_t* bag_index, int64_t* bag_offsets
) {
    place_slots(ids, M, K, E, counts, offsets, slot_R, row_R, bag_index, bag_offsets);
}

// The instructions that this was compiled for, and whether the machine has them.
const char* trimtab_isa() { return VL == 16 ? "AVX-512" : VL == 8 ? "AVX2" : "generic"; }
int32_t trimtab_lack(int32_t products) { return lack(products); }
int trimtab_runs_here() {
#if defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX2__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}
}
#pragma GCC visibility pop
