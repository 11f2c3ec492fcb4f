// Integer codes on scales that all ranks share (see cpu/quantizers/shared_int.py, which this equals
// bit for bit). CODE is the type of a code, BUCKET the elements that share a scale, any number of them.

#define TINY 1.2e-38f
#define MAGIC 12582912.0f  // 1.5 * 2**23: adding it leaves a small float rounded to nearest even
#define INFINITY_BITS 0x7F800000u
#define EACH 8  // elements of a thread, THREADS apart

struct Sharing {
    const float* x;
    float* extents;  // of buckets: their largest magnitude, or when decoding their unit
    CODE* codes;
    float* out;
    i64 n;
    u64 key;
    u64 start;
    float levels;
    int unused;
};

// A warp for each bucket: its largest magnitude, Inf where it holds a NaN or an Inf.
extern "C" __global__ void measure(const __grid_constant__ Sharing all) {
    const i64 bucket = ((i64)blockIdx.x * THREADS + threadIdx.x) / GROUP, base = bucket * BUCKET;
    const int count = (int)larger(smaller(all.n - base, (i64)BUCKET), (i64)0);
    const int lane = threadIdx.x % GROUP;
    u32 top = 0;
    for (int i = lane; i < count; i += GROUP) top = larger(top, magnitude_bits(all.x[base + i]));
    top = group_max(top);
    if (lane == 0 && count > 0) all.extents[bucket] = float_of(smaller(top, INFINITY_BITS));
}

extern "C" __global__ void encode(const __grid_constant__ Sharing all) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 i = ((i64)blockIdx.x * EACH + e) * THREADS + threadIdx.x;
        if (i >= all.n) return;
        const float unit = all.extents[i / BUCKET] / all.levels;
        int code = 0;
        if (unit >= TINY && unit < float_of(INFINITY_BITS)) {
            const float place = all.x[i] * (1.0f / unit);
#if STOCHASTIC
            const float drawn = floorf(place + uniform16(all.key, all.start + i));
            code = (int)larger(smaller(drawn, all.levels), -all.levels);
#else
            code = (int)((place + MAGIC) - MAGIC);
#endif
        }
        all.codes[i] = (CODE)code;
    }
}

extern "C" __global__ void decode(const __grid_constant__ Sharing all) {
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 i = ((i64)blockIdx.x * EACH + e) * THREADS + threadIdx.x;
        if (i >= all.n) return;
        all.out[i] = (float)all.codes[i] * all.extents[i / BUCKET];
    }
}
