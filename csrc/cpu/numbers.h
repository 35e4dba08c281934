// Conversions between fp32 and the 16-bit formats in portable arithmetic, rounding to nearest even; NaN becomes the
// canonical quiet NaN of the target.
#pragma once

#include <cstdint>
#include <cstring>

namespace moecomm {

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline double double_of(uint64_t bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline constexpr uint32_t kNanFloat = 0x7fc00000u;
inline constexpr uint64_t kNanDouble = 0x7ff8000000000000ull;
inline constexpr uint16_t kNanBf16 = 0x7fc0;
inline constexpr uint16_t kNanHalf = 0x7e00;

inline float float_from_bf16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline uint16_t bf16_from_float(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7fffffffu) > 0x7f800000u ? kNanBf16 : static_cast<uint16_t>(rounded);
}

inline float float_from_half(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu;
    const uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0) return float_of(sign | bits_of(static_cast<float>(mantissa) * 0x1p-24f));
    const uint32_t wide_exponent = exponent == 31 ? 255u : exponent + (127u - 15u);
    return float_of(sign | (wide_exponent << 23) | (mantissa << 13));
}

inline uint16_t half_from_float(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return kNanHalf;
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u) {
        // Below 2^-14: adding 0.5 leaves the value as a multiple of 2^-24 in the low bits, rounded by the addition.
        const uint32_t shifted = bits_of(float_of(magnitude) + 0.5f);
        return static_cast<uint16_t>(sign | (shifted - 0x3f000000u));
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace moecomm
