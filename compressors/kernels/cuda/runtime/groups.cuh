// Reductions over the GROUP threads that share a bucket: a power of two, at most a warp.
// All threads of a warp take part, also those whose group has no bucket.

#define WHOLE_WARP 0xFFFFFFFFu
#define LANES 32  // as in the CPU kernels: element i of a bucket is added to sum i % LANES

INLINE u32 group_max(u32 value) {
#pragma unroll
    for (int other = GROUP / 2; other > 0; other /= 2)
        value = larger(value, __shfl_xor_sync(WHOLE_WARP, value, other));
    return value;
}

INLINE int group_max(int value) {
#pragma unroll
    for (int other = GROUP / 2; other > 0; other /= 2)
        value = larger(value, __shfl_xor_sync(WHOLE_WARP, value, other));
    return value;
}

// The sum of term(i) for i below count, in the order of the CPU kernels. A thread does LANES / GROUP
// of the sums side by side; halves are then added until one sum is left.
template <class Term> INLINE double lane_sum(const Term& term, int count, int lane) {
    double sums[LANES / GROUP];
#pragma unroll
    for (int k = 0; k < LANES / GROUP; ++k) sums[k] = 0.0;
    for (int start = 0; start < count; start += LANES) {
#pragma unroll
        for (int k = 0; k < LANES / GROUP; ++k) {
            const int i = start + k * GROUP + lane;
            if (i < count) sums[k] += term(i);
        }
    }
#pragma unroll
    for (int width = LANES / 2; width >= GROUP; width /= 2) {
#pragma unroll
        for (int k = 0; k < width / GROUP; ++k) sums[k] += sums[k + width / GROUP];
    }
    double total = sums[0];
#pragma unroll
    for (int other = GROUP / 2; other > 0; other /= 2)
        total += __shfl_xor_sync(WHOLE_WARP, total, other);
    return total;
}

// The same with eight sums, which are added one after another at the end.
template <class Term> INLINE double eight_sums(const Term& term, int count, int lane) {
    double sums[8 / GROUP > 0 ? 8 / GROUP : 1];
#pragma unroll
    for (int k = 0; k * GROUP < 8; ++k) {
        sums[k] = 0.0;
        if (lane < 8)
            for (int i = k * GROUP + lane; i < count; i += 8) sums[k] += term(i);
    }
    double total = 0.0;
#pragma unroll
    for (int j = 0; j < 8; ++j)
        total += __shfl_sync(WHOLE_WARP, sums[j / GROUP], j % GROUP, GROUP);
    return total;
}
