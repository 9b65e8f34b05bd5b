/* For compilers without OpenMP, which ignore its pragmas: one thread, number 0, always. build.py puts this folder on the include
 * path of those only. */
#ifndef POSTLUDE_SERIAL_OMP_H
#define POSTLUDE_SERIAL_OMP_H

static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_in_parallel(void) { return 0; }

#endif
