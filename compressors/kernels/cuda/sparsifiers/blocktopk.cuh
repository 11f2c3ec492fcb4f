// Top-k inside blocks, a CUDA block for each (see cpu/sparsifiers/blocktopk.py, which this equals
// bit for bit). BLOCK elements of which KEPT travel, indices of WIDTH bits, values of VALUE_BITS; ROTATED by DCT.
// A part's arrays are indices, values (or their codes), scales.

#define CACHED (BLOCK <= 8192)
#define WORDS ((BLOCK + 31) / 32)
#define STRIDE ((KEPT * WIDTH + 7) / 8)
#define STEP (VALUE_BITS < 16 ? (KEPT * VALUE_BITS + 7) / 8 : KEPT)
#define TINY 1.5e-36f
#define MAGIC 12582912.0f
#define NAN_BITS 0x7FC0
#define PICK_ROOM (BLOCK <= 4096 ? KEPT : 1)

// How many entries of a block of n elements travel.
INLINE int kept_of(int n) {
    return ROTATED ? KEPT : (int)(((i64)KEPT * n + BLOCK - 1) / BLOCK);
}

// The indices of one block. Up to 4096 elements they wait in shared memory for being packed; longer
// blocks have indices of 16 bits, which are written at once and read back.
struct Picks {
    u8* packed;
    u16* shared;

    INLINE void put(int j, int index) const {
        if (BLOCK <= 4096) shared[j] = (u16)index;
        else packed[2 * j] = (u8)index, packed[2 * j + 1] = (u8)(index >> 8);
    }
    INLINE int get(int j) const {
        return BLOCK <= 4096 ? shared[j] : packed[2 * j] | packed[2 * j + 1] << 8;
    }
    INLINE void pack(int k) const {
        if (BLOCK > 4096) return;
        if (WIDTH == 8) {
            for (int j = threadIdx.x; j < k; j += THREADS) packed[j] = (u8)shared[j];
        } else {
            for (int j = threadIdx.x; j < (k + 1) / 2; j += THREADS) {
                const bool second = 2 * j + 1 < k;
                const u32 both = shared[2 * j] | (second ? (u32)shared[2 * j + 1] << 12 : 0);
                packed[3 * j] = (u8)both, packed[3 * j + 1] = (u8)(both >> 8);
                if (second) packed[3 * j + 2] = (u8)(both >> 16);
            }
        }
    }
};

INLINE int unpacked_index(const u8* packed, int j) {
    if (WIDTH == 8) return packed[j];
    if (WIDTH == 16) return packed[2 * j] | packed[2 * j + 1] << 8;
    const int both = packed[j * 3 / 2] | packed[j * 3 / 2 + 1] << 8;
    return j % 2 ? both >> 4 : both & 4095;
}

// -- values ---------------------------------------------------------------------------------------

INLINE float decoded_value(const void* values, const u16* scales, int j) {
    if (VALUE_BITS == 32) return ((const float*)values)[j];
    if (VALUE_BITS == 16) return bf16_to_f32(((const u16*)values)[j]);
    if (VALUE_BITS == 8)
        return ((float)((const u8*)values)[j] - 127.0f) * bf16_to_f32(scales[0]);
    const u32 code = ((const u8*)values)[j / 4] >> (2 * (j % 4));
    const float magnitude = bf16_to_f32(scales[code & 2 ? 1 : 0]);
    return code & 1 ? -magnitude : magnitude;
}

