// For LD_PRELOAD: bytes alive in malloc and in anonymous mappings, and the most that ever were. Knows nothing of torch.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <dlfcn.h>
#include <malloc.h>
#include <sys/mman.h>

namespace {
std::atomic<long> alive{0}, most{0};
struct Span {
    char* at;
    size_t size;
} spans[1 << 14];  // anonymous mappings; of files none is counted, nor its end
std::atomic_flag busy = ATOMIC_FLAG_INIT;

void add(long bytes) {
    const long now = alive.fetch_add(bytes) + bytes;
    for (long top = most.load(); now > top && !most.compare_exchange_weak(top, now);) {}
}
void* born(void* p) {
    if (p) add((long)malloc_usable_size(p));
    return p;
}
// A free one, or the one in which `p` lies.
Span* span_of(char* p, bool free) {
    for (Span& span : spans)
        if (free ? !span.size : span.size && span.at <= p && p < span.at + span.size) return &span;
    return nullptr;
}
using Map = void* (*)(void*, size_t, int, int, int, off_t);
using Unmap = int (*)(void*, size_t);
}  // namespace

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

long heap_now() { return alive; }
long heap_most() { return most; }
void heap_reset() { most = alive.load(); }

void* malloc(size_t n) { return born(__libc_malloc(n)); }
void* calloc(size_t a, size_t b) { return born(__libc_calloc(a, b)); }
void* memalign(size_t a, size_t n) { return born(__libc_memalign(a, n)); }
void* aligned_alloc(size_t a, size_t n) { return born(__libc_memalign(a, n)); }
int posix_memalign(void** p, size_t a, size_t n) {
    *p = born(__libc_memalign(a, n));
    return *p ? 0 : ENOMEM;
}
void* realloc(void* p, size_t n) {
    const long before = p ? (long)malloc_usable_size(p) : 0;
    void* q = __libc_realloc(p, n);
    if (q) add((long)malloc_usable_size(q) - before);
    else if (!n) add(-before);
    return q;
}
void free(void* p) {
    if (!p) return;
    add(-(long)malloc_usable_size(p));
    __libc_free(p);
}
void* mmap(void* at, size_t n, int prot, int flags, int fd, off_t offset) {
    static const Map real = (Map)dlsym(RTLD_NEXT, "mmap");
    void* p = real(at, n, prot, flags, fd, offset);
    if (p != MAP_FAILED && (flags & MAP_ANONYMOUS) && (prot & PROT_WRITE)) {
        while (busy.test_and_set()) {}
        if (Span* span = span_of(nullptr, true)) {
            *span = {(char*)p, n};
            add((long)n);
        }
        busy.clear();
    }
    return p;
}
void* mmap64(void* at, size_t n, int prot, int flags, int fd, off_t offset) {
    return mmap(at, n, prot, flags, fd, offset);
}
int munmap(void* at, size_t n) {
    static const Unmap real = (Unmap)dlsym(RTLD_NEXT, "munmap");
    const int done = real(at, n);
    while (busy.test_and_set()) {}
    if (Span* span = done ? nullptr : span_of((char*)at, false)) {  // its end, or all of it
        const size_t less = n < span->size ? n : span->size;
        if (span->at == at) span->at += less;
        span->size -= less;
        add(-(long)less);
    }
    busy.clear();
    return done;
}
}
