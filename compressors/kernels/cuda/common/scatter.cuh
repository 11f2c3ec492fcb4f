// Sums of sparse payloads of many tensors: outputs are cleared, then entries are put and added,
// a payload after the other, so that sums are formed in order (see cpu/sparsifiers/threshold.py).

#define MOST_SCATTERED 32

struct Scattered {  // one tensor
    float* out;
    const u32* indices;  // of one payload; they do not repeat
    const float* values;
    i64 n;
    i64 entries;
    i64 first;  // number of its first eight elements among those of all tensors
    i64 begin;  // and of its first entry
};

struct Scattering {
    Scattered tensors[MOST_SCATTERED];
    i64 units;
    i64 entries;
    int count;
    float scale;
};

// Call put(tensor, i, left) for every eight elements; left of them exist.
template <class Put> INLINE void by_eight(const Scattering& all, const Put& put) {
    const i64 unit = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (unit >= all.units) return;
    const auto begun = [&](int i) { return all.tensors[i].first <= unit; };
    const Scattered& tensor = all.tensors[last_begun(all.count, begun)];
    const i64 i = (unit - tensor.first) * 8;
    put(tensor, i, (int)smaller(tensor.n - i, (i64)8));
}

// Call put(output, value) for every entry; an index beyond the end, which no encoder sends, is left
// out.
template <class Put> INLINE void by_entry(const Scattering& all, const Put& put) {
    const i64 entry = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= all.entries) return;
    const auto begun = [&](int i) { return all.tensors[i].begin <= entry; };
    const Scattered& tensor = all.tensors[last_begun(all.count, begun)];
    const i64 j = entry - tensor.begin;
    const u32 at = tensor.indices[j];
    if (at < tensor.n) put(tensor.out[at], tensor.values[j]);
}

extern "C" __global__ void clear(const __grid_constant__ Scattering all) {
    const float zeros[8] = {};
    by_eight(all, [&](const Scattered& tensor, i64 i, int left) {
        store_floats(tensor.out, i, left, zeros);
    });
}

extern "C" __global__ void put(const __grid_constant__ Scattering all) {
    by_entry(all, [](float& out, float value) { out = value; });
}

extern "C" __global__ void add(const __grid_constant__ Scattering all) {
    by_entry(all, [](float& out, float value) { out += value; });
}

extern "C" __global__ void scale(const __grid_constant__ Scattering all) {
    by_eight(all, [&](const Scattered& tensor, i64 i, int left) {
        float v[8];
        load_floats(tensor.out, i, left, v);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] *= all.scale;
        store_floats(tensor.out, i, left, v);
    });
}
