// The table of tensors that modifiers work on, element by element; its layout is that of operands.py.

struct Operands {  // of one tensor
    const void* x;
    float* kept;
    float* other;
    float* out;
    float* bound;  // one number: a factor or a limit; may be null
    i64 n;
    i64 first;  // number of its first unit of work among those of all
};

struct OperandTable {
    Operands tensors[64];
    double* sums;  // of chunks
    double clip;   // a norm, or root mean squares
    i64 units;
    int count;
    int masking;
    float momentum;
    int unused;
};

INLINE const Operands& operands_of(const OperandTable& all, i64 unit) {
    const auto begun = [&](int i) { return all.tensors[i].first <= unit; };
    return all.tensors[last_begun(all.count, begun)];
}

// Call put(tensor, i, left) for every eight elements; left of them exist.
template <class Put> INLINE void by_eight(const OperandTable& all, const Put& put) {
    const i64 unit = (i64)blockIdx.x * THREADS + threadIdx.x;
    if (unit >= all.units) return;
    const Operands& tensor = operands_of(all, unit);
    const i64 i = (unit - tensor.first) * 8;
    put(tensor, i, (int)smaller(tensor.n - i, (i64)8));
}
