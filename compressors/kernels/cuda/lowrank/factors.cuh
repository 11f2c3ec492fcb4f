// Orthonormal bases of a few long rows, and what later steps begin with (see cpu/lowrank/factors.py,
// which this equals bit for bit: every sum folds its second half onto the first, until one is left).

#define MOST_BASES 64

struct Basis {  // of one matrix of r rows of n
    const float* rows;
    const float* add;  // a number, or null
    float* out;
    float* poison;  // 0, or NaN where something is not finite
    double* room;   // scratch: r n, then r (n + 1) / 2, then r
    i64 n;
    int r;
    int unused;
};

struct Bases {
    Basis bases[MOST_BASES];
    double small;
    int count;
    int unused;
};

// Fill the first of every (n + 1) / 2 elements of scratch with the inner product of a row of many with
// one row. All threads of the block take part.
INLINE void inner_products(const double* many, const double* row, u32 count, u32 n, double* scratch) {
    const u32 stride = (n + 1) / 2;
    for (u32 u = threadIdx.x; u < count * stride; u += THREADS) {
        const u32 j = u / stride, i = u % stride;
        double sum = many[(u64)j * n + i] * row[i];
        if (i + stride < n) sum += many[(u64)j * n + i + stride] * row[i + stride];
        scratch[u] = sum;
    }
    __syncthreads();
    for (u32 size = stride; size > 1; size = (size + 1) / 2) {
        const u32 half = (size + 1) / 2, rest = size - half;
        for (u32 u = threadIdx.x; u < count * rest; u += THREADS) {
            double* sums = scratch + (u64)(u / rest) * stride + u % rest;
            sums[0] += sums[half];
        }
        __syncthreads();
    }
}

INLINE double length_of(const double* row, u32 n, double* scratch) {
    inner_products(row, row, 1, n, scratch);
    const double length = sqrt(scratch[0]);
    __syncthreads();  // scratch may be written again
    return length;
}

// Gram-Schmidt in double precision, twice per row. A row of which less than `small` is left gives way to
// the next unit vector that is independent of those before. A CUDA block for each matrix.
extern "C" __global__ void __launch_bounds__(THREADS) orthonormal(const __grid_constant__ Bases all) {
    const Basis& basis = all.bases[blockIdx.x];
    const u32 n = (u32)basis.n;
    double* scratch = basis.room + (u64)basis.r * n;
    double* parts = scratch + (u64)basis.r * ((n + 1) / 2);
    u32 unit = 0;
    for (int k = 0; k < basis.r; ++k) {
        double* row = basis.room + (u64)k * n;
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            const float value = basis.rows[(u64)k * n + i];
            row[i] = is_finite(value) ? (double)value : 0.0;
        }
        __syncthreads();
        double norm;
        for (;;) {
            const double before = length_of(row, n, scratch);
            for (int turn = 0; turn < 2 && k > 0; ++turn) {
                inner_products(basis.room, row, k, n, scratch);
                for (int j = threadIdx.x; j < k; j += THREADS)
                    parts[j] = scratch[(u64)j * ((n + 1) / 2)];
                __syncthreads();
                for (u32 i = threadIdx.x; i < n; i += THREADS) {
                    double value = row[i];
                    for (int j = 0; j < k; ++j) value -= parts[j] * basis.room[(u64)j * n + i];
                    row[i] = value;
                }
                __syncthreads();
            }
            norm = length_of(row, n, scratch);
            if (norm > all.small * before) break;
            for (u32 i = threadIdx.x; i < n; i += THREADS) row[i] = i == unit ? 1.0 : 0.0;
            ++unit;
            __syncthreads();
        }
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            row[i] /= norm;
            basis.out[(u64)k * n + i] = (float)row[i];
        }
        __syncthreads();
    }
}

// 0, or NaN where a value is not finite, plus what is to be added. A CUDA block for each matrix.
extern "C" __global__ void __launch_bounds__(THREADS) inspect(const __grid_constant__ Bases all) {
    const Basis& basis = all.bases[blockIdx.x];
    const i64 size = basis.n * basis.r;
    u32 top = 0;
    for (i64 i = threadIdx.x * 8; i < size; i += THREADS * 8) {
        float v[8];
        load_floats(basis.rows, i, (int)smaller(size - i, (i64)8), v);
#pragma unroll
        for (int e = 0; e < 8; ++e) top = larger(top, magnitude_bits(v[e]));
    }
    top = block_max(top);
    const float poison = top < 0x7F800000u ? 0.0f : float_of(0x7FC00000u);
    if (threadIdx.x == 0) *basis.poison = basis.add ? poison + *basis.add : poison;
}

// Rows divided by their largest magnitudes, where that is not zero; nothing if the poison is not
// finite. A CUDA block for each row; matrices have equally many.
extern "C" __global__ void __launch_bounds__(THREADS) keep(const __grid_constant__ Bases all) {
    const Basis& basis = all.bases[blockIdx.x / all.bases[0].r];
    const i64 first = (i64)(blockIdx.x % all.bases[0].r) * basis.n;
    u32 top = 0;
    for (i64 i = threadIdx.x; i < basis.n; i += THREADS)
        top = larger(top, magnitude_bits(basis.rows[first + i]));
    top = block_max(top);
    if (top == 0 || !is_finite(*basis.poison)) return;
    for (i64 i = threadIdx.x; i < basis.n; i += THREADS)
        basis.out[first + i] = basis.rows[first + i] / float_of(top);
}
