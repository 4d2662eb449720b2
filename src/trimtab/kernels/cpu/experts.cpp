// Expert MLPs on the CPU: the C ABI. See trimtab.kernels.compiled for what calls it.
#include "places.h"
#include "products.h"

#pragma GCC visibility push(default)
extern "C" {
void trimtab_forward(const Call* c) {
    with_weights(*c, [&](auto t, auto w, auto op) { forward<decltype(t), decltype(w), decltype(op)>(*c); });
}
void trimtab_backward(const Call* c) {
    with_weights(*c, [&](auto t, auto w, auto op) { backward<decltype(t), decltype(w), decltype(op)>(*c); });
}
void trimtab_weight_gradients(const Call* c) {
    with_operands(*c, [&](auto t, auto op) { weight_gradients<decltype(t), decltype(op)>(*c); });
}
void trimtab_count_slots(const Places* p) { count_slots(*p); }
void trimtab_place_slots(const Places* p) { place_slots(*p); }
int64_t trimtab_scratch_floats(const Call* c) { return Shared(*c, waves(*c)).end - c->scratch; }
int64_t trimtab_call_bytes() { return sizeof(Call); }
int64_t trimtab_places_bytes() { return sizeof(Places); }

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
