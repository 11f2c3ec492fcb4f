// Powers of two: the mantissa is rounded away at random by one integer addition.
// See cpu/quantizers/natural.py, which this equals bit for bit.

struct Scale {
    u16 bits;
    float unit;
};

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    top = group_max(top);
    if (top >= 0x7F800000u) return {0x7FC0, float_of(0x7FC00000u)};
    // The highest power that rounding up may need gets code 127; a shift is a power of two.
    const int highest = (int)((top + 0x7FFFFFu) >> 23);
    // Tiny buckets have the lowest powers (see compressors/quantizers/natural.py).
    const bool tiny = highest > 0 && highest < 64;
    const int shift = tiny ? 104 - 127 : larger(smaller(highest, 254) - 127, 0);
    const u32 raw = (u32)(shift + 127) << 23;
    return {(u16)(raw >> 16), float_of(raw)};
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
    const u32 bits = bits_of(value * (1.0f / scale.unit));
    const u32 magnitude = (bits & 0x7FFFFFFFu) + (squares(key, counter) >> 9);
    return smaller(magnitude >> 23, 127u) | ((bits >> 24) & 0x80u);
}

INLINE float decode_code(u32 code, const Scale& scale) {
    return float_of((code & 0x7Fu) << 23 | (code & 0x80u) << 24) * scale.unit;
}
