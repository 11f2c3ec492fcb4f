// Products of factors, which every rank must get the same bits from: each sum is taken in the order of
// the rank (see cpu/lowrank/factors.py, which this equals bit for bit).

#define ROWS 4  // of the product, that a thread does beside eight columns

struct Product {
    const float* left;   // r x n
    const float* right;  // r x m
    const float* own_left;
    const float* own_right;
    const float* poison;  // a number that is added to every weight
    const float* target;  // n x m
    float* out;
    float* residual;
    i64 n;
    i64 m;
    int r;
    int unused;
};

// Fill sums with a piece of (left + poison)^T right.
INLINE void weigh(const Product& all, const float* left, const float* right, i64 row, i64 column,
                  float poison, float (*sums)[8]) {
    const int count = (int)smaller(all.m - column, (i64)8);
    for (int k = 0; k < all.r; ++k) {
        float values[8];
        load_floats(right, k * all.m + column, count, values);
#pragma unroll
        for (int j = 0; j < ROWS; ++j) {
            if (row + j >= all.n) break;
            const float weight = left[k * all.n + row + j] + poison;
#pragma unroll
            for (int e = 0; e < 8; ++e)
                sums[j][e] = k ? sums[j][e] + weight * values[e] : weight * values[e];
        }
    }
}

template <bool LOST> INLINE void multiply(const Product& all) {
    const i64 across = (all.m + 7) / 8, unit = (i64)blockIdx.x * THREADS + threadIdx.x;
    const i64 row = unit / across * ROWS, column = unit % across * 8;
    if (row >= all.n) return;
    const int count = (int)smaller(all.m - column, (i64)8);
    const float poison = *all.poison;
    float sums[ROWS][8], own[ROWS][8];
    weigh(all, all.left, all.right, row, column, poison, sums);
    if (LOST) weigh(all, all.own_left, all.own_right, row, column, poison, own);
#pragma unroll
    for (int j = 0; j < ROWS; ++j) {
        if (row + j >= all.n) break;
        const i64 at = (row + j) * all.m + column;
        store_floats(all.out, at, count, sums[j]);
        if (LOST) {
            float lost[8];
            load_floats(all.target, at, count, lost);
#pragma unroll
            for (int e = 0; e < 8; ++e)
                lost[e] = is_finite(sums[j][e]) ? lost[e] - own[j][e] : sums[j][e];
            store_finite(all.residual, at, count, lost);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) product(const __grid_constant__ Product all) {
    multiply<false>(all);
}

// The residual becomes the target less the product of the own factors, where that and the result are
// finite.
extern "C" __global__ void __launch_bounds__(THREADS)
    product_and_lost(const __grid_constant__ Product all) {
    multiply<true>(all);
}
