// The machine's limits, measured next to the kernels: products per second from registers, and bytes read per second.
#include <cstdint>

#include <immintrin.h>
#include <omp.h>

namespace {
typedef float Vec __attribute__((vector_size(64)));
typedef uint64_t Bits __attribute__((vector_size(64)));
}  // namespace

extern "C" float limit_products(int64_t steps, int threads) {
  float result = 0;
#pragma omp parallel num_threads(threads) reduction(+ : result)
  {
    Vec acc[12] = {};
    Vec a = Vec{} + 1.0f, b = Vec{} + 0.5f;
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) asm volatile("" : "+v"(acc[j]));  // twelve chains that the compiler cannot prove equal
    for (int64_t i = 0; i < steps; ++i) {
#if defined(PAIRS)
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j)
        acc[j] = reinterpret_cast<Vec>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(acc[j]), reinterpret_cast<__m512bh>(a),
                                                        reinterpret_cast<__m512bh>(b)));
#else
#pragma GCC unroll 12
      for (int j = 0; j < 12; ++j) acc[j] += a * b;
#endif
    }
    for (int j = 0; j < 12; ++j) result += acc[j][0];
  }
  return result;
}

extern "C" uint64_t limit_read(const char *data, int64_t bytes, int threads) {
  uint64_t result = 0;
#pragma omp parallel num_threads(threads) reduction(^ : result)
  {
    const int64_t each = bytes / threads / 1024 * 1024;
    const char *p = data + omp_get_thread_num() * each, *end = p + each;
    Bits acc[8] = {};
    for (; p + 512 <= end; p += 512)
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) acc[j] ^= *reinterpret_cast<const Bits *>(p + 64 * j);
    for (int j = 0; j < 8; ++j) result ^= acc[j][0];
  }
  return result;
}

extern "C" int limit_repeat(int (*run)(const void *), const void *call, int64_t times) {
  int code = 0;
  for (int64_t i = 0; i < times; ++i) code |= run(call);
  return code;
}
