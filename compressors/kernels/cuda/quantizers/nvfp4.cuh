// Blocks of small floats with an 8-bit float (E4M3) each, and a float32 per tensor (see
// cpu/quantizers/nvfp4.py, which this equals bit for bit). tensor_scale.cuh finds the latter before.

struct Scale {
    u32 code;
    float unit;
};

// The value of E4M3 code 0 to 0x7E, NaN of 0x7F.
INLINE float of_e4m3(u32 code) {
    const bool subnormal = code < 8u;
    const float normal = float_of((code << 20) + ((subnormal ? 121u : 120u) << 23));
    const float value = normal - (subnormal ? float_of(121u << 23) : 0.0f);
    return code == 0x7Fu ? float_of(0x7FC00000u) : value;
}

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
    const float unit = *values.table.parts[values.number].lows;
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    top = group_max(top);
    if (top >= 0x7F800000u) return {0x7Fu, float_of(0x7FC00000u)};
    const u32 ratio = bits_of(float_of(top) / (6.0f * unit));
    const u32 exponent = larger(ratio, 121u << 23) & 0x7F800000u, base = exponent + (20u << 23);
    const u32 steps = bits_of(float_of(ratio) + float_of(base)) - base;
    const u32 code = smaller(steps + (exponent >> 20) - (121u << 3), 0x7Eu);
    return {code, of_e4m3(code) * unit};
}

INLINE bool is_bad(const Scale& scale) { return scale.code == 0x7Fu; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    ((u8*)part.scales)[bucket] = (u8)scale.code;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    const u32 code = ((const u8*)part.scales)[bucket];
    return {code, of_e4m3(code) * *part.lows};
}

INLINE u32 encode_value(float value, const Scale& scale, u64 key, u64 counter) {
    if (is_bad(scale)) return 0;
    const float inverse = scale.unit >= 1.17549435e-38f ? 1.0f / scale.unit : 0.0f;
    return encode_float(value * inverse, key, counter);
}

INLINE float decode_code(u32 code, const Scale& scale) { return decode_float(code) * scale.unit; }
