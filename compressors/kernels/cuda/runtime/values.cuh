// Eight values at a time: loads and stores of 16 bytes where memory is aligned and the eight exist.
// INPUT: 0 float32, 1 float16, 2 bfloat16.

INLINE float value_at(const void* data, i64 i) {
#if INPUT == 0
    return ((const float*)data)[i];
#elif INPUT == 1
    return f16_to_f32(((const u16*)data)[i]);
#else
    return bf16_to_f32(((const u16*)data)[i]);
#endif
}

INLINE void load_floats(const float* from, i64 i, int count, float* v) {
    if (count >= 8 && aligned(from + i, 16)) {
        const float4 a = *(const float4*)(from + i), b = *(const float4*)(from + i + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
        v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = e < count ? from[i + e] : 0.0f;
}

INLINE void load_values(const void* data, i64 i, int count, float* v) {
#if INPUT == 0
    load_floats((const float*)data, i, count, v);
#else
    if (count >= 8 && aligned((const u16*)data + i, 16)) {
        const uint4 raw = *(const uint4*)((const u16*)data + i);
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u16 bits = (u16)(words[e / 2] >> (16 * (e % 2)));
            v[e] = INPUT == 1 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = e < count ? value_at(data, i + e) : 0.0f;
#endif
}

INLINE void store_floats(float* to, i64 i, int count, const float* v) {
    if (count >= 8 && aligned(to + i, 16)) {
        *(float4*)(to + i) = make_float4(v[0], v[1], v[2], v[3]);
        *(float4*)(to + i + 4) = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < count) to[i + e] = v[e];
}

// Write what is finite of v; what was there stays where it is not.
INLINE void store_finite(float* to, i64 i, int count, const float* v) {
    bool all = true;
#pragma unroll
    for (int e = 0; e < 8; ++e) all = all && is_finite(v[e]);
    if (all) return store_floats(to, i, count, v);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < count && is_finite(v[e])) to[i + e] = v[e];
}

// -- codes: BITS each, eight of them BITS bytes, least significant bits first --------------------

struct Word {
    u64 low, high;  // high for codes of 16 bits alone
};

INLINE u32 code_in(const Word& word, int e) {
#if BITS == 16
    return (u32)((e < 4 ? word.low : word.high) >> (16 * (e % 4))) & 0xFFFFu;
#else
    return (u32)(word.low >> (e * BITS)) & ((1u << BITS) - 1);
#endif
}

INLINE void put_code(Word& word, int e, u32 code) {
#if BITS == 16
    (e < 4 ? word.low : word.high) |= (u64)code << (16 * (e % 4));
#else
    word.low |= (u64)code << (e * BITS);
#endif
}

// Codes i .. i + 7 of a stream, of which count exist; i is a multiple of eight.
INLINE Word load_codes(const void* codes, i64 i, int count) {
    const u8* from = (const u8*)codes + i / 8 * BITS;
    Word word = {0, 0};
    if (count >= 8 && aligned(from, BITS & -BITS)) {
#if BITS == 16
        const uint4 raw = *(const uint4*)from;
        word.low = raw.x | (u64)raw.y << 32, word.high = raw.z | (u64)raw.w << 32;
        return word;
#elif BITS == 8
        word.low = *(const u64*)from;
        return word;
#elif BITS == 4
        word.low = *(const u32*)from;
        return word;
#elif BITS == 2
        word.low = *(const u16*)from;
        return word;
#endif
    }
    const int bytes = (smaller(count, 8) * BITS + 7) / 8;
#pragma unroll
    for (int j = 0; j < BITS; ++j)
        if (j < bytes) (j < 8 ? word.low : word.high) |= (u64)from[j] << (8 * (j % 8));
    return word;
}

INLINE void store_codes(void* codes, i64 i, int count, const Word& word) {
    u8* to = (u8*)codes + i / 8 * BITS;
    if (count >= 8 && aligned(to, BITS & -BITS)) {
#if BITS == 16
        *(uint4*)to = make_uint4((u32)word.low, (u32)(word.low >> 32), (u32)word.high,
                                 (u32)(word.high >> 32));
        return;
#elif BITS == 8
        *(u64*)to = word.low;
        return;
#elif BITS == 4
        *(u32*)to = (u32)word.low;
        return;
#elif BITS == 2
        *(u16*)to = (u16)word.low;
        return;
#endif
    }
    const int bytes = (smaller(count, 8) * BITS + 7) / 8;
#pragma unroll
    for (int j = 0; j < BITS; ++j)
        if (j < bytes) to[j] = (u8)((j < 8 ? word.low : word.high) >> (8 * (j % 8)));
}
