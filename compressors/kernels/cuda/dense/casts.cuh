// Casts to 16 bits: HALF 1 for float16, 0 for bfloat16. There is no scale.

struct Scale {
    bool bad;
};

INLINE u32 encode_value(float value, const Scale&, u64, u64) {
    return HALF ? f32_to_f16(value) : f32_to_bf16(value);
}

INLINE float decode_code(u32 code, const Scale&) {
    return HALF ? f16_to_f32((u16)code) : bf16_to_f32((u16)code);
}

template <class Values> INLINE Scale find_scale(const Values& values, int, int) {
    u32 top = 0;
    if (values.table.flag)
        values.each([&](float v) {
            const u32 code = encode_value(v, Scale{false}, 0, 0);
            top = larger(top, magnitude_bits(decode_code(code, Scale{false})));
        });
    return {group_max(top) >= 0x7F800000u};
}

INLINE bool is_bad(const Scale& scale) { return scale.bad; }
INLINE void write_scale(const Part&, i64, const Scale&) {}
INLINE Scale read_scale(const Part&, i64) { return {false}; }
