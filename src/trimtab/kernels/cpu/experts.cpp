// Expert MLPs on the CPU: the C ABI, and which products of bf16 run for a call. trimtab.kernels.compiled calls it.
#include <cerrno>

#include "backward.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum Lack : int32_t { NOTHING = 0, CPU = 1, COMPILER = 2, SYSTEM = 3 };

inline bool cpu_has(int32_t products) {
#if defined(__x86_64__)
    unsigned a = 0, b, c, d = 0;
    if (products == AMX_BF16) return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
#else
    return false;
#endif
}

// Linux hands out the tiles to a process that asks for them, and to all of its threads; asking again does no harm.
inline bool tiles_permitted() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    const int before = errno;
    const bool granted = syscall(SYS_arch_prctl, request, tile_data) == 0;
    errno = before;
    return granted;
#else
    return false;
#endif
}

inline Lack lack(int32_t products) {
#if defined(TRIMTAB_EMULATE_BF16)
    return NOTHING;
#endif
    if (products == WIDENED) return NOTHING;
    if (!cpu_has(products)) return CPU;
#if defined(HAVE_DOT)
    if (products == AVX512_BF16) return NOTHING;
#endif
#if defined(HAVE_AMX)
    if (products == AMX_BF16) return tiles_permitted() ? NOTHING : SYSTEM;
#endif
    return COMPILER;
}

// run(value of the rows' type, operands) for what the call asks for, of which there is no lack.
template <class Run>
void with_operands(const Call& c, Run run) {
    if (c.type == FLOAT) return run(float(), Floats());
#if defined(HAVE_AMX)
    if (c.products == AMX_BF16) return run(bf16(), Amx());
#endif
#if defined(HAVE_DOT)
    if (c.products == AVX512_BF16) return run(bf16(), Dots());
#endif
    run(bf16(), Floats());
}

// And for its weights' type: run(of the rows, of the weights, operands).
template <class Run>
void with_weights(const Call& c, Run run) {
    with_operands(c, [&](auto t, auto op) {
        if constexpr (sizeof(t) == sizeof(bf16))
            if (c.type_weights == FLOAT) return run(t, rounded(), op);
        if (c.type_weights == PACKED) return run(t, packed<decltype(t)>(), op);
        if (c.type_weights >= NF4) return run(t, coded<decltype(t)>(), op);
        run(t, t, op);
    });
}

inline bool kept(int64_t id, int64_t E) { return id >= 0 && id < E; }

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

// counts [E] and offsets [E + 1] of ids [N], of which those that are not in 0..E - 1 are dropped.
void trimtab_count_slots(
    const int64_t* ids, int64_t N, int64_t E, int64_t alignment, int64_t* counts, int64_t* offsets
) {
    std::fill(counts, counts + E, 0);
    for (int64_t n = 0; n < N; n++)
        if (kept(ids[n], E)) counts[ids[n]]++;
    offsets[0] = 0;
    for (int64_t e = 0; e < E; e++) offsets[e + 1] = offsets[e] + (counts[e] + alignment - 1) / alignment * alignment;
}

// Of ids [M, K]: slot_R and row_R, -1 in padding; the places of each row's kept slots, bag_index [the sum of counts]
// and bag_offsets [M + 1].
void trimtab_place_slots(
    const int64_t* ids, int64_t M, int64_t K, int64_t E, int64_t* counts, const int64_t* offsets, int64_t* slot_R,
    int64_t* row_R, int64_t* bag_index, int64_t* bag_offsets
) {
    for (int64_t e = 0; e < E; e++) {
        const int64_t end = offsets[e] + counts[e], next = offsets[e + 1];
        std::fill(slot_R + end, slot_R + next, -1);
        std::fill(row_R + end, row_R + next, -1);
    }
    int64_t* next = counts;  // the next place of each expert, until the end of this loop
    std::copy(offsets, offsets + E, next);
    int64_t bags = bag_offsets[0] = 0;
    for (int64_t m = 0, n = 0; m < M; m++) {
        for (int64_t k = 0; k < K; k++, n++) {
            if (!kept(ids[n], E)) continue;
            const int64_t at = next[ids[n]]++;
            slot_R[at] = n;
            row_R[at] = m;
            bag_index[bags++] = at;
        }
        bag_offsets[m + 1] = bags;
    }
    for (int64_t e = 0; e < E; e++) counts[e] -= offsets[e];
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
