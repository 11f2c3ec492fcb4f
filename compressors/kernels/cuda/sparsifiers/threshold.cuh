// How many of a selection's candidates are taken (see estimate.cuh for the floors that they reach).
// With a threshold that is an estimate those are from 0.8 k to 1.3 k entries, or exactly k.

#define ATTEMPTS 10  // floors that are tried, each a fifth below the one before

INLINE double wanted(const Segment& segment) { return (double)segment.key; }

INLINE bool is_reached(const Segment& segment, const State& state) {
    return !is_finite(state.value) || (double)state.total >= 0.8 * wanted(segment);
}

// Where too few entries reach the floor, count how many reach the lower ones: each entry at the first
// that it does reach. A CUDA block for each unit.
extern "C" __global__ void __launch_bounds__(THREADS) survey(const __grid_constant__ Selection all) {
    __shared__ float cache[UNIT];
    __shared__ u32 floors[ATTEMPTS], found[ATTEMPTS];
    const int number = segment_of(all.table, blockIdx.x);
    State& state = all.states[number];
    if (is_reached(all.table.segments[number], state)) return;
    if (threadIdx.x < ATTEMPTS) {
        double threshold = state.value;
        for (int j = 0; j < (int)threadIdx.x; ++j) threshold *= 0.8;
        floors[threadIdx.x] = floor_of(threshold), found[threadIdx.x] = 0;
    }
    const int size = reread(all, number, cache);
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const u32 bits = magnitude_bits(cache[i]);
        int level = 0;
        while (level < ATTEMPTS && bits < floors[level]) ++level;
        if (level < ATTEMPTS) atomicAdd(&found[level], 1u);
    }
    __syncthreads();
    if (threadIdx.x < ATTEMPTS && found[threadIdx.x])
        atomicAdd(&state.counts[threadIdx.x], found[threadIdx.x]);
}

// All that reach the highest floor that 0.8 k entries reach, but k alone if that is more than 1.3 k or
// if there is no such floor. A thread for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) decide(const __grid_constant__ Selection all) {
    if (threadIdx.x >= all.table.count) return;
    const Segment& segment = all.table.segments[threadIdx.x];
    State& state = all.states[threadIdx.x];
    u32 reached = state.total;
    if (!is_reached(segment, state)) {
        double threshold = state.value;
        state.least = 0xFFFFFFFFu;  // the lower floor it is
        for (int j = 1; j < ATTEMPTS; ++j) {
            threshold *= 0.8;
            if ((double)reached < 0.8 * wanted(segment))
                reached += state.counts[j], state.lower = floor_of(threshold);
        }
        for (int j = 0; j < ATTEMPTS; ++j) state.counts[j] = 0;
    }
    const bool few = (double)reached < 0.8 * wanted(segment);
    if (few) state.lower = 0;
    const bool all_of_them = is_finite(state.value) && !few && (double)reached <= 1.3 * wanted(segment);
    state.left = all.taken[threadIdx.x] = all_of_them ? reached : (u32)segment.key;
}

// All that reach the floor, but at most k. A thread for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) cap(const __grid_constant__ Selection all) {
    if (threadIdx.x >= all.table.count) return;
    State& state = all.states[threadIdx.x];
    state.left = all.taken[threadIdx.x] = smaller(state.total, (u32)all.table.segments[threadIdx.x].key);
}
