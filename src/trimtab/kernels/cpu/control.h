// How a thread rounds and whether denormals count to it: a team takes the word of the thread that called, for a row's
// bits must not depend on who computes it. On x86 alone.
#pragma once
#if defined(__x86_64__)
#include <immintrin.h>
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