// Round chosen(j) for j below k; every thread of the block takes part.
template <class Chosen>
INLINE void encode_values(const Chosen& chosen, int k, void* values, u16* scales) {
#if VALUE_BITS == 32
    for (int j = threadIdx.x; j < k; j += THREADS) ((float*)values)[j] = chosen(j);
#elif VALUE_BITS == 16
    for (int j = threadIdx.x; j < k; j += THREADS) ((u16*)values)[j] = f32_to_bf16(chosen(j));
#elif VALUE_BITS == 8
    u32 top = 0;
    for (int j = threadIdx.x; j < k; j += THREADS) top = larger(top, magnitude_bits(chosen(j)));
    const float extent = float_of(block_max(top));
    const bool bad = !is_finite(extent), empty = extent < TINY;
    const u16 bits = bad ? NAN_BITS : empty ? 0 : round_up_bf16(extent / 127.0f);
    const float inverse = 1.0f / bf16_to_f32(bits);
    if (threadIdx.x == 0) scales[0] = bits;
    for (int j = threadIdx.x; j < k; j += THREADS) {
        const float place = (chosen(j) * inverse + MAGIC) - MAGIC;
        ((u8*)values)[j] = bad ? 0 : empty ? 127 : (u8)(int)(place + 127.0f);
    }
#else
    __shared__ double shared_mean;
    if (threadIdx.x < 32) {  // sums in the order of the CPU: one warp does them
        const int lane = threadIdx.x;
        const auto magnitude = [&](int j) { return (double)float_of(magnitude_bits(chosen(j))); };
        const double mean = lane_sum(magnitude, k, lane) / k;
        const auto high = [&](int j) { return magnitude(j) >= mean ? magnitude(j) : 0.0; };
        const auto low = [&](int j) { return magnitude(j) >= mean ? 0.0 : magnitude(j); };
        const double lows = lane_sum(low, k, lane), highs = lane_sum(high, k, lane);
        int above = 0;
        for (int start = 0; start < k; start += 32) {
            const int j = start + lane;
            above += __popc(__ballot_sync(0xFFFFFFFFu, j < k && magnitude(j) >= mean));
        }
        const bool bad = !(mean <= 1.7976931348623157e308);
        if (lane == 0) {
            scales[0] = bad ? NAN_BITS : nearest_bf16((float)(lows / larger(k - above, 1)));
            scales[1] = bad ? NAN_BITS : nearest_bf16((float)(highs / larger(above, 1)));
            shared_mean = mean;
        }
    }
    __syncthreads();
    const double mean = shared_mean;
    const bool bad = !(mean <= 1.7976931348623157e308);
    for (int j = threadIdx.x; j < (k + 3) / 4; j += THREADS) {
        u32 byte = 0;
        for (int e = 0; e < 4; ++e) {
            if (4 * j + e >= k || bad) break;
            const float v = chosen(4 * j + e);
            const u32 large = (double)float_of(magnitude_bits(v)) >= mean;
            byte |= ((u32)(v < 0.0f) | large << 1) << (2 * e);
        }
        ((u8*)values)[j] = (u8)byte;
    }
#endif
}

// -- selection ------------------------------------------------------------------------------------

// Set bit i of taken where value(i) is among the k largest of n, lowest index first among equals.
template <class Value> INLINE void select(const Value& value, int n, int k, u32* taken) {
    const int lane = threadIdx.x % 32;
#if BLOCK <= 512
    // Few enough that every thread counts who is larger than its own.
    for (int start = 0; start < n; start += THREADS) {
        const int i = start + threadIdx.x;
        const u32 own = i < n ? magnitude_bits(value(i)) : 0;
        int rank = 0;
        for (int j = 0; j < n; ++j) {
            const u32 other = magnitude_bits(value(j));
            rank += other > own || (other == own && j < i);
        }
        const u32 word = __ballot_sync(0xFFFFFFFFu, i < n && rank < k);
        if (lane == 0 && i / 32 < WORDS) taken[i / 32] = word;
    }
    __syncthreads();
#else
    // The k-th largest by radix: 11, 10 and 10 bits of the magnitude.
    __shared__ u32 counts[2048];
    u32 prefix = 0, left = k;
    for (int level = 0; level < 3; ++level) {
        const int shift = 20 - 10 * level, bins = level ? 1024 : 2048;
        for (int j = threadIdx.x; j < bins; j += THREADS) counts[j] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const u32 bits = magnitude_bits(value(i));
            if (level == 0 || bits >> (shift + 10) == prefix)
                atomicAdd(&counts[(bits >> shift) & (bins - 1)], 1u);
        }
        __syncthreads();
        if (level == 0) prefix = bin_from_top<2048>(counts, left);
        else prefix = prefix << 10 | bin_from_top<1024>(counts, left);
    }
    // Of those that equal it, left are taken: a warp goes over a stretch of whole words.
    const int warp = threadIdx.x / 32, each = (WORDS + WARPS - 1) / WARPS;
    const int first = warp * each, last = smaller(first + each, WORDS);
    u32 equals = 0, total;
    for (int w = first; w < last; ++w) {
        const int i = w * 32 + lane;
        equals += __popc(__ballot_sync(0xFFFFFFFFu, i < n && magnitude_bits(value(i)) == prefix));
    }
    u32 before = scan_before(lane == 0 ? equals : 0, total);
    before = __shfl_sync(0xFFFFFFFFu, before, 0);
    for (int w = first; w < last; ++w) {
        const int i = w * 32 + lane;
        const u32 bits = i < n ? magnitude_bits(value(i)) : 0;
        const u32 tied = __ballot_sync(0xFFFFFFFFu, i < n && bits == prefix);
        const u32 rank = before + __popc(tied & ((1u << lane) - 1));
        const bool kept = i < n && (bits > prefix || (bits == prefix && rank < left));
        const u32 word = __ballot_sync(0xFFFFFFFFu, kept);
        if (lane == 0) taken[w] = word;
        before += __popc(tied);
    }
    __syncthreads();
