// Residuals that are kept in 16 bits (bfloat16) or 8 (with a bfloat16 scale per bucket), rounded at
// random; none decodes to what is not finite. See cpu/modifiers/residuals.py, which this equals bit
// for bit.

#define TINY 1.5e-36f
#define STREAM 0x2545F4914F6CDD1CULL  // apart from what the compressor draws by the same key

struct Scale {
    u16 bits;
    float unit;
};

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
#if BITS == 16
    return {0, 0.0f};
#else
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    const float extent = float_of(group_max(top));
    if (extent < TINY) return {0, 0.0f};
    const u16 bits = (u16)smaller((bits_of(extent / 127.0f) + 0xFFFFu) >> 16, 0x7BFFu);
    return {bits, bf16_to_f32(bits)};
#endif
}

INLINE bool is_bad(const Scale&) { return false; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    if (BITS == 8) ((u16*)part.scales)[bucket] = scale.bits;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    if (BITS == 16) return {0, 0.0f};
    const u16 bits = ((const u16*)part.scales)[bucket];
    return {bits, bf16_to_f32(bits)};
}

INLINE u32 encode_value(float value, const Scale& scale, u64 key, u64 counter) {
#if BITS == 16
    const u32 bits = bits_of(value), drawn = squares(key ^ STREAM, counter) >> 16;
    return smaller(((bits & 0x7FFFFFFFu) + drawn) >> 16, 0x7F7Fu) | (bits >> 16 & 0x8000u);
#else
    if (scale.bits == 0) return 0;
    const float rounded = floorf(value * (1.0f / scale.unit) + uniform16(key ^ STREAM, counter));
    return (u32)(int)smaller(larger(rounded, -127.0f), 127.0f) & 0xFFu;
#endif
}

INLINE float decode_code(u32 code, const Scale& scale) {
    if (BITS == 16) return bf16_to_f32((u16)code);
    return (float)(signed char)code * scale.unit;
}
