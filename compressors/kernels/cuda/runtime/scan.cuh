// Reductions and scans over the THREADS threads of a block: a multiple of 32.

#define WARPS (THREADS / 32)

// The sum of value over the threads before this one; total becomes that over all.
INLINE u32 scan_before(u32 value, u32& total) {
    __shared__ u32 sums[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 upto = value;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const u32 other = __shfl_up_sync(0xFFFFFFFFu, upto, by);
        if (lane >= by) upto += other;
    }
    __syncthreads();  // an earlier call's sums have been read
    if (lane == 31) sums[warp] = upto;
    __syncthreads();
    u32 before = 0;
    total = 0;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += sums[w];
        total += sums[w];
    }
    return before + upto - value;
}

INLINE u32 block_max(u32 value) {
    __shared__ u32 tops[WARPS];
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, other));
    __syncthreads();
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = value;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) value = larger(value, tops[w]);
    return value;
}

// Of BINS counts in shared memory, find the bin that holds the left-th from the top. Sets left to its
// rank inside that bin. Every thread gets the same answer.
template <int BINS> INLINE u32 bin_from_top(const u32* counts, u32& left) {
    constexpr int EACH = (BINS + THREADS - 1) / THREADS;
    __shared__ u32 answer[2];
    u32 mine = 0, total;
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
        const int place = threadIdx.x * EACH + j;
        if (place < BINS) mine += counts[BINS - 1 - place];
    }
    u32 before = scan_before(mine, total);
    if (before < left && left <= before + mine) {
        for (int j = 0; j < EACH; ++j) {
            const int place = threadIdx.x * EACH + j;
            if (place >= BINS) break;
            const u32 here = counts[BINS - 1 - place];
            if (before < left && left <= before + here) {
                answer[0] = BINS - 1 - place, answer[1] = left - before;
                break;
            }
            before += here;
        }
    }
    __syncthreads();
    const u32 bin = answer[0];
    left = answer[1];
    __syncthreads();  // answer and counts may be written again
    return bin;
}