#endif
}

// List the bits that are set, in ascending order.
INLINE void list(const u32* taken, int n, const Picks& picks) {
    constexpr int EACH = (WORDS + THREADS - 1) / THREADS;
    const int first = threadIdx.x * EACH, last = smaller(first + EACH, (n + 31) / 32);
    u32 mine = 0, total;
    for (int w = first; w < last; ++w) mine += __popc(taken[w]);
    u32 place = scan_before(mine, total);
    for (int w = first; w < last; ++w)
        for (u32 word = taken[w]; word; word &= word - 1)
            picks.put(place++, w * 32 + __ffs(word) - 1);
    __syncthreads();
}

// -- kernels: a unit is a block of elements ---------------------------------------------------------

#if ENCODING
extern "C" __global__ void __launch_bounds__(THREADS) encode(const __grid_constant__ Table table) {
    __shared__ float cache[CACHED ? BLOCK : 1];
#if ROTATED
    __shared__ float turned[BLOCK], sent[BLOCK];
#endif
    __shared__ u16 waiting[PICK_ROOM];
    __shared__ u32 taken[WORDS];
    const int number = segment_of(table, blockIdx.x);
    const Segment& segment = table.segments[number];
    const i64 block = blockIdx.x - segment.first, base = block * BLOCK;
    const int n = (int)smaller(segment.n - base, (i64)BLOCK), size = ROTATED ? BLOCK : n;
    const int k = kept_of(n);
    const Part& part = table.parts[number];
    u8* packed = (u8*)part.codes + block * STRIDE;
    u8* values = (u8*)part.scales + block * STEP * (VALUE_BITS < 16 ? 1 : VALUE_BITS / 8);
    u16* scales = (u16*)part.lows + block * (VALUE_BITS == 8 ? 1 : 2);
    const Picks picks = {packed, waiting};

    if (CACHED) {
        for (int i = threadIdx.x * 8; i < size; i += THREADS * 8) {
            float v[8], kept[8];
            load_values(segment.data, base + i, n - i, v);
            if (FEEDBACK) load_floats(segment.residual, base + i, n - i, kept);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (i + e >= size) break;
                v[e] *= table.scale;
                if (FEEDBACK && i + e < n) v[e] += table.decay * kept[e];
                cache[CACHED ? i + e : 0] = v[e];
            }
        }
        __syncthreads();
    }
#if ROTATED
    for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
        float total = 0.0f;
        for (int j = 0; j < BLOCK; ++j) total += cache[j] * table.forward[j * BLOCK + i];
        turned[i] = total;
    }
    __syncthreads();
    const auto source = [&](int i) { return turned[i]; };
#else
    const auto target = [&](int i) {
        float v = table.scale * value_at(segment.data, base + i);
        if (FEEDBACK) v += table.decay * segment.residual[base + i];
        return v;
    };
    const auto source = [&](int i) { return CACHED ? cache[CACHED ? i : 0] : target(i); };
