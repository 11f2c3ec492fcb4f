// Norms of whole tensors, and values clipped by them; the host does not learn the norms (see
// cpu/common/norms.py, whose sums these equal bit for bit).

// The sum of squares of each chunk, a CUDA block each.
extern "C" __global__ void __launch_bounds__(THREADS) square(const __grid_constant__ OperandTable all) {
    const Operands& tensor = operands_of(all, blockIdx.x);
    const i64 base = (blockIdx.x - tensor.first) * CHUNK;
    const auto load = [&](int at, int count, float* v) {
        if (count > 0) load_values(tensor.x, base + at, count, v);
    };
    const int size = (int)smaller(tensor.n - base, (i64)CHUNK);
    const double sum = chunk_sum(size, load, [](float v) { return (double)v * v; });
    if (threadIdx.x == 0) all.sums[blockIdx.x] = sum;
}

// The factor that makes the norm at most clip, 1 where it is not finite: an overflow must show.
// A CUDA block for each tensor, and so on.
extern "C" __global__ void __launch_bounds__(THREADS) shrink(const __grid_constant__ OperandTable all) {
    const Operands& tensor = all.tensors[blockIdx.x];
    const double norm = sqrt(ordered_sum(all.sums + tensor.first, chunks_of(tensor.n)));
    const bool shrinks = all.clip < norm && norm - norm == 0.0;
    if (threadIdx.x == 0) *tensor.bound = shrinks ? (float)(all.clip / norm) : 1.0f;
}

// So many root mean squares, Inf where that is not finite.
extern "C" __global__ void __launch_bounds__(THREADS) limit(const __grid_constant__ OperandTable all) {
    const Operands& tensor = all.tensors[blockIdx.x];
    const double energy = ordered_sum(all.sums + tensor.first, chunks_of(tensor.n));
    const double most = all.clip * sqrt(energy / (double)tensor.n);
    if (threadIdx.x == 0) *tensor.bound = most - most == 0.0 ? (float)most : float_of(0x7F800000u);
}

// Values no larger than the bound, which is Inf where there is none.
extern "C" __global__ void clip(const __grid_constant__ OperandTable all) {
    by_eight(all, [&](const Operands& tensor, i64 i, int left) {
        const float most = *tensor.bound;
        float v[8];
        load_values(tensor.x, i, left, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = v[e] > most ? most : v[e] < -most ? -most : v[e];
        store_floats(tensor.out, i, left, v);
    });
}
