// Slots grouped by expert, in their own order within one: counted, then dealt out.
#pragma once
#include <algorithm>
#include <cstdint>

inline bool kept(int64_t id, int64_t E) { return id >= 0 && id < E; }

// counts [E] and offsets [E + 1] of ids [N], of which those that are not in 0..E - 1 are dropped. How many places
// there are: what `place_slots` writes has that size.
inline int64_t count_slots(
    const int64_t* ids, int64_t N, int64_t E, int64_t alignment, int64_t* counts, int64_t* offsets
) {
    std::fill(counts, counts + E, 0);
    for (int64_t n = 0; n < N; n++)
        if (kept(ids[n], E)) counts[ids[n]]++;
    offsets[0] = 0;
    for (int64_t e = 0; e < E; e++) offsets[e + 1] = offsets[e] + (counts[e] + alignment - 1) / alignment * alignment;
    return offsets[E];
}

// Of ids [M, K]: slot_R and row_R, -1 in padding; the places of each row's kept slots, bag_index [the sum of counts]
// and bag_offsets [M + 1].
inline void place_slots(
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
