// Ternary codes 0, 1, 2 for -s, 0, s: a sign is kept with probability |x| / s, s at most PARAMETER
// root mean squares. See cpu/quantizers/terngrad.py, which this equals bit for bit.

struct Scale {
    u16 bits;
    float unit;
};

template <class Values> INLINE Scale find_scale(const Values& values, int count, int lane) {
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    const float largest = float_of(group_max(top));
    const auto square = [&](int i) {
        const double wide = (double)values.at(i);
        return wide * wide;
    };
    // Compared in double precision: the product may exceed float32.
    const double limit = PARAMETER * sqrt(lane_sum(square, count, lane) / count);
    if (!is_finite(largest)) return {0x7FC0, float_of(0x7FC00000u)};
    const u16 bits = round_up_bf16((float)smaller((double)largest, limit));
    return {bits, bf16_to_f32(bits)};
}

INLINE bool is_bad(const Scale& scale) { return scale.bits == 0x7FC0; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    ((u16*)part.scales)[bucket] = scale.bits;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    const u16 bits = ((const u16*)part.scales)[bucket];
    return {bits, bf16_to_f32(bits)};
}

INLINE u32 encode_value(float value, const Scale& scale, u64 key, u64 counter) {
    if (is_bad(scale)) return 0;
    // Multiplied, not divided: a tiny scale has no inverse.
    const bool kept = uniform(key, counter) * scale.unit < float_of(magnitude_bits(value));
    return kept ? 2u - ((bits_of(value) >> 31) << 1) : 1u;
}

INLINE float decode_code(u32 code, const Scale& scale) {
    return ((float)code - 1.0f) * scale.unit;
}
