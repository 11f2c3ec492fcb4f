// The table of tensors that modifiers work on, element by element; its layout is that of memory.py.

struct Memory {  // of one tensor
    const void* x;
    float* kept;
    float* other;
    float* out;
    float* bound;  // one number: a factor or a limit; may be null
    i64 n;
    i64 first;  // number of its first unit of work among those of all
};

struct Memories {
    Memory tensors[64];
    double* sums;  // of chunks
    double clip;   // a norm, or root mean squares
    i64 units;
    int count;
    int masking;
    float momentum;
    int unused;
};

INLINE const Memory& memory_of(const Memories& all, i64 unit) {
    const auto begun = [&](int i) { return all.tensors[i].first <= unit; };
    return all.tensors[last_begun(all.count, begun)];
}

// Call put(memory, i, left) for every eight elements; left of them exist.
template <class Put> INLINE void by_eight(const Memories& all, const Put& put) {
    const i64 unit = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (unit >= all.units) return;
    const Memory& memory = memory_of(all, unit);
    const i64 i = (unit - memory.first) * 8;
    put(memory, i, (int)smaller(memory.n - i, (i64)8));
}
