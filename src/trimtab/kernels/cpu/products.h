// Which products of bf16 this library can make on this machine, and what runs for a call.
#pragma once
#include <cerrno>

#include "backward.h"
#include "forward.h"
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
        run(t, t, op);
    });
}
