// The kernel that decodes, of every codec that works bucket by bucket; it uses of the codec (see
// encode.cuh) what reads scales and codes.

// A unit is eight elements. With ADDING what payloads decode to is scaled and added to the output one
// by one, else their sum is scaled and overwrites it.
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
    const Part* parts = table.parts + number * table.shards;
    for (int p = 0; p < table.shards; ++p) {
        const Scale scale = read_scale(parts[p], at / BUCKET);
        const Word word = load_codes(parts[p].codes, at, left);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const float decoded = decode_code(code_in(word, e), scale);
            if (ADDING) v[e] += table.scale * decoded;
            else v[e] = p ? v[e] + decoded : decoded;
        }
    }
#if !ADDING
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] *= table.scale;
#endif
    store_floats((float*)segment.data, at, left, v);
}
