// The randomised Hadamard rotation, a CUDA block for BLOCK elements in shared memory (see
// cpu/modifiers/hadamard.py, which this equals bit for bit). BLOCK: a power of two, 64 to 8192.

#define GROUP_OF_SIGNS (BLOCK < 2048 ? BLOCK : 2048)
#define SIGN_WORDS (64 * (BLOCK / GROUP_OF_SIGNS))

struct Rotation {
    const float* x;
    float* out;
    i64 n;
    u64 key;
    u64 start;  // place of x[0] in its tensor
    int adding;
    int unused;
};

// Bit i / 64 of random number i % 64 decides on element i of a group.
INLINE void draw_signs(const Rotation& all, u32* words) {
    const u64 first = (all.start + (u64)blockIdx.x * BLOCK) / GROUP_OF_SIGNS * 64;
    for (int j = threadIdx.x; j < SIGN_WORDS; j += THREADS) words[j] = squares(all.key, first + j);
}

INLINE float flipped(float value, const u32* words, int i) {
    const int group = i / GROUP_OF_SIGNS, place = i % GROUP_OF_SIGNS;
    const u32 sign = (words[64 * group + place % 64] << (31 - place / 64)) & 0x80000000u;
    return float_of(bits_of(value) ^ sign);
}

// Transform count elements in place; fewer than BLOCK in powers of two, the largest first.
INLINE void transform(float* v, int count) {
    for (int start = 0, size = BLOCK; start < count; start += size) {
        while (size > count - start) size /= 2;
        const float unit = (float)(1.0 / sqrt((double)size));
        float* piece = v + start;
        for (int i = threadIdx.x; i < size; i += THREADS) piece[i] *= unit;
        __syncthreads();
        for (int half = 1; half < size; half *= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int i = pair / half * 2 * half + pair % half;
                const float a = piece[i], b = piece[i + half];
                piece[i] = a + b, piece[i + half] = a - b;
            }
            __syncthreads();
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) rotate(const __grid_constant__ Rotation all) {
    __shared__ float v[BLOCK];
    __shared__ u32 words[SIGN_WORDS];
    const i64 base = (i64)blockIdx.x * BLOCK;
    const int count = (int)smaller(all.n - base, (i64)BLOCK);
    draw_signs(all, words);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) v[i] = flipped(all.x[base + i], words, i);
    __syncthreads();
    transform(v, count);
    for (int i = threadIdx.x; i < count; i += THREADS) all.out[base + i] = v[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) restore(const __grid_constant__ Rotation all) {
    __shared__ float v[BLOCK];
    __shared__ u32 words[SIGN_WORDS];
    const i64 base = (i64)blockIdx.x * BLOCK;
    const int count = (int)smaller(all.n - base, (i64)BLOCK);
    draw_signs(all, words);
    for (int i = threadIdx.x; i < count; i += THREADS) v[i] = all.x[base + i];
    __syncthreads();
    transform(v, count);
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const float value = flipped(v[i], words, i);
        all.out[base + i] = all.adding ? all.out[base + i] + value : value;
    }
}