#endif
    select(source, size, k, taken);
    list(taken, size, picks);
    picks.pack(k);
    encode_values([&](int j) { return source(picks.get(j)); }, k, values, scales);
    __syncthreads();
    if (table.flag) {
        u32 top = 0;
        for (int j = threadIdx.x; j < k; j += THREADS)
            top = larger(top, magnitude_bits(decoded_value(values, scales, j)));
        if (block_max(top) >= 0x7F800000u && threadIdx.x == 0) *table.flag = 1;
    }
    if (!FEEDBACK) return;
#if ROTATED
    for (int j = threadIdx.x; j < k; j += THREADS) sent[j] = decoded_value(values, scales, j);
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += THREADS) {
        float total = 0.0f;
        for (int j = 0; j < k; ++j) total += sent[j] * table.inverse[picks.get(j) * BLOCK + i];
        const float lost = cache[i] - total;
        if (is_finite(lost)) segment.residual[base + i] = lost;
    }
#else
    for (int i = threadIdx.x; i < n; i += THREADS) {
        if (taken[i / 32] >> (i % 32) & 1) continue;
        const float v = source(i);
        if (is_finite(v)) segment.residual[base + i] = v;
    }
    for (int j = threadIdx.x; j < k; j += THREADS) {
        const int i = picks.get(j);
        const float lost = source(i) - decoded_value(values, scales, j);
        if (is_finite(lost)) segment.residual[base + i] = lost;
    }
#endif
}
#else
// Indices beyond the block, which no encoder sends, are left out and reported in the flag.
extern "C" __global__ void __launch_bounds__(THREADS) decode(const __grid_constant__ Table table) {
    __shared__ float cache[CACHED ? BLOCK : 1];
#if ROTATED
    __shared__ float sent[BLOCK];
    __shared__ u16 places[BLOCK];
#endif
    const int number = segment_of(table, blockIdx.x);
    const Segment& segment = table.segments[number];
    const i64 block = blockIdx.x - segment.first, base = block * BLOCK;
    const int n = (int)smaller(segment.n - base, (i64)BLOCK), limit = ROTATED ? BLOCK : n;
    const int k = kept_of(n);
    float* out = (float*)segment.data + base;
    float* sum = CACHED ? cache : out;
    const float weight = ADDING ? table.scale : 1.0f;  // sums that are made anew are scaled at the end
    if (CACHED || !ADDING)
        for (int i = threadIdx.x; i < n; i += THREADS) sum[i] = ADDING ? out[i] : 0.0f;
    for (int p = 0; p < table.shards; ++p) {
        const Part part = source_of(table, 0, number, p);
        const u8* packed = (const u8*)part.codes + block * STRIDE;
        const u8* values =
            (const u8*)part.scales + block * STEP * (VALUE_BITS < 16 ? 1 : VALUE_BITS / 8);
        const u16* scales = (const u16*)part.lows + block * (VALUE_BITS == 8 ? 1 : 2);
        const bool first = p == 0 && !ADDING;
        __syncthreads();
        for (int j = threadIdx.x; j < k; j += THREADS) {
            const int i = unpacked_index(packed, j);
            const float v = decoded_value(values, scales, j);
            if (i >= limit && table.flag) *table.flag = 1;
#if ROTATED
            places[j] = (u16)(i < limit ? i : 0), sent[j] = i < limit ? v : 0.0f;
#else
            if (i < limit) sum[i] = first ? v : sum[i] + weight * v;
#endif
        }
#if ROTATED
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            float total = 0.0f;
            for (int j = 0; j < k; ++j) total += sent[j] * table.inverse[places[j] * BLOCK + i];
            sum[i] = first ? total : sum[i] + weight * total;
        }
#endif
    }
    __syncthreads();
    if (CACHED)
        for (int i = threadIdx.x; i < n; i += THREADS) out[i] = ADDING ? sum[i] : table.scale * sum[i];
    else if (!ADDING && table.scale != 1.0f)
        for (int i = threadIdx.x; i < n; i += THREADS) out[i] *= table.scale;
}
#endif
