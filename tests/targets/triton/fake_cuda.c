// A CUDA driver without a GPU: tells the parameters that the test gave a kernel, and keeps what the last launch was told.
#include <cuda.h>
#include <string.h>

typedef struct {
  int count;
  size_t sizes[32];
} Kernel;

typedef struct {
  unsigned grid[3], block[3], shared, attributes, attribute, value;
  void *stream;
  unsigned char arguments[32][8];
  int launches, answer, device, capturing;
} Record;

Record record;

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
  const Kernel *kernel = (const Kernel *)function;
  if (index >= (size_t)kernel->count) return CUDA_ERROR_INVALID_VALUE;
  *offset = 8 * index;
  *size = kernel->sizes[index];
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  const Kernel *kernel = (const Kernel *)function;
  if (record.answer) return (CUresult)record.answer;
  const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
  const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
  memcpy(record.grid, grid, sizeof grid);
  memcpy(record.block, block, sizeof block);
  record.shared = config->sharedMemBytes;
  record.stream = config->hStream;
  record.attributes = config->numAttrs;
  if (config->numAttrs) {
    record.attribute = config->attrs[0].id;
    record.value = config->attrs[0].value.programmaticStreamSerializationAllowed;
  }
  memset(record.arguments, 0, sizeof record.arguments);
  for (int i = 0; i < kernel->count; i++) memcpy(record.arguments[i], parameters[i], kernel->sizes[i]);
  record.launches++;
  return extra ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = record.device;
  return record.device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  (void)stream;
  *status = (CUstreamCaptureStatus)record.capturing;
  return CUDA_SUCCESS;
}
