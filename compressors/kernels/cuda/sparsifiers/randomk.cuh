// Random-k by the first k places of a permutation that is evaluated where it is needed (see
// cpu/sparsifiers/randomk.py, which this equals bit for bit).

struct Drawing {
    const float* x;
    float* residual;  // null without feedback
    float* values;
    u32* indices;
    float* old;  // the residual at the indices
    int* broken;  // set to 1 where something is not finite
    i64 n;
    i64 k;
    u64 key;
    u64 rows;
    u64 columns;
    float decay;
    float scale;
};

INLINE u64 below(u64 key, u64 counter, u64 limit) { return (u64)squares(key, counter) * limit >> 32; }

INLINE u64 permuted(const Drawing& all, u64 place) {
    do {
        u64 row = place / all.columns, column = place % all.columns;
        for (u64 turn = 0; turn < 2; ++turn) {
            row += below(all.key, ((2 * turn + 1) << 40) + column, all.rows);
            row -= row >= all.rows ? all.rows : 0;
            column += below(all.key, ((2 * turn + 2) << 40) + row, all.columns);
            column -= column >= all.columns ? all.columns : 0;
        }
        place = row * all.columns + column;
    } while (place >= (u64)all.n);
    return place;
}

extern "C" __global__ void draw(const __grid_constant__ Drawing all) {
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j < all.k) all.indices[j] = (u32)permuted(all, j);
    if (j == 0 && all.broken) *all.broken = 0;
}

extern "C" __global__ void take(const __grid_constant__ Drawing all) {
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j >= all.k) return;
    const u32 i = all.indices[j];
    float v = all.x[i];
    if (all.residual) all.old[j] = all.residual[i], v += all.decay * all.old[j];
    all.values[j] = v * all.scale;
}

// Look at everything; with feedback the sum becomes the residual where it is finite.
extern "C" __global__ void inspect(const __grid_constant__ Drawing all) {
    const i64 i = ((i64)blockIdx.x * THREADS + threadIdx.x) * 8;
    if (i >= all.n) return;
    const int left = (int)smaller(all.n - i, (i64)8);
    float v[8], kept[8];
    load_floats(all.x, i, left, v);
    if (all.residual) {
        load_floats(all.residual, i, left, kept);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] += all.decay * kept[e];
        store_finite(all.residual, i, left, v);
    }
    bool fine = true;
#pragma unroll
    for (int e = 0; e < 8; ++e) fine = fine && (e >= left || is_finite(v[e]));
    if (!fine) *all.broken = 1;
}

// Show what is broken in the first value; with feedback, keep what was not sent.
extern "C" __global__ void settle(const __grid_constant__ Drawing all) {
    const i64 j = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (j >= all.k || (j > 0 && !all.residual)) return;
    float sent = all.values[j];
    if (j == 0 && *all.broken) all.values[0] = sent = float_of(0x7FC00000u);
    if (!all.residual) return;
    const u32 i = all.indices[j];
    const float lost = (all.x[i] + all.decay * all.old[j]) - sent;
    all.residual[i] = is_finite(lost) ? lost : all.old[j];
}
