// Exponents in few bits (see kernels/lossless.py, which this equals bit for bit, and blocks.cuh).
// EXACT: of float32, else of values rounded to bfloat16.

INLINE u32 warp_max(u32 value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        value = larger(value, __shfl_xor_sync(0xFFFFFFFFu, value, other));
    return value;
}

INLINE u64 warp_sum(u64 value) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2)
        value += __shfl_xor_sync(0xFFFFFFFFu, value, other);
    return value;
}

// Choose each block's bits; write what has a place of its own already.
extern "C" __global__ void __launch_bounds__(THREADS) survey(const __grid_constant__ Coding all) {
    Place place;
    if (!find_place(all, place)) return;
    const Coded& tensor = *place.tensor;
    const int lane = threadIdx.x % 32;
    const i64 base = (i64)place.inside * SIDE;
    u32 exponents[HELD], top = 0;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = 32 * h + lane;
        exponents[h] = 0;
        if (i >= place.count) continue;
        const float v = value_at(tensor.data, base + i);
        const u32 half = EXACT ? bits_of(v) >> 16 : f32_to_bf16(v);
        exponents[h] = half >> 7 & 0xFF, top = larger(top, exponents[h]);
        tensor.mantissas[base + i] = (u8)((half >> 8 & 0x80) | (half & 0x7F));
        if (EXACT) tensor.rests[base + i] = (u16)bits_of(v);
    }
    top = warp_max(top);
    u64 counts = 0;  // five, of twelve bits each
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = 32 * h + lane;
        const u32 far = i < place.count ? top - exponents[h] : 0;
        all.far[place.block * SIDE + i] = (u8)far;
        counts += (u64)(far > 0) | (u64)(far >= 3) << 12 | (u64)(far >= 7) << 24 |
                  (u64)(far >= 15) << 36 | (u64)(far >= 31) << 48;
    }
    counts = warp_sum(counts);
    u32 width = 8, spare = 0, least = 8 * SIDE;
    if ((counts & 0xFFF) == 0) width = 0, least = 0;
#pragma unroll
    for (int w = 2; w <= 5; ++w) {
        const u32 apart = (u32)(counts >> (12 * (w - 1))) & 0xFFF;
        if (w * SIDE + 8 * apart < least) width = w, spare = apart, least = w * SIDE + 8 * apart;
    }
    if (lane == 0) {
        tensor.tops[place.inside] = (u8)top, tensor.widths[place.inside] = (u8)width;
        tensor.counts[place.inside] = (u16)spare;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) encode(const __grid_constant__ Coding all) {
    Place place;
    if (!find_place(all, place)) return;
    const Coded& tensor = *place.tensor;
    const int lane = threadIdx.x % 32, width = tensor.widths[place.inside];
    const u32 limit = (1u << width) - 1;
    const bool sparing = tensor.counts[place.inside] > 0;
    i64 codes, spares;
    find_codes(all, place, codes, spares);
    u64 words[2] = {0, 0};
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const u32 far = all.far[place.block * SIDE + 32 * h + lane];
        const bool apart = sparing && far >= limit;
        const u32 others = __ballot_sync(0xFFFFFFFFu, apart);
        if (apart)
            tensor.spares[spares + __popc(others & ((1u << lane) - 1))] =
                (u8)(tensor.tops[place.inside] - far);
        spares += __popc(others);
        words[h % 2] |= (u64)smaller(far, limit) << (h / 2 * width);
    }
    for (int j = 0; j < width; ++j) {
        u8* to = tensor.codes + codes + j * STREAMS;
        to[lane] = (u8)(words[0] >> (8 * j)), to[32 + lane] = (u8)(words[1] >> (8 * j));
    }
}

// Nothing is read beyond the end of codes and spares, whatever the payload says.
extern "C" __global__ void __launch_bounds__(THREADS) decode(const __grid_constant__ Coding all) {
    Place place;
    if (!find_place(all, place)) return;
    const Coded& tensor = *place.tensor;
    const int lane = threadIdx.x % 32, said = tensor.widths[place.inside];
    const u32 top = tensor.tops[place.inside], count = tensor.counts[place.inside];
    i64 codes, spares;
    find_codes(all, place, codes, spares);
    const int width = said <= 8 && codes + said * STREAMS <= tensor.codes_size ? said : 0;
    const u32 limit = (1u << width) - 1;
    u64 words[2] = {0, 0};
    for (int j = 0; j < width; ++j) {
        const u8* from = tensor.codes + codes + j * STREAMS;
        words[0] |= (u64)from[lane] << (8 * j), words[1] |= (u64)from[32 + lane] << (8 * j);
    }
    const i64 base = (i64)place.inside * SIDE;
    u32 taken = 0;
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
        const int i = 32 * h + lane;
        const u32 far = (u32)(words[h % 2] >> (h / 2 * width)) & limit;
        const bool apart = count > 0 && far == limit && i < place.count;
        const u32 others = __ballot_sync(0xFFFFFFFFu, apart);
        const u32 rank = taken + __popc(others & ((1u << lane) - 1));
        taken += __popc(others);
        if (i >= place.count) continue;
        const bool spare = apart && rank < count && spares + rank < tensor.spares_size;
        const u32 exponent = spare ? tensor.spares[spares + rank] : (top - far) & 0xFF;
        const u32 mantissa = tensor.mantissas[base + i];
        u32 bits = exponent << 23 | (mantissa & 0x80) << 24 | (mantissa & 0x7F) << 16;
        if (EXACT) bits |= tensor.rests[base + i];
        float* out = (float*)tensor.data + base + i;
        *out = ADDING ? *out + float_of(bits) : float_of(bits);
    }
}
