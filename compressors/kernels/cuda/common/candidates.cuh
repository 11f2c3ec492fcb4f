// Candidates of a selection: the entries of whole tensors that reach a floor, listed unit by unit in
// the order of their indices, in one pass over memory.
//
// With FEEDBACK the sum with the residual is what is looked at, and becomes the residual in the same
// pass where it is finite. Where the floor turns out to be too high, a second one takes its place.

#define UNIT 4096    // elements whose candidates lie together
#define TOGETHER 64  // units that a CUDA block looks at when it works on candidates
#define INFINITE 0x7F800000u  // a floor is never above it

struct State {     // of one tensor
    double value;  // an estimated threshold (see estimate.cuh)
    u32 prefix;    // of the magnitude that is searched for, finally all of it
    u32 left;      // rank among those with that prefix, finally how many that equal it are taken
    u32 total;     // candidates at the first floor
    u32 floor;
    u32 least;  // if there are fewer, all that reach the lower floor become candidates
    u32 lower;
    u32 counts[2048];
};

struct Selection {
    Table table;   // key: how many entries are wanted; start: number of the segment's first unit
    u16* offsets;  // of candidates inside their unit, ascending
    float* values;
    u32* counts;  // candidates of a unit
    u32* places;  // of a unit: how many larger, and how many equal to the threshold
    State* states;
    u32* taken;    // of a tensor: how many entries are selected
    double* sums;  // of chunks (see estimate.cuh)
    u32* passing;
};

INLINE float selected_from(const Table& table, const Segment& segment, i64 i) {
    float v = table.scale * value_at(segment.data, i);
    if (FEEDBACK) v += table.decay * segment.residual[i];
    return v;
}

// Eight of those values.
INLINE void load_selected(const Table& table, const Segment& segment, i64 i, int count, float* v) {
    load_values(segment.data, i, count, v);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] *= table.scale;
#if FEEDBACK
    float kept[8];
    load_floats(segment.residual, i, count, kept);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] += table.decay * kept[e];
#endif
}

INLINE int units_of(const Segment& segment) { return (int)((segment.n + UNIT - 1) / UNIT); }

// List which of the count values at place `at` of a unit reach the floor, behind the `found` that
// are listed already. All threads of the block take part, in order.
INLINE void list_reaching(const Selection& all, const float* v, int at, int count, u32 floor,
                          u32& found) {
    const i64 slot = (i64)blockIdx.x * UNIT;
    u32 mine = 0, total;
#pragma unroll
    for (int e = 0; e < 8; ++e) mine += e < count && magnitude_bits(v[e]) >= floor;
    u32 place = found + scan_before(mine, total);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        if (e < count && magnitude_bits(v[e]) >= floor) {
            all.offsets[slot + place] = (u16)(at + e);
            all.values[slot + place] = v[e];
            ++place;
        }
    }
    found += total;
}

// A CUDA block for each unit.
extern "C" __global__ void __launch_bounds__(THREADS) collect(const __grid_constant__ Selection all) {
    const int number = segment_of(all.table, blockIdx.x);
    const Segment& segment = all.table.segments[number];
    const i64 base = (blockIdx.x - segment.first) * UNIT;
    const u32 floor = all.states[number].floor;
    u32 found = 0;
#pragma unroll
    for (int start = 0; start < UNIT; start += THREADS * 8) {
        const int at = start + threadIdx.x * 8;
        const int count = (int)smaller(larger(segment.n - base - at, (i64)0), (i64)8);
        float v[8] = {};
        if (count > 0) {
            load_selected(all.table, segment, base + at, count, v);
#if FEEDBACK
            store_finite(segment.residual, base + at, count, v);
#endif
        }
        list_reaching(all, v, at, count, floor, found);
    }
    if (threadIdx.x == 0) {
        all.counts[blockIdx.x] = found;
        if (found) atomicAdd(&all.states[number].total, found);
    }
}

// Read a unit again, after collect: what is not finite has not become a residual, but reaches any
// floor, so that it lies among the candidates. Returns how many values there are.
INLINE int reread(const Selection& all, int number, float* cache) {
    const Segment& segment = all.table.segments[number];
    const i64 base = (blockIdx.x - segment.first) * UNIT, slot = (i64)blockIdx.x * UNIT;
    const int size = (int)smaller(segment.n - base, (i64)UNIT);
    for (int i = threadIdx.x; i < size; i += THREADS)
        cache[i] = FEEDBACK ? segment.residual[base + i]
                            : all.table.scale * value_at(segment.data, base + i);
    __syncthreads();
    for (int j = threadIdx.x; j < (int)all.counts[blockIdx.x]; j += THREADS)
        cache[all.offsets[slot + j]] = all.values[slot + j];
    __syncthreads();
    return size;
}

// Where candidates are too few, list what reaches the lower floor.
extern "C" __global__ void __launch_bounds__(THREADS) widen(const __grid_constant__ Selection all) {
    __shared__ float cache[UNIT];
    const int number = segment_of(all.table, blockIdx.x);
    const State& state = all.states[number];
    if (state.total >= state.least) return;
    const int size = reread(all, number, cache);
    u32 found = 0;
#pragma unroll
    for (int start = 0; start < UNIT; start += THREADS * 8) {
        const int at = start + threadIdx.x * 8, count = smaller(larger(size - at, 0), 8);
        float v[8] = {};
        for (int e = 0; e < count; ++e) v[e] = cache[at + e];
        list_reaching(all, v, at, count, state.lower, found);
    }
    if (threadIdx.x == 0) all.counts[blockIdx.x] = found;
}

// Call visit(unit, lane) in a warp for each unit of this CUDA block's share.
template <class Visit> INLINE void each_unit(const Selection& all, int number, const Visit& visit) {
    const Segment& segment = all.table.segments[number];
    const int first = (int)(blockIdx.x - segment.first) * TOGETHER;
    const int last = smaller(first + TOGETHER, units_of(segment));
    for (int unit = first + threadIdx.x / 32; unit < last; unit += WARPS)
        visit(unit, (int)(threadIdx.x % 32));
}
