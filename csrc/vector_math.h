// exp and log of floats as straight-line arithmetic, so that a compiler turns a loop over them into vector code of any width.
#pragma once

#include <cstdint>
#include <cstring>

// Builds a function once for each instruction set and picks one when the module is loaded (GNU ifunc). Elsewhere the baseline serves.
#if defined(__x86_64__) && defined(__gnu_linux__)
#define EVERY_INSTRUCTION_SET __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_INSTRUCTION_SET
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))

template <typename To, typename From>
ALWAYS_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

// e^x for x <= 88, within 2 units in the last place; 0 below -87 (and for -inf), just before float runs out of normal numbers.
// x = n ln 2 + r with |r| <= ln 2 / 2, and Taylor's polynomial of degree 7 in r (remainder below 2^-27).
ALWAYS_INLINE float vector_exp(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are n, rounded
  const float n = shifted - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first exact in n * part
  float p = 1.98412698e-4f;
  p = p * r + 1.38888889e-3f;
  p = p * r + 8.33333333e-3f;
  p = p * r + 4.16666667e-2f;
  p = p * r + 1.66666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const float power = bits_as<float>((bits_as<int32_t>(shifted) + 127) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

// ln x for normal x > 0, within 3 units in the last place. x = 2^n m with m in [sqrt(1/2), sqrt(2)), and
// ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172: five terms of its odd series (remainder below 2^-28).
ALWAYS_INLINE float vector_log(float x) {
  const int32_t offset = bits_as<int32_t>(x) - 0x3f3504f3;  // from sqrt(1/2)
  const int32_t n = offset >> 23;
  const float m = bits_as<float>((offset & 0x007fffff) + 0x3f3504f3);
  const float s = (m - 1.0f) / (m + 1.0f);
  const float square = s * s;
  float p = 2.0f / 9.0f;
  p = p * square + 2.0f / 7.0f;
  p = p * square + 2.0f / 5.0f;
  p = p * square + 2.0f / 3.0f;
  p = p * square + 2.0f;
  const float exponent = static_cast<float>(n);
  return exponent * 0.693359375f + (p * s + exponent * -2.12194440e-4f);
}

// ln(1 + x) for x >= 0, to the last digits of the result even where 1 + x rounds (Kahan's quotient).
ALWAYS_INLINE float vector_log1p(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f ? x : vector_log(sum) * (x / (sum - 1.0f));
}
