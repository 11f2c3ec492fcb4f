// Floors for a selection (see candidates.cuh): given thresholds, or such as a random sample or fitted
// exponential tails suggest. See cpu/sparsifiers/threshold.py, which these equal bit for bit.

struct Aim {       // of a tensor; they lie behind the parts of its table
    u64 key;       // of the sample's random numbers
    u32 drawn;     // entries of the sample
    u32 rank;      // of the estimated threshold in it
    double value;  // a threshold to begin with, or the weight of a stage of fitting; 0: there is none
};
static_assert(sizeof(Aim) == sizeof(Part), "an aim takes a part's place");

INLINE const Aim& aim_of(const Selection& all, int number) {
    return ((const Aim*)(all.table.parts + MOST_SEGMENTS))[number];
}

INLINE bool is_finite(double value) { return value - value == 0.0; }
INLINE u32 floor_of(double threshold) { return magnitude_bits((float)threshold); }

// A CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) begin(const __grid_constant__ Selection all) {
    State& state = all.states[blockIdx.x];
    const Aim& aim = aim_of(all, blockIdx.x);
    for (int j = threadIdx.x; j < 2048; j += THREADS) state.counts[j] = 0;
    if (threadIdx.x) return;
    state.value = aim.value, state.floor = floor_of(aim.value);
    state.prefix = 0, state.left = aim.rank, state.total = 0, state.least = 0, state.lower = 0;
}

// -- a threshold by a sample ----------------------------------------------------------------------

// Lay the sample out as if it were candidates, for the radix search. A CUDA block for each unit.
extern "C" __global__ void __launch_bounds__(THREADS) draw(const __grid_constant__ Selection all) {
    const int number = segment_of(all.table, blockIdx.x);
    const Segment& segment = all.table.segments[number];
    const Aim& aim = aim_of(all, number);
    const i64 base = (blockIdx.x - segment.first) * UNIT, slot = (i64)blockIdx.x * UNIT;
    const int count = (int)smaller(larger((i64)aim.drawn - base, (i64)0), (i64)UNIT);
    for (int j = threadIdx.x; j < count; j += THREADS) {
        const u64 place = (u64)squares(aim.key, base + j) * (u64)segment.n >> 32;
        all.values[slot + j] = selected_from(all.table, segment, (i64)place);
    }
    if (threadIdx.x == 0) all.counts[blockIdx.x] = count;
}

// Take what the search has found as the threshold. A thread for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) adopt(const __grid_constant__ Selection all) {
    if (threadIdx.x >= all.table.count) return;
    State& state = all.states[threadIdx.x];
    state.value = float_of(state.prefix);
    state.floor = is_finite(state.value) ? state.prefix : 0, state.prefix = 0;
}

// -- a threshold by fitting -----------------------------------------------------------------------

INLINE bool is_fitted(const Selection& all, int number) {
    return aim_of(all, number).value == 0.0 || !is_finite(all.states[number].value);
}

// The sum and the number of magnitudes that reach the floor. A CUDA block for each chunk.
extern "C" __global__ void __launch_bounds__(THREADS) exceed(const __grid_constant__ Selection all) {
    __shared__ u32 passing;
    const int number = segment_of(all.table, blockIdx.x);
    if (is_fitted(all, number)) return;
    const Segment& segment = all.table.segments[number];
    const i64 base = (blockIdx.x - segment.first) * CHUNK;
    const u32 floor = all.states[number].floor;
    u32 mine = 0;
    if (threadIdx.x == 0) passing = 0;
    const auto load = [&](int at, int count, float* v) {
        if (count > 0) load_selected(all.table, segment, base + at, count, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 bits = magnitude_bits(v[e]);
            const bool passes = e < count && bits >= floor;
            mine += passes, v[e] = passes ? float_of(bits) : 0.0f;
        }
    };
    const int size = (int)smaller(segment.n - base, (i64)CHUNK);
    const double sum = chunk_sum(size, load, [](float v) { return (double)v; });
    if (mine) atomicAdd(&passing, mine);
    __syncthreads();
    if (threadIdx.x == 0) all.sums[blockIdx.x] = sum, all.passing[blockIdx.x] = passing;
}

// Move the threshold by a stage. A CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) fit(const __grid_constant__ Selection all) {
    __shared__ u32 passing;
    if (is_fitted(all, blockIdx.x)) return;
    const Segment& segment = all.table.segments[blockIdx.x];
    State& state = all.states[blockIdx.x];
    const int chunks = chunks_of(segment.n);
    if (threadIdx.x == 0) passing = 0;
    const double total = ordered_sum(all.sums + segment.first, chunks);
    for (int j = threadIdx.x; j < chunks; j += THREADS)
        atomicAdd(&passing, all.passing[segment.first + j]);
    __syncthreads();
    if (threadIdx.x || passing == 0) return;
    const double value = state.value;
    state.value = value + (total / (double)passing - value) * aim_of(all, blockIdx.x).value;
    state.floor = is_finite(state.value) ? floor_of(state.value) : 0;
}
