// The k entries of largest magnitude of whole tensors, exactly, lowest index first among equals, and
// without the host's help (see cpu/sparsifiers/topk.py, which this equals entry for entry).
//
// A sample gives a floor that a little more than k entries reach. One pass over memory lists those,
// the candidates (see candidates.cuh); should they be fewer than k, everything becomes a candidate. The
// k-th magnitude is then found among them by radix: 11, 10 and 10 bits. What is sent is forgotten in
// the residual at the end.

#define SAMPLE 4096

// A CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ Selection all) {
    __shared__ u32 magnitudes[SAMPLE], counts[2048];
    const Segment& segment = all.table.segments[blockIdx.x];
    State& state = all.states[blockIdx.x];
    const u32 k = (u32)segment.key;
    const i64 stride = segment.n / SAMPLE;
    const float expected = (float)k / (float)segment.n * SAMPLE;
    u32 rank = (u32)(expected + 4.0f * sqrtf(expected) + 2.0f), prefix = 0;
    if (stride >= 4 && rank < SAMPLE) {
        for (int j = threadIdx.x; j < SAMPLE; j += THREADS)
            magnitudes[j] = magnitude_bits(selected_from(all.table, segment, j * stride));
        for (int level = 0; level < 3; ++level) {
            const int shift = 20 - 10 * level, bins = level ? 1024 : 2048;
            for (int j = threadIdx.x; j < bins; j += THREADS) counts[j] = 0;
            __syncthreads();
            for (int j = threadIdx.x; j < SAMPLE; j += THREADS)
                if (level == 0 || magnitudes[j] >> (shift + 10) == prefix)
                    atomicAdd(&counts[(magnitudes[j] >> shift) & (bins - 1)], 1u);
            __syncthreads();
            if (level == 0) prefix = bin_from_top<2048>(counts, rank);
            else prefix = prefix << 10 | bin_from_top<1024>(counts, rank);
        }
    }
    for (int j = threadIdx.x; j < 2048; j += THREADS) state.counts[j] = 0;
    if (threadIdx.x == 0) {
        state.prefix = 0, state.left = k, state.total = 0;
        state.floor = smaller(prefix, INFINITE);  // see widen
        state.least = k, state.lower = 0;
    }
}

// A level of the radix search; its number is in table.shards. Blocks of 64 units from here on.
extern "C" __global__ void __launch_bounds__(THREADS) tally(const __grid_constant__ Selection all) {
    __shared__ u32 counts[2048];
    const int number = segment_of(all.table, blockIdx.x), level = all.table.shards;
    const int shift = 20 - 10 * level, bins = level ? 1024 : 2048;
    State& state = all.states[number];
    const u32 prefix = state.prefix;
    for (int j = threadIdx.x; j < bins; j += THREADS) counts[j] = 0;
    __syncthreads();
    each_unit(all, number, [&](int unit, int lane) {
        const i64 there = all.table.segments[number].start + unit;
        for (u32 j = lane; j < all.counts[there]; j += 32) {
            const u32 bits = magnitude_bits(all.values[there * UNIT + j]);
            if (level == 0 || bits >> (shift + 10) == prefix)
                atomicAdd(&counts[(bits >> shift) & (bins - 1)], 1u);
        }
    });
    __syncthreads();
    for (int j = threadIdx.x; j < bins; j += THREADS)
        if (counts[j]) atomicAdd(&state.counts[j], counts[j]);
}

// A CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) narrow(const __grid_constant__ Selection all) {
    State& state = all.states[blockIdx.x];
    u32 left = state.left;
    const u32 prefix = state.prefix;
    __syncthreads();
    u32 bin = 0;
    if (left)  // else nothing is to be selected
        bin = all.table.shards ? bin_from_top<1024>(state.counts, left)
                               : bin_from_top<2048>(state.counts, left);
    if (threadIdx.x == 0)
        state.prefix = all.table.shards ? prefix << 10 | bin : bin, state.left = left;
    for (int j = threadIdx.x; j < 2048; j += THREADS) state.counts[j] = 0;
}

// How many candidates of each unit are larger than the k-th magnitude, and how many equal it.
extern "C" __global__ void __launch_bounds__(THREADS) rank(const __grid_constant__ Selection all) {
    const int number = segment_of(all.table, blockIdx.x);
    const u32 threshold = all.states[number].prefix;
    each_unit(all, number, [&](int unit, int lane) {
        const i64 there = all.table.segments[number].start + unit;
        const u32 count = all.counts[there];
        u32 above = 0, equal = 0;
        for (u32 start = 0; start < count; start += 32) {
            const bool any = start + lane < count;
            const u32 bits = any ? magnitude_bits(all.values[there * UNIT + start + lane]) : 0;
            above += __popc(__ballot_sync(0xFFFFFFFFu, any && bits > threshold));
            equal += __popc(__ballot_sync(0xFFFFFFFFu, any && bits == threshold));
        }
        if (lane == 0) all.places[2 * there] = above, all.places[2 * there + 1] = equal;
    });
}

// Replace them by how many there are in the units before. A CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) order(const __grid_constant__ Selection all) {
    const Segment& segment = all.table.segments[blockIdx.x];
    const int units = units_of(segment), each = (units + THREADS - 1) / THREADS;
    const int first = threadIdx.x * each, last = smaller(first + each, units);
    for (int which = 0; which < 2; ++which) {
        u32* counts = all.places + 2 * segment.start + which;
        u32 mine = 0, total;
        for (int unit = first; unit < last; ++unit) mine += counts[2 * unit];
        u32 before = scan_before(mine, total);
        for (int unit = first; unit < last; ++unit) {
            const u32 here = counts[2 * unit];
            counts[2 * unit] = before;
            before += here;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) emit(const __grid_constant__ Selection all) {
    const int number = segment_of(all.table, blockIdx.x);
    const Segment& segment = all.table.segments[number];
    const Part& part = all.table.parts[number];
    const u32 threshold = all.states[number].prefix, ties = all.states[number].left;
    each_unit(all, number, [&](int unit, int lane) {
        const i64 there = segment.start + unit;
        const u32 count = all.counts[there], lower = (1u << lane) - 1;
        u32 above = all.places[2 * there], equal = all.places[2 * there + 1];
        for (u32 start = 0; start < count; start += 32) {
            const bool any = start + lane < count;
            const i64 slot = there * UNIT + start + lane;
            const float v = any ? all.values[slot] : 0.0f;
            const u32 bits = magnitude_bits(v);
            const u32 larger_ones = __ballot_sync(0xFFFFFFFFu, any && bits > threshold);
            const u32 tied_ones = __ballot_sync(0xFFFFFFFFu, any && bits == threshold);
            const u32 rank = equal + __popc(tied_ones & lower);
            if (any && (bits > threshold || (bits == threshold && rank < ties))) {
                const u32 place = above + __popc(larger_ones & lower) + smaller(rank, ties);
                const u32 index = (u32)unit * UNIT + all.offsets[slot];
                ((u32*)part.codes)[place] = index;
                ((float*)part.scales)[place] = v;
                if (FEEDBACK && is_finite(v)) segment.residual[index] = 0.0f;
                if (all.table.flag && !is_finite(v)) *all.table.flag = 1;
            }
            above += __popc(larger_ones), equal += __popc(tied_ones);
        }
    });
}
