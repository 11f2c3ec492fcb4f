// One bit per entry, set where it is negative, and for half of what is zero. GIVEN: the scale is
// PARAMETER, not the mean magnitude. See cpu/quantizers/onebit.py, which this equals bit for bit.

struct Scale {
    u16 bits;
    float unit;
};

template <class Values> INLINE Scale find_scale(const Values& values, int count, int lane) {
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    const bool bad = group_max(top) >= 0x7F800000u;
#if GIVEN
    const float mean = (float)PARAMETER;
#else
    const auto term = [&](int i) { return (double)float_of(magnitude_bits(values.at(i))); };
    const float mean = (float)(lane_sum(term, count, lane) / count);
#endif
    const u16 bits = bad ? 0x7FC0 : nearest_bf16(mean);
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
    if (value != 0.0f) return value < 0.0f;
    return squares(key, counter >> 3) >> (24 + (counter & 7)) & 1;  // a draw for each eight
}

INLINE float decode_code(u32 code, const Scale& scale) {
    return float_of(bits_of(scale.unit) | code << 31);
}
