// What EF21 and momentum correction remember (see cpu/modifiers/state_updates.py, which this equals bit for
// bit): one pass over memory each, for many tensors.

// EF21: out = x - other, or (kept + x) - other.
extern "C" __global__ void differ(const __grid_constant__ OperandTable all) {
    by_eight(all, [&](const Operands& tensor, i64 i, int left) {
        float v[8], sum[8], known[8];
        load_values(tensor.x, i, left, v);
        load_floats(tensor.other, i, left, known);
        if (tensor.kept) {
            load_floats(tensor.kept, i, left, sum);
#pragma unroll
            for (int e = 0; e < 8; ++e) v[e] = sum[e] + v[e];
        }
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] -= known[e];
        store_floats(tensor.out, i, left, v);
    });
}

// EF21: add out, what was received, to other, the server's; x, what was sent, to kept, the worker's;
// return the server's in out. Where that is not finite, nothing is remembered.
extern "C" __global__ void commit(const __grid_constant__ OperandTable all) {
    by_eight(all, [&](const Operands& tensor, i64 i, int left) {
        float total[8], own[8], server[8], worker[8];
        load_floats(tensor.out, i, left, total);
        load_floats((const float*)tensor.x, i, left, own);
        load_floats(tensor.other, i, left, server);
        load_floats(tensor.kept, i, left, worker);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            total[e] = server[e] + total[e], own[e] = worker[e] + own[e];
            if (is_finite(total[e])) {
                server[e] = total[e];
                if (is_finite(own[e])) worker[e] = own[e];
            }
        }
        store_floats(tensor.other, i, left, server);
        store_floats(tensor.kept, i, left, worker);
        store_floats(tensor.out, i, left, total);
    });
}

// Momentum: out = momentum * kept + bound * x.
extern "C" __global__ void advance(const __grid_constant__ OperandTable all) {
    by_eight(all, [&](const Operands& tensor, i64 i, int left) {
        const float scale = tensor.bound ? *tensor.bound : 1.0f;
        float v[8], velocity[8];
        load_values(tensor.x, i, left, v);
        load_floats(tensor.kept, i, left, velocity);
#pragma unroll
        for (int e = 0; e < 8; ++e) v[e] = all.momentum * velocity[e] + scale * v[e];
        store_floats(tensor.out, i, left, v);
    });
}

// Momentum: keep x, what advance gave, but zero where something was sent, if masking.
extern "C" __global__ void settle(const __grid_constant__ OperandTable all) {
    by_eight(all, [&](const Operands& tensor, i64 i, int left) {
        float v[8], sent[8], velocity[8];
        load_floats((const float*)tensor.x, i, left, v);
        load_floats(tensor.other, i, left, sent);
        load_floats(tensor.kept, i, left, velocity);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const bool masked = all.masking && magnitude_bits(sent[e]);
            if (is_finite(v[e]) && is_finite(sent[e])) velocity[e] = masked ? 0.0f : v[e];
        }
        store_floats(tensor.kept, i, left, velocity);
    });
}
