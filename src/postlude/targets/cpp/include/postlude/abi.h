/* What crosses the border between the launcher and a compiled Region: plain C, no torch, no C++.
 *
 * A Region's shared object exports the three functions declared at the end. The library of microkernels (micro.cpp)
 * exports postlude_micro_table(); its result goes into PostludeCall::micro and is opaque here.
 */
#ifndef POSTLUDE_ABI_H
#define POSTLUDE_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifndef DLPACK_DLPACK_H_ /* DLPack's own header may be there already: the layout is the same */
typedef struct {
  int32_t device_type;
  int32_t device_id;
} DLDevice;

typedef struct {
  uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool */
  uint8_t bits;
  uint16_t lanes;
} DLDataType;

typedef struct {
  void *data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape;
  int64_t *strides; /* in elements; never NULL here */
  uint64_t byte_offset;
} DLTensor;
#endif

typedef struct PostludeCall {
  const DLTensor *tensors;   /* operands in Region order, then results in yield order */
  int32_t count;             /* operands + results */
  const void *const *packed; /* packed[i] != NULL: right operand i as postlude_pack wrote it; may itself be NULL */
  const void *micro;         /* what postlude_micro_table() returned */
  int32_t threads;           /* at most this many OpenMP threads; values below 1 mean 1 */
  char *message;             /* filled (and terminated) when the return value is not 0; may be NULL */
  size_t message_size;
} PostludeCall;

#ifdef __cplusplus
extern "C" {
#endif
const void *postlude_micro_table(void); /* the library of microkernels, compiled with the same -march as the Region */
int postlude_run(const PostludeCall *call); /* a Region's object, as all below. 0, or an error that `message` explains */
int64_t postlude_pack_size(const DLTensor *operand, int32_t index); /* bytes for right operand `index`; 0: never packed */
int postlude_pack(const DLTensor *operand, int32_t index, void *destination); /* destination: 64-byte aligned */
#ifdef __cplusplus
}
#endif

#endif
