// The k entries of largest magnitude of whole tensors, exactly, lowest index first among equals, and
// without the host's help (see cpu/sparsifiers/topk.py, which this equals entry for entry).
//
// A sample gives a floor that a little more than k entries reach. One pass over memory lists those,
// the candidates; should they be fewer than k, everything becomes a candidate. The k-th magnitude is
// then found among them (see candidates.cuh).

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
