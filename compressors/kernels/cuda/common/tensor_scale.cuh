// What all blocks of a tensor share: its largest finite magnitude over HIGHEST, at least 2**-126.
// The values are those that ``encode`` is about to see.

#define HIGHEST 2688.0f
#define TINY_BITS 0x00800000u

extern "C" __global__ void clear(const __grid_constant__ Table table) {
    const int number = (int)((i64)blockIdx.x * blockDim.x + threadIdx.x);
    if (number < table.count && table.segments[number].n > 0)
        *(u32*)table.parts[number].lows = TINY_BITS;
}

INLINE void raise_unit(const Table& table, int number, u32 top) {
    u32* unit = (u32*)table.parts[number].lows;
    const u32 bits = bits_of(float_of(top) / HIGHEST);  // ordered as the magnitudes are
    if (bits > *(volatile u32*)unit) atomicMax(unit, bits);
}

// A unit of work is a bucket, as in ``encode``.
extern "C" __global__ void extent(const __grid_constant__ Table table) {
    const i64 unit = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / GROUP;
    const int number = segment_of(table, unit), lane = threadIdx.x % GROUP;
    const i64 base = (unit - table.segments[number].first) * BUCKET;
    const i64 left = table.segments[number].n - base;
    const int count = unit < table.units ? (int)smaller(left, (i64)BUCKET) : 0;
    u32 top = 0;
    Values(table, number, base, count, lane).each([&](float v) {
        const u32 bits = magnitude_bits(v);
        top = larger(top, bits < 0x7F800000u ? bits : 0u);
    });
    // Most warps lie in one tensor, and ask for one atomic.
    const int leader = __shfl_sync(WHOLE_WARP, number, 0);
    if (number != leader) {
        if (top) raise_unit(table, number, top);
        top = 0;
    }
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        top = larger(top, __shfl_xor_sync(WHOLE_WARP, top, other));
    if (threadIdx.x % 32 == 0 && top) raise_unit(table, leader, top);
}
