// Floats of MANTISSA bits whose smallest normal number has the exponent LOWEST (biased as float32's).
// See cpu/common/minifloats.py, which this equals bit for bit, and which explains the arithmetic.
// LARGEST: the code of the largest number; INFINITE: of Inf, 255 for none. STOCHASTIC: at random.

#define ONE (LOWEST << 23)

INLINE u32 encode_float(float value, u64 key, u64 counter) {
    const u32 bits = bits_of(value), rest = bits & 0x7FFFFFFFu;
#if STOCHASTIC
    const bool subnormal = rest < (u32)ONE;
    const float normal = float_of(rest) + (subnormal ? float_of((u32)ONE) : 0.0f);
    const u32 raised = bits_of(normal) + (squares(key, counter) >> (9 + MANTISSA));
    const u32 code = (raised >> (23 - MANTISSA)) - ((u32)(subnormal ? LOWEST : LOWEST - 1) << MANTISSA);
#else
    const u32 exponent = larger(rest, (u32)ONE) & 0x7F800000u;
    const u32 base = exponent + ((23u - MANTISSA) << 23);
    const u32 steps = bits_of(float_of(rest) + float_of(base)) - base;
    const u32 code = steps + (exponent >> (23 - MANTISSA)) - ((u32)LOWEST << MANTISSA);
#endif
    return smaller(code, (u32)LARGEST) | (bits >> 31) << (BITS - 1);
}

INLINE float decode_float(u32 code) {
    const u32 rest = code & ((1u << (BITS - 1)) - 1u), sign = code >> (BITS - 1) << 31;
    const bool subnormal = rest < (1u << MANTISSA);
    const u32 bias = (u32)(subnormal ? LOWEST : LOWEST - 1) << 23;
    const float normal = float_of((rest << (23 - MANTISSA)) + bias);
    u32 bits = bits_of(normal - (subnormal ? float_of((u32)ONE) : 0.0f));
    if (BITS == 8 && rest > LARGEST) bits = rest == INFINITE ? 0x7F800000u : 0x7FC00000u;
    return float_of(bits | sign);
}
