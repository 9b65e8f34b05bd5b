// The library of microkernels: kernels, packing and the driver, compiled once for a machine and shared by all Regions.
#include <cstdlib>

#include <omp.h>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <postlude/gemm.h>

namespace postlude {
namespace {

std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
// The pool of OpenMP threads does not survive a fork, and entering a parallel region in the child would wait for it for ever.
const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
#endif

struct Buffers {
  char *data[kSlots] = {};
  int64_t size[kSlots] = {};
  ~Buffers() {
    for (char *p : data) std::free(p);
  }
};
thread_local Buffers buffers;

int run(const ProgramInfo &program, const PostludeCall &call, const void *tensors) {
  Driver driver(program, call, tensors);
  return driver.run();
}

constexpr MicroTable table{kMicroVersion, &run};

#if defined(POSTLUDE_AMX)
thread_local TileShapes shapes;
#endif

// Whether the system lets this process use the registers that the kernels need. Linux gives AMX's on request, once for all threads.
bool permitted() {
#if defined(POSTLUDE_AMX) && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return true;
#endif
}

}  // namespace

#if defined(POSTLUDE_AMX)
TileShapes &tile_shapes() { return shapes; }
#endif

void *scratch(int slot, int64_t bytes) {
  Buffers &b = buffers;
  if (b.size[slot] < bytes + 64) {
    const int64_t size = round_up(bytes + bytes / 4 + 64, 4096);
    std::free(b.data[slot]);
    b.data[slot] = static_cast<char *>(std::aligned_alloc(4096, static_cast<size_t>(size)));
    if (b.data[slot] == nullptr) {
      std::fputs("postlude: out of memory for scratch buffers\n", stderr);
      std::abort();
    }
    b.size[slot] = size;
  }
  return b.data[slot];
}

bool in_parallel_region() { return omp_in_parallel() != 0; }

int thread_number() { return omp_get_thread_num(); }

int may_use_threads(int wanted) { return forked.load(std::memory_order_relaxed) ? 1 : wanted; }

}  // namespace postlude

extern "C" __attribute__((visibility("default"))) const void *postlude_micro_table(void) {
  return postlude::permitted() ? &postlude::table : nullptr;
}
