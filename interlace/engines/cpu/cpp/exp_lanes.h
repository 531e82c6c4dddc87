// exp of every lane of a vector, by Cephes' polynomial (relative error about 1e-7), for arguments of at most 0.

#pragma once

#include <cstdint>
#include <cstring>

// Floats: a vector of float, in GCC's and Clang's notation. Ints: a vector of int32_t with as many lanes.
template <class Floats, class Ints>
static inline Floats exp_lanes(Floats x) {
  const auto all = [](float value) { return Floats{} + value; };
  x = x < all(-87.0f) ? all(-87.0f) : x;
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding and subtracting it rounds to an integer
  const Floats n = (x * all(1.44269504088896341f) + magic) - magic;
  const Floats r = x - n * all(0.693359375f) - n * all(-2.12194440e-4f);
  Floats p = all(1.9875691500e-4f);
  p = p * r + all(1.3981999507e-3f);
  p = p * r + all(8.3334519073e-3f);
  p = p * r + all(4.1665795894e-2f);
  p = p * r + all(1.6666665459e-1f);
  p = p * r + all(5.0000001201e-1f);
  p = p * r * r + r + all(1.0f);
  const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
  Floats scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}
