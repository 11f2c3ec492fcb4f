// Bucketed quantisation to BITS bits (see cpu/quantizers/quantize.py, which this equals bit for bit).
// SCHEME: 0 largest magnitude, 1 Euclidean norm, 2 range. STOCHASTIC: round at random.

#define TINY 1.5e-36f
#define MAGIC 12582912.0f  // 1.5 * 2**23: adding it leaves a small float rounded to nearest even
#define LEVELS ((float)(SCHEME == 2 ? (1 << BITS) - 1 : (1 << (BITS - 1)) - 1))
#define ZERO (SCHEME == 2 ? 0.0f : LEVELS)
#define HIGHEST (SCHEME == 2 ? LEVELS : 2.0f * LEVELS)

struct Scale {
    u16 bits;
    float unit, low;
};

// An int that orders as the float32 values do.
INLINE int ordered(float value) {
    const int bits = (int)bits_of(value);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

INLINE float unordered(int place) {
    return float_of((u32)(place ^ ((place >> 31) & 0x7FFFFFFF)));
}

INLINE Scale from_extent(float extent, float low) {
    if (!is_finite(extent)) return {0x7FC0, float_of(0x7FC00000u), 0.0f};
    if (extent < TINY) return {0, 0.0f, low};
    const u16 bits = round_up_bf16(extent / LEVELS);
    return {bits, bf16_to_f32(bits), low};
}

template <class Values> INLINE Scale find_scale(const Values& values, int count, int lane) {
#if SCHEME == 1
    const auto square = [&](int i) {
        const double wide = (double)values.at(i);
        return wide * wide;
    };
    return from_extent((float)sqrt(eight_sums(square, count, lane)), 0.0f);
#elif SCHEME == 2
    u32 top = 0;
    int least = -2147483647 - 1, most = -2147483647 - 1;  // least: the complement's maximum
    values.each([&](float v) {
        top = larger(top, magnitude_bits(v));
        least = larger(least, ~ordered(v));
        most = larger(most, ordered(v));
    });
    const float largest = float_of(group_max(top));
    const float low = unordered(~group_max(least)), high = unordered(group_max(most));
    return from_extent(is_finite(largest) ? high - low : largest, low);
#else
    u32 top = 0;
    values.each([&](float v) { top = larger(top, magnitude_bits(v)); });
    return from_extent(float_of(group_max(top)), 0.0f);
#endif
}

INLINE bool is_bad(const Scale& scale) { return scale.bits == 0x7FC0; }

INLINE void write_scale(const Part& part, i64 bucket, const Scale& scale) {
    ((u16*)part.scales)[bucket] = scale.bits;
    if (SCHEME == 2) part.lows[bucket] = scale.low;
}

INLINE Scale read_scale(const Part& part, i64 bucket) {
    const u16 bits = ((const u16*)part.scales)[bucket];
    return {bits, bf16_to_f32(bits), SCHEME == 2 ? part.lows[bucket] : 0.0f};
}

INLINE u32 encode_value(float value, const Scale& scale, u64 key, u64 counter) {
    if (is_bad(scale)) return 0;
    if (scale.bits == 0) return (u32)ZERO;
    const float inverse = 1.0f / scale.unit;
    const float place = (SCHEME == 2 ? value - scale.low : value) * inverse;
#if STOCHASTIC
    return (u32)(int)smaller((place + ZERO) + uniform16(key, counter), HIGHEST);
#else
    return (u32)(int)((place + MAGIC) - MAGIC + ZERO);
#endif
}

INLINE float decode_code(u32 code, const Scale& scale) {
    const float value = ((float)code - ZERO) * scale.unit;
    return SCHEME == 2 ? value + scale.low : value;
}
