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
