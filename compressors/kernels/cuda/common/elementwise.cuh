// What error feedback and sparse payloads do element by element (see cpu/common/feedback.py and
// cpu/sparsifiers/topk.py). CuPy's own operators would flush subnormal numbers to zero.

struct Arrays {
    const float* a;
    const float* b;
    const float* c;
    float* out;
    const u32* indices;
    i64 n;  // elements of out
    i64 entries;
    float weight;
    int turn;
};

// Call put(i, left) for every eight elements; left of them exist.
template <class Put> INLINE void by_eight(const Arrays& all, const Put& put) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (i < all.n) put(i, (int)smaller(all.n - i, (i64)8));
}

extern "C" __global__ void add(const __grid_constant__ Arrays all) {
    by_eight(all, [&](i64 i, int left) {
        float a[8], b[8];
        load_floats(all.a, i, left, a);
        load_floats(all.b, i, left, b);
#pragma unroll
        for (int e = 0; e < 8; ++e) a[e] += all.weight * b[e];
        store_floats(all.out, i, left, a);
    });
}

extern "C" __global__ void scale(const __grid_constant__ Arrays all) {
    by_eight(all, [&](i64 i, int left) {
        float v[8];
        load_floats(all.out, i, left, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= all.weight;
        store_floats(all.out, i, left, v);
    });
}

extern "C" __global__ void keep(const __grid_constant__ Arrays all) {
    by_eight(all, [&](i64 i, int left) {
        float a[8], b[8];
        load_floats(all.a, i, left, a);
        load_floats(all.b, i, left, b);
#pragma unroll
        for (int e = 0; e < 8; ++e) a[e] -= b[e];
        store_finite(all.out, i, left, a);
    });
}

extern "C" __global__ void keep_combined(const __grid_constant__ Arrays all) {
    by_eight(all, [&](i64 i, int left) {
        float a[8], b[8], c[8];
        load_floats(all.a, i, left, a);
        load_floats(all.b, i, left, b);
        load_floats(all.c, i, left, c);
#pragma unroll
        for (int e = 0; e < 8; ++e) a[e] = is_finite(c[e]) ? a[e] - b[e] : c[e];
        store_finite(all.out, i, left, a);
    });
}

// Replace sums of votes by their sign times weight; ties by turns, as cpu/quantizers/onebit.py does.
// NaN stays.
extern "C" __global__ void vote(const __grid_constant__ Arrays all) {
    by_eight(all, [&](i64 i, int left) {
        float v[8];
        load_floats(all.out, i, left, v);
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (v[e] == v[e]) {
                const bool tie_lost = v[e] == 0.0f && (all.turn + i + e & 1);
                v[e] = v[e] < 0.0f || tie_lost ? -all.weight : all.weight;
            }
        store_floats(all.out, i, left, v);
    });
}

// Put or add entries; an index beyond the end, which no encoder sends, is left out.
extern "C" __global__ void scatter(const __grid_constant__ Arrays all) {
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j < all.entries && all.indices[j] < all.n) all.out[all.indices[j]] = all.a[j];
}

extern "C" __global__ void scatter_add(const __grid_constant__ Arrays all) {
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j < all.entries && all.indices[j] < all.n) all.out[all.indices[j]] += all.a[j];
}
