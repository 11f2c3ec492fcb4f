// Sums in double precision whose order depends on nothing but places: of chunks, each in the order of
// the CPU kernels (see cpu/common/ordered_sums.py), then of the chunks' sums one after the other.

#define CHUNK 65536  // elements that are summed in one piece
#define TILE (THREADS * 8)
#define LANES 32  // element i of a chunk is added to sum i % LANES

INLINE int chunks_of(i64 n) { return (int)((n + CHUNK - 1) / CHUNK); }

// The sum of term(v) over the size values of a chunk, of which load(at, count, v) fetches eight, zeros
// behind the end included. Right in thread 0; its warp adds, and the others read ahead of it.
template <class Load, class Term>
INLINE double chunk_sum(int size, const Load& load, const Term& term) {
    __shared__ float tile[TILE];
    double sum = 0.0;
    for (int start = 0; start < size; start += TILE) {
        const int at = start + threadIdx.x * 8;
        float v[8] = {};
        load(at, smaller(larger(size - at, 0), 8), v);
        __syncthreads();  // the tile before has been added
        store_floats(tile, threadIdx.x * 8, 8, v);
        __syncthreads();
        if (threadIdx.x < LANES)
            for (int j = threadIdx.x; j < TILE; j += LANES) sum += term(tile[j]);
    }
    __syncthreads();
    if (threadIdx.x < LANES)
#pragma unroll
        for (int width = LANES / 2; width > 0; width /= 2)
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
    return sum;
}

// The sum of so many sums. Right in thread 0.
INLINE double ordered_sum(const double* sums, int count) {
    __shared__ double some[THREADS];
    double total = 0.0;
    for (int start = 0; start < count; start += THREADS) {
        const int size = smaller(count - start, THREADS);
        if (threadIdx.x < size) some[threadIdx.x] = sums[start + threadIdx.x];
        __syncthreads();
        for (int j = 0; threadIdx.x == 0 && j < size; ++j) total += some[j];
        __syncthreads();
    }
    return total;
}
