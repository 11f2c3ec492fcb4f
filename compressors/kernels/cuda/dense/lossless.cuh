// Exponents in few bits (see kernels/cpu/dense/lossless.py, which this equals bit for bit). EXACT: of
// float32, else of values rounded to bfloat16.
//
// Blocks of 512 elements whose exponents take few bits each, and where in a payload they lie. A warp
// works on a block; a lane holds elements 32 h + lane, h from 0 to 15: those of two of the 64 streams
// that a block's codes are packed into.

#define SIDE 512        // elements of a block
#define HELD 16         // of them that a lane holds
#define STREAMS 64
#define GROUPED 2048    // blocks whose sizes are summed together
#define EACH (GROUPED / THREADS)

struct Coded {  // one tensor
    void* data;  // values, or the output
    u8* tops;
    u8* widths;
    u16* counts;
    u8* codes;
    u8* spares;
    u8* mantissas;
    u16* rests;
    i64 codes_size;
    i64 spares_size;
    i64 n;
    i64 first;  // number of its first block among those of all
    i64 group;  // and of its first group
};

struct Coding {
    Coded tensors[32];
    u8* far;      // distances of exponents from their block's largest
    u32* places;  // of a block inside its group: its codes, in units of 64 bytes
    u32* apart;   // and its spares
    u32* codes_before;  // of a group
    u32* spares_before;
    u32* totals;  // of a tensor: units of codes, and spares
    i64 blocks;
    int count;
    int unused;
};

INLINE int blocks_of(const Coded& tensor) { return (int)((tensor.n + SIDE - 1) / SIDE); }

// The block of this warp: its number among all, its tensor, and its number there. False: none.
struct Place {
    i64 block;
    const Coded* tensor;
    int inside;
    int count;  // of its elements
};

INLINE bool find_place(const Coding& all, Place& place) {
    place.block = ((i64)blockIdx.x * THREADS + threadIdx.x) / 32;
    if (place.block >= all.blocks) return false;
    const auto begun = [&](int i) { return all.tensors[i].first <= place.block; };
    place.tensor = all.tensors + last_begun(all.count, begun);
    place.inside = (int)(place.block - place.tensor->first);
    place.count = (int)smaller(place.tensor->n - (i64)place.inside * SIDE, (i64)SIDE);
    return true;
}

// Where the block's codes and spares begin.
INLINE void find_codes(const Coding& all, const Place& place, i64& codes, i64& spares) {
    const i64 group = place.tensor->group + place.inside / GROUPED;
    codes = ((i64)all.codes_before[group] + all.places[place.block]) * STREAMS;
    spares = (i64)all.spares_before[group] + all.apart[place.block];
}

// Inside groups; a CUDA block for each.
extern "C" __global__ void __launch_bounds__(THREADS) arrange(const __grid_constant__ Coding all) {
    const i64 group = blockIdx.x;
    const Coded& tensor =
        all.tensors[last_begun(all.count, [&](int i) { return all.tensors[i].group <= group; })];
    const int first = (int)(group - tensor.group) * GROUPED + threadIdx.x * EACH;
    const int last = smaller(first + EACH, blocks_of(tensor));
    u32 codes = 0, spares = 0, all_codes, all_spares;
    for (int b = first; b < last; ++b) codes += tensor.widths[b], spares += tensor.counts[b];
    codes = scan_before(codes, all_codes), spares = scan_before(spares, all_spares);
    for (int b = first; b < last; ++b) {
        all.places[tensor.first + b] = codes, all.apart[tensor.first + b] = spares;
        codes += tensor.widths[b], spares += tensor.counts[b];
    }
    if (threadIdx.x == 0) all.codes_before[group] = all_codes, all.spares_before[group] = all_spares;
}

// Of groups; a CUDA block for each tensor.
extern "C" __global__ void __launch_bounds__(THREADS) carry(const __grid_constant__ Coding all) {
    const Coded& tensor = all.tensors[blockIdx.x];
    const int groups = (blocks_of(tensor) + GROUPED - 1) / GROUPED;
    u32 codes = 0, spares = 0, more_codes, more_spares;
    for (int start = 0; start < groups; start += THREADS) {
        const bool any = start + (int)threadIdx.x < groups;
        const i64 group = tensor.group + start + threadIdx.x;
        const u32 here = scan_before(any ? all.codes_before[group] : 0, more_codes);
        const u32 apart = scan_before(any ? all.spares_before[group] : 0, more_spares);
        if (any) all.codes_before[group] = codes + here, all.spares_before[group] = spares + apart;
        codes += more_codes, spares += more_spares;
    }
    if (threadIdx.x == 0) all.totals[2 * blockIdx.x] = codes, all.totals[2 * blockIdx.x + 1] = spares;
}

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
