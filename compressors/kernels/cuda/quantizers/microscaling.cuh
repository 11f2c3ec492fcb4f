// Blocks of small floats with a power of two each, as in OCP MX (see
// cpu/quantizers/microscaling.py, which this equals bit for bit).

#define EMAX ((LARGEST >> MANTISSA) - 128 + LOWEST)

struct Scale {
    u32 byte;
    float unit;
};

// 2**(byte - 127), which is subnormal for 0, and NaN for 255.
INLINE Scale of_byte(u32 byte) {
    return {byte, float_of(byte << 23 | (byte == 0 || byte == 255 ? 0x400000u : 0u))};
}

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    top = group_max(top);
    if (top >= 0x7F800000u) return of_byte(255);
    return of_byte((u32)larger((int)(top >> 23) - EMAX, 0));
}

INLINE bool is_bad(const Scale& scale) { return scale.byte == 255; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    ((u8*)part.scales)[bucket] = (u8)scale.byte;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    return of_byte(((const u8*)part.scales)[bucket]);
}

INLINE u32 encode_value(float value, const Scale& scale, u64 key, u64 counter) {
    if (is_bad(scale)) return 0;
    return encode_float(value * float_of((254u - scale.byte) << 23), key, counter);
}

INLINE float decode_code(u32 code, const Scale& scale) { return decode_float(code) * scale.unit; }
