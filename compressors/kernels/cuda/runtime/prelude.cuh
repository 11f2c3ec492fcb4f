// What every kernel uses: names of types, bit casts, half precision, random numbers.
// Compiled without contraction (no fused multiply-add), so that results equal the CPU's bit for bit.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE __device__ __forceinline__

INLINE u32 bits_of(float value) { return __float_as_uint(value); }
INLINE float float_of(u32 bits) { return __uint_as_float(bits); }
INLINE u32 magnitude_bits(float value) { return bits_of(value) & 0x7FFFFFFFu; }
INLINE bool is_finite(float value) { return (bits_of(value) & 0x7F800000u) != 0x7F800000u; }

template <class T> INLINE T smaller(T a, T b) { return b < a ? b : a; }
template <class T> INLINE T larger(T a, T b) { return a < b ? b : a; }

// The last of count items, one at least, that has begun: of items that begin one after the other.
template <class Begun> INLINE int last_begun(int count, const Begun& begun) {
    int low = 0, high = count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (begun(middle)) low = middle;
        else high = middle - 1;
    }
    return low;
}

// -- half precision: bits as u16, to nearest even, NaN stays a quiet NaN with its payload ---------

#ifndef RINGLET_ON_HOST
INLINE u16 rounded_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

INLINE float widened_from_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
#endif

INLINE u16 f32_to_f16(float value) {
    const u32 bits = bits_of(value);
    const u16 quiet = (u16)(((bits >> 16) & 0x8000u) | 0x7E00u | ((bits >> 13) & 0x3FFu));
    return magnitude_bits(value) > 0x7F800000u ? quiet : rounded_to_f16(value);
}

INLINE float f16_to_f32(u16 bits) { return widened_from_f16(bits); }

INLINE u16 f32_to_bf16(float value) {
    const u32 bits = bits_of(value);
    const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (u16)(magnitude_bits(value) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded);
}

INLINE float bf16_to_f32(u16 bits) { return float_of((u32)bits << 16); }

// Of finite, non-negative values; at most to the largest finite one.
INLINE u16 round_up_bf16(float value) {
    return (u16)smaller((bits_of(value) + 0xFFFFu) >> 16, 0x7F7Fu);
}

INLINE u16 nearest_bf16(float value) {
    const u32 bits = bits_of(value);
    return (u16)smaller((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16, 0x7F7Fu);
}

// -- random numbers (Widynski, arXiv:2004.06278): a function of key and counter ------------------

INLINE u32 squares(u64 key, u64 counter) {
    const u64 y = counter * key, z = y + key;
    u64 x = y * y + y;
    x = (x >> 32) | (x << 32);
    x = x * x + z;
    x = (x >> 32) | (x << 32);
    x = x * x + y;
    x = (x >> 32) | (x << 32);
    return (u32)((x * x + z) >> 32);
}

INLINE float uniform(u64 key, u64 counter) {
    return (float)(squares(key, counter) >> 8) * 5.9604644775390625e-08f;  // 2**-24
}

INLINE float uniform16(u64 key, u64 counter) {
    return (float)(squares(key, counter) >> 16) * 1.52587890625e-05f;  // 2**-16
}
