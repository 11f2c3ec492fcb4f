// 8-bit floats of MANTISSA bits (3 for e4m3, 2 for e5m2) with an exponent byte per bucket.
// See cpu/quantizers/fp8.py, which this equals bit for bit, and which explains the arithmetic.

#define EMAX (MANTISSA == 3 ? 8 : 15)
#define LOWEST (MANTISSA == 3 ? 121u : 113u)
#define HALF_CODES (1u << MANTISSA)
#define OVERFLOW_BITS 0x7F700000u  // from here on a rounded value may exceed float32

struct Scale {
    u32 byte;
    float unit;
};

INLINE Scale of_byte(u32 byte) {
    return {byte, float_of(byte << 23 | (byte == 255 ? 0x400000u : 0u))};
}

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    top = group_max(top);
    if (top >= OVERFLOW_BITS) return of_byte(255);
    const int above = (top & 0x7FFFFFu) > 0x600000u;
    return of_byte((u32)larger((int)(top >> 23) - EMAX + above, 1));
}

INLINE bool is_bad(const Scale& scale) { return scale.byte == 255; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    ((u8*)part.scales)[bucket] = (u8)scale.byte;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    return of_byte(((const u8*)part.scales)[bucket]);
}

INLINE u32 encode_value(float value, const Scale& scale, u64, u64) {
    if (is_bad(scale)) return 0;
    const u32 bits = bits_of(value * float_of((254u - scale.byte) << 23));
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 exponent = larger(magnitude >> 23, LOWEST);
    const float anchor = float_of((exponent + 23u - MANTISSA) << 23);
    const u32 total = bits_of(float_of(magnitude) + anchor) & (4u * HALF_CODES - 1u);
    const u32 code = ((exponent - (LOWEST - 1u)) << MANTISSA) + (total - HALF_CODES);
    return (code & 0xFFu) | (bits >> 31 << 7);
}

INLINE float decode_code(u32 code, const Scale& scale) {
    const u32 rest = code & 0x7Fu;
    const bool subnormal = rest < HALF_CODES;
    const u32 bias = subnormal ? LOWEST : LOWEST - 1u;
    // A subnormal is read as a normal number of the lowest exponent, less that number's one.
    const float normal = float_of((rest << (23 - MANTISSA)) + (bias << 23));
    const float value = normal - (subnormal ? float_of(LOWEST << 23) : 0.0f);
    return float_of(bits_of(value) | (code & 0x80u) << 24) * scale.unit;
}
