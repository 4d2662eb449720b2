// Slots grouped by expert, in their own order within one: counted, then dealt out.
#pragma once
#include <algorithm>
#include <cstdint>

struct Places {  // mirrored by trimtab.kernels.abi, field by field
    int64_t M, K, E, alignment;
    const int64_t* ids;                // [M, K]; what is not in 0..E - 1 is dropped
    int64_t *counts, *offsets;         // [E], [E + 1]
    int64_t *slot_R, *row_R;           // [offsets[E]]; -1 in padding
    int64_t *bag_index, *bag_offsets;  // places of each row's kept slots, [the sum of counts], and [M + 1]
};

inline bool kept(const Places& p, int64_t n) { return p.ids[n] >= 0 && p.ids[n] < p.E; }

// First, for the sizes of what `place_slots` writes.
inline void count_slots(const Places& p) {
    std::fill(p.counts, p.counts + p.E, 0);
    for (int64_t n = 0; n < p.M * p.K; n++)
        if (kept(p, n)) p.counts[p.ids[n]]++;
    p.offsets[0] = 0;
    for (int64_t e = 0; e < p.E; e++)
        p.offsets[e + 1] = p.offsets[e] + (p.counts[e] + p.alignment - 1) / p.alignment * p.alignment;
}

inline void place_slots(const Places& p) {
    for (int64_t e = 0; e < p.E; e++) {
        const int64_t end = p.offsets[e] + p.counts[e], next = p.offsets[e + 1];
        std::fill(p.slot_R + end, p.slot_R + next, -1);
        std::fill(p.row_R + end, p.row_R + next, -1);
    }
    int64_t* next = p.counts;  // the next place of each expert, until the end of this loop
    std::copy(p.offsets, p.offsets + p.E, next);
    int64_t bags = p.bag_offsets[0] = 0;
    for (int64_t m = 0, n = 0; m < p.M; m++) {
        for (int64_t k = 0; k < p.K; k++, n++) {
            if (!kept(p, n)) continue;
            const int64_t at = next[p.ids[n]]++;
            p.slot_R[at] = n;
            p.row_R[at] = m;
            p.bag_index[bags++] = at;
        }
        p.bag_offsets[m + 1] = bags;
    }
    for (int64_t e = 0; e < p.E; e++) p.counts[e] -= p.offsets[e];
}
