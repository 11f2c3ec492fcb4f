// The kernel that decodes, of every codec that works bucket by bucket; it uses of the codec (see
// encode.cuh) what reads scales and codes.

#if OUTPUT != 0
INLINE void store_halves(void* data, i64 i, int count, const float* v) {
    u16 half[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) half[e] = OUTPUT == 1 ? f32_to_f16(v[e]) : f32_to_bf16(v[e]);
    u16* to = (u16*)data + i;
    if (count >= 8 && aligned(to, 16)) {
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) words[w] = half[2 * w] | (u32)half[2 * w + 1] << 16;
        *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < count) to[e] = half[e];
}
#endif

// A unit is eight elements. With ADDING what payloads decode to is scaled and added to the output one
// by one, else their sum is weighed, scaled and overwrites it: as float32, or as OUTPUT (see INPUT).
extern "C" __global__ void decode(const __grid_constant__ Table table) {
    const i64 unit = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (unit >= table.units) return;
    const int number = segment_of(table, unit);
    const Segment& segment = table.segments[number];
    const i64 at = (unit - segment.first) * 8;
    const int left = (int)smaller(segment.n - at, (i64)8);
    float v[8] = {};
#if ADDING
    load_floats((const float*)segment.data, at, left, v);
#endif
    for (int p = 0; p < table.shards; ++p) {
        const Part part = source_of(table, 0, number, p);
        const Scale scale = read_scale(part, at / BUCKET);
        const Word word = load_codes(part.codes, at, left);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float decoded = decode_code(code_in(word, e), scale);
            if (ADDING) v[e] += table.scale * decoded;
            else v[e] = p ? v[e] + decoded : decoded;
        }
    }
#if !ADDING
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = v[e] * table.weight * table.scale;
#endif
#if OUTPUT == 0
    store_floats((float*)segment.data, at, left, v);
#else
    store_halves(segment.data, at, left, v);
#endif
}
