// The kernel that encodes, of every codec that works bucket by bucket, around what the codec defines:
//
//     struct Scale;                                      what a bucket shares
//     Scale find_scale(values, count, lane)              from its values
//     void write_scale(part, bucket, scale), Scale read_scale(part, bucket), bool is_bad(scale)
//     u32 encode_value(value, scale, key, counter), float decode_code(code, scale)
//
// GROUP threads share a bucket of BUCKET elements and take turns at eight each. Small buckets stay
// in registers between the pass that finds the scale and the one that rounds: memory is read once.

#define CHUNKS ((BUCKET + 8 * GROUP - 1) / (8 * GROUP))
#define HELD (CHUNKS <= 4)

// The values of one bucket as the codec sees them: scaled, or decoded and summed, plus residual.
struct Values {
    const Table& table;
    const Segment& segment;
    int number;  // of the segment
    i64 base;    // element at which the bucket begins
    int count;
    int lane;
    float held[HELD ? CHUNKS : 1][8];

    INLINE Values(const Table& t, int s, i64 b, int c, int l)
        : table(t), segment(t.segments[s]), number(s), base(b), count(c), lane(l) {
        if (HELD) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) fetch(chunk, held[HELD ? chunk : 0]);
        }
    }

    INLINE int place(int chunk) const { return (chunk * GROUP + lane) * 8; }

    INLINE void fetch(int chunk, float* v) const {
        const int i = place(chunk), left = count - i;
        if (left <= 0) return;
#if SUMMED
        for (int p = 0; p < table.shards; ++p) {
            const Part part = source_of(table, table.count, number, p);
            const Scale scale = read_scale(part, base / BUCKET);
            const Word word = load_codes(part.codes, base + i, left);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                const float decoded = decode_code(code_in(word, e), scale);
                v[e] = p ? v[e] + decoded : decoded;
            }
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= table.weight;
#else
        load_values(segment.data, base + i, left, v);
#endif
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= table.scale;
#if FEEDBACK
        float kept[8];
        load_floats(segment.residual, base + i, left, kept);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += table.decay * kept[e];
#endif
    }

    // One value, for sums whose order matters; it comes from the cache.
    INLINE float at(int i) const {
        float value = 0.0f;
#if SUMMED
        for (int p = 0; p < table.shards; ++p) {
            const Part part = source_of(table, table.count, number, p);
            const Scale scale = read_scale(part, base / BUCKET);
            const Word word = load_codes(part.codes, base + i / 8 * 8, count - i / 8 * 8);
            const float decoded = decode_code(code_in(word, i % 8), scale);
            value = p ? value + decoded : decoded;
        }
        value *= table.weight;
#else
        value = value_at(segment.data, base + i);
#endif
        value *= table.scale;
#if FEEDBACK
        value += table.decay * segment.residual[base + i];
#endif
        return value;
    }

    // Call take(value) for every value that this thread holds.
    template <class Take> INLINE void each(const Take& take) const {
        if (HELD) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (place(chunk) + e < count) take(held[HELD ? chunk : 0][e]);
            }
        } else {
            float v[8];
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                fetch(chunk, v);
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (place(chunk) + e < count) take(v[e]);
            }
        }
    }
};

INLINE void encode_chunk(const Values& values, const Part& part, const Scale& scale, int chunk,
                         const float* v) {
    const Segment& segment = values.segment;
    const int i = values.place(chunk), left = values.count - i;
    if (left <= 0) return;
    const i64 at = values.base + i;
    Word word = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < left)
            put_code(word, e, encode_value(v[e], scale, segment.key, segment.start + at + e));
    store_codes(part.codes, at, left, word);
#if FEEDBACK
    float lost[8];
#pragma unroll
    for (int e = 0; e < 8; ++e)
        lost[e] = v[e] - values.table.weight * decode_code(code_in(word, e), scale);
    store_finite(segment.residual, at, left, lost);
#endif
}

// A unit is a bucket.
extern "C" __global__ void encode(const __grid_constant__ Table table) {
    const i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / GROUP;
    const int number = segment_of(table, unit), lane = threadIdx.x % GROUP;
    const i64 bucket = unit - table.segments[number].first, base = bucket * BUCKET;
    const i64 left = table.segments[number].n - base;
    const int count = unit < table.units ? (int)smaller(left, (i64)BUCKET) : 0;
    const Values values(table, number, base, count, lane);
    const Scale scale = find_scale(values, count, lane);
    __syncwarp();  // nobody writes a residual that another thread still reads
    const Part& part = table.parts[number];
    if (lane == 0 && count > 0) {
        write_scale(part, bucket, scale);
        if (table.flag && is_bad(scale)) *table.flag = 1;
    }
    if (HELD) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk)
            encode_chunk(values, part, scale, chunk, values.held[HELD ? chunk : 0]);
    } else {
        float v[8];
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            values.fetch(chunk, v);
            encode_chunk(values, part, scale, chunk, v);
        }
    }
}
