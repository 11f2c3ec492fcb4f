// Candidates of a selection: the entries of whole tensors that reach a floor, listed unit by unit in
// the order of their indices, in one pass over memory.
//
// With FEEDBACK the sum with the residual is what is looked at, and becomes the residual in the same
// pass where it is finite. Where the floor turns out to be too high, a second one takes its place.
//
// The k-th magnitude is found among candidates by radix: 11, 10 and 10 bits (tally, narrow). Then each
// unit learns where its selected entries go (rank, order), which are written there, and forgotten in
// the residual (emit).

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
