/* Plans, looked up and launched: a CPython extension that keeps a call of a GPU kernel below a microsecond, but for the driver.
 *
 * Plan     how to launch the compiled functions of one Region for tensors of certain shapes: everything but the pointers
 * Kernel   the same for one kernel that the CUDA driver launches
 * Plans    callable with a Region's tensors; finds their plan by types, devices, sizes and strides, or asks Python for one
 *
 * A plan holds for pointers that are multiples of ALIGNMENT; others go to Python. It is a Plan or a Kernel, launched from here, or
 * any callable(pointers, tensors), whose answer False says that it has done nothing. This file is compiled at first use against the running
 * interpreter's headers and knows torch and TVM-FFI only by the addresses of a few C functions that plans.py hands to configure().
 * They take a pointer to an at::Tensor, which is one pointer to a TensorImpl: the address of a variable that holds the TensorImpl's
 * address serves as one. The caller holds its arguments, so that the TensorImpl outlives the call.
 *
 * Lookups run under the GIL, launches do not: the driver waits where its queue is full.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TENSORS = 64, MAX_DIMS = 8, MAX_PLANS = 4096, ALIGNMENT = 16, DL_CUDA = 2 };
enum { MAX_ARGUMENTS = 256, MAX_STREAMS = 16, EARLY_START = 6 }; /* 6: CUDA's number of programmatic stream serialization */
enum { WORDS = MAX_TENSORS * (3 + 2 * MAX_DIMS) };
enum { WORKSPACE = -1, TORCH_BYTE = 0, TORCH_CUDA = 1 }; /* a source; c10's numbers of a type and a device type */

/* DLPack and TVM-FFI: the layouts of their stable C interfaces. */
typedef struct {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} Tensor;

typedef struct {
  int32_t type_index;
  uint32_t padding;
  void *value;
} Any;

enum { TENSOR_POINTER = 7 }; /* kTVMFFIDLTensorPtr */

typedef int (*function_t)(void *handle, const Any *arguments, int32_t count, Any *result);

typedef int32_t (*get_pointer_t)(void *tensor, void **out);
typedef int32_t (*get_int64_t)(void *tensor, int64_t *out);
typedef int32_t (*get_int32_t)(void *tensor, int32_t *out);
typedef int32_t (*get_array_t)(void *tensor, int64_t **out);
typedef int32_t (*empty_t)(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device_type,
                           int32_t device, void **out);
typedef int32_t (*delete_t)(void *tensor);
typedef int32_t (*get_stream_t)(int32_t device, void **out);
typedef int (*set_stream_t)(int32_t device_type, int32_t device, void *stream, void **old);

static struct {
  get_pointer_t data;
  get_int64_t dim;
  get_array_t sizes, strides;
  get_int32_t dtype, device_type, device;
  empty_t empty;
  delete_t delete;
  get_stream_t current_stream;
  set_stream_t set_stream;
  Py_ssize_t impl_offset; /* of the TensorImpl pointer in a tensor object; 0: ask for the attribute _cdata */
  PyTypeObject *tensor_type;
} torch;

static PyObject *name_cdata;

static void *impl_of(PyObject *object) {
  if (torch.impl_offset) return *(void **)((char *)object + torch.impl_offset);
  PyObject *address = PyObject_GetAttr(object, name_cdata);
  if (!address) return NULL;
  void *impl = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  return impl;
}

/* Write what plans are found by; returns the number of words, or -1 where a tensor can't be described (no exception is set). */
static int describe(PyObject *const *objects, Py_ssize_t count, int64_t *words, void **pointers) {
  int64_t *out = words;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyObject_TypeCheck(objects[i], torch.tensor_type)) return -1;
    void *impl = impl_of(objects[i]);
    if (!impl) {
      PyErr_Clear();
      return -1;
    }
    int64_t dim, *sizes, *strides;
    int32_t dtype, type, device;
    if (torch.data(&impl, &pointers[i]) || torch.dim(&impl, &dim) || dim > MAX_DIMS || torch.sizes(&impl, &sizes) ||
        torch.strides(&impl, &strides) || torch.dtype(&impl, &dtype) || torch.device_type(&impl, &type) ||
        torch.device(&impl, &device))
      return -1;
    *out++ = dim;
    *out++ = dtype;
    *out++ = ((int64_t)type << 32) | (uint32_t)device;
    for (int64_t d = 0; d < dim; ++d) *out++ = sizes[d];
    for (int64_t d = 0; d < dim; ++d) *out++ = strides[d];
  }
  return (int)(out - words);
}

/* Plan -------------------------------------------------------------------------------------------------------------- */

typedef struct {
  function_t function;
  int32_t count;
  int32_t *sources; /* for each argument, the tensor whose memory it is, or WORKSPACE */
  Tensor *tensors;  /* for each argument, what it looks like; without `data` */
  int64_t *numbers; /* their shapes and strides */
} Step;

typedef struct {
  PyObject_HEAD
  PyObject *keep; /* what holds the functions in memory */
  int32_t device;
  int32_t lower, upper; /* where upper > 0, tensor `lower` must lie below tensor `upper`, by less than `reach` bytes */
  int64_t reach;
  int64_t workspace; /* bytes that a call allocates for its functions; 0: none */
  int32_t tensors;   /* that a call must have: one more than the greatest source */
  Py_ssize_t count;
  Step *steps;
} Plan;

static PyTypeObject *plan_type;

static void plan_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Plan *plan = (Plan *)self;
  for (Py_ssize_t i = 0; i < plan->count; ++i) {
    free(plan->steps[i].sources);
    free(plan->steps[i].tensors);
    free(plan->steps[i].numbers);
  }
  free(plan->steps);
  Py_XDECREF(plan->keep);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* One step from (address, ((source, (code, bits), shape, strides), ...)). */
static int read_step(PyObject *object, int32_t device, Step *step) {
  Py_ssize_t address, count;
  PyObject *arguments;
  if (!PyArg_ParseTuple(object, "nO!", &address, &PyTuple_Type, &arguments)) return -1;
  count = PyTuple_GET_SIZE(arguments);
  if (count > MAX_TENSORS) {
    PyErr_SetString(PyExc_ValueError, "too many tensors");
    return -1;
  }
  step->function = (function_t)(uintptr_t)address;
  step->count = (int32_t)count;
  step->sources = calloc((size_t)count, sizeof(int32_t));
  step->tensors = calloc((size_t)count, sizeof(Tensor));
  step->numbers = calloc((size_t)count * 2 * MAX_DIMS, sizeof(int64_t));
  if (!step->sources || !step->tensors || !step->numbers) {
    PyErr_NoMemory();
    return -1;
  }
  int64_t *numbers = step->numbers;
  for (Py_ssize_t i = 0; i < count; ++i) {
    Tensor *tensor = &step->tensors[i];
    PyObject *shape, *strides;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(arguments, i), "i(bb)O!O!", &step->sources[i], &tensor->code, &tensor->bits,
                          &PyTuple_Type, &shape, &PyTuple_Type, &strides))
      return -1;
    Py_ssize_t dim = PyTuple_GET_SIZE(shape);
    if (dim > MAX_DIMS || PyTuple_GET_SIZE(strides) != dim || step->sources[i] < WORKSPACE || step->sources[i] >= MAX_TENSORS) {
      PyErr_SetString(PyExc_ValueError, "an argument of a plan is malformed");
      return -1;
    }
    tensor->lanes = 1;
    tensor->device_type = DL_CUDA;
    tensor->device_id = device;
    tensor->ndim = (int32_t)dim;
    tensor->shape = numbers;
    tensor->strides = numbers + dim;
    for (Py_ssize_t d = 0; d < dim; ++d) {
      *numbers = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
      numbers[dim] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d));
      ++numbers;
    }
    numbers += dim;
    if (PyErr_Occurred()) return -1;
  }
  return 0;
}

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"steps", "device", "keep", "lower", "upper", "reach", "workspace", NULL};
  PyObject *steps, *keep;
  int device, lower = 0, upper = 0;
  long long reach = 0, workspace = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iO|iiLL:Plan", names, &PyTuple_Type, &steps, &device, &keep, &lower, &upper,
                                   &reach, &workspace))
    return NULL;
  if (lower < 0 || upper < 0 || lower >= MAX_TENSORS || upper >= MAX_TENSORS)
    return PyErr_Format(PyExc_ValueError, "no tensor has these positions: %d, %d", lower, upper);
  Plan *plan = PyObject_New(Plan, type);
  if (!plan) return NULL;
  memset((char *)plan + sizeof(PyObject), 0, sizeof *plan - sizeof(PyObject));
  plan->keep = Py_NewRef(keep);
  plan->device = device;
  plan->lower = lower;
  plan->upper = upper;
  plan->reach = reach;
  plan->workspace = workspace;
  plan->tensors = 1 + (lower > upper ? lower : upper);
  plan->count = PyTuple_GET_SIZE(steps);
  plan->steps = calloc((size_t)plan->count + 1, sizeof(Step));
  if (!plan->steps) {
    plan->count = 0;
    Py_DECREF(plan);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < plan->count; ++i) {
    Step *step = &plan->steps[i];
    if (read_step(PyTuple_GET_ITEM(steps, i), device, step)) {
      Py_DECREF(plan);
      return NULL;
    }
    for (int32_t j = 0; j < step->count; ++j) {
      if (step->sources[j] >= plan->tensors) plan->tensors = step->sources[j] + 1;
      if (step->sources[j] == WORKSPACE && workspace <= 0) {
        Py_DECREF(plan);
        return PyErr_Format(PyExc_ValueError, "a function takes a workspace, and the plan has none");
      }
    }
  }
  return (PyObject *)plan;
}

static int in_order(const Plan *plan, void *const *pointers) {
  if (plan->lower == plan->upper) return 1;
  int64_t distance = (int64_t)((uintptr_t)pointers[plan->upper] - (uintptr_t)pointers[plan->lower]);
  return distance > 0 && distance < plan->reach;
}

/* Memory for one call, as torch's allocator gives it: what takes it next on this stream runs after the call. */
static void *allocate(int32_t device, int64_t bytes, void **memory) {
  const int64_t one = 1;
  void *tensor = NULL;
  if (torch.empty(1, &bytes, &one, TORCH_BYTE, TORCH_CUDA, device, &tensor)) return NULL;
  if (torch.data(tensor, memory)) {
    torch.delete(tensor);
    return NULL;
  }
  return tensor;
}

/* Launch; nonzero where a function refused. */
static int launch(const Plan *plan, void *const *pointers) {
  void *stream, *old, *memory = NULL, *workspace = NULL;
  if (plan->workspace && !(workspace = allocate(plan->device, plan->workspace, &memory))) return -1;
  if (torch.current_stream(plan->device, &stream) || torch.set_stream(DL_CUDA, plan->device, stream, &old)) {
    if (workspace) torch.delete(workspace);
    return -1;
  }
  int status = 0;
  for (Py_ssize_t i = 0; i < plan->count && !status; ++i) {
    const Step *step = &plan->steps[i];
    Tensor tensors[MAX_TENSORS];
    Any arguments[MAX_TENSORS], result = {0, 0, NULL};
    memcpy(tensors, step->tensors, sizeof(Tensor) * (size_t)step->count);
    for (int32_t j = 0; j < step->count; ++j) {
      tensors[j].data = step->sources[j] == WORKSPACE ? memory : pointers[step->sources[j]];
      arguments[j] = (Any){TENSOR_POINTER, 0, &tensors[j]};
    }
    status = step->function(NULL, arguments, step->count, &result);
  }
  torch.set_stream(DL_CUDA, plan->device, old, NULL);
  if (workspace) torch.delete(workspace);
  return status;
}

static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_doc, "How to launch compiled functions for tensors of certain shapes."},
    {0, NULL},
};

static PyType_Spec plan_spec = {"postlude.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};

/* Kernel ------------------------------------------------------------------------------------------------------------ */

/* CUlaunchAttribute and CUlaunchConfig, as the driver's interface fixes them. */
typedef struct {
  int32_t id, unused, value, rest[15];
} Attribute;

typedef struct {
  uint32_t grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  uint32_t count;
} Config;

typedef int (*launch_t)(const Config *config, void *function, void **arguments, void **extra);
typedef int (*get_device_t)(int *device);
typedef int (*is_capturing_t)(void *stream, int *status);

typedef struct {
  PyObject_HEAD
  PyObject *keep; /* what holds the kernel in memory */
  launch_t launch;
  get_device_t current_device; /* of the current context */
  is_capturing_t is_capturing;
  void *function;
  int32_t device;
  uint32_t grid, block, shared;
  int32_t early;     /* whether it may start before the kernel ahead has ended */
  int32_t tensors;   /* pointers to tensors, which come first */
  int64_t workspace; /* bytes of the memory that comes after them, which counters follow; 0: neither */
  int32_t count;
  uint64_t *arguments; /* all; pointers are filled in */
  struct {
    void *stream;
    uint64_t counters;
  } streams[MAX_STREAMS]; /* counters of the last streams */
  uint32_t remembered;
} Kernel;

static PyTypeObject *kernel_type;

static void kernel_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  free(((Kernel *)self)->arguments);
  Py_XDECREF(((Kernel *)self)->keep);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"driver", "function", "device", "grid",      "block", "shared",
                          "early",  "tensors",  "arguments", "workspace", "keep",  NULL};
  Py_ssize_t launch, current_device, is_capturing, function;
  PyObject *arguments, *keep;
  int device, early, tensors;
  unsigned grid, block, shared;
  long long workspace;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(nnn)niIIIpiO!LO:Kernel", names, &launch, &current_device, &is_capturing,
                                   &function, &device, &grid, &block, &shared, &early, &tensors, &PyTuple_Type, &arguments,
                                   &workspace, &keep))
    return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  if (count > MAX_ARGUMENTS || tensors < 0 || tensors > MAX_TENSORS || tensors + (workspace > 0 ? 2 : 0) > count)
    return PyErr_Format(PyExc_ValueError, "a kernel has no %zd arguments of which %d are tensors", count, tensors);
  Kernel *kernel = PyObject_New(Kernel, type);
  if (!kernel) return NULL;
  memset((char *)kernel + sizeof(PyObject), 0, sizeof *kernel - sizeof(PyObject));
  kernel->keep = Py_NewRef(keep);
  kernel->launch = (launch_t)(uintptr_t)launch;
  kernel->current_device = (get_device_t)(uintptr_t)current_device;
  kernel->is_capturing = (is_capturing_t)(uintptr_t)is_capturing;
  kernel->function = (void *)(uintptr_t)function;
  kernel->device = device;
  kernel->grid = grid;
  kernel->block = block;
  kernel->shared = shared;
  kernel->early = early;
  kernel->tensors = tensors;
  kernel->workspace = workspace;
  kernel->count = (int32_t)count;
  kernel->arguments = calloc((size_t)count + 1, sizeof(uint64_t));
  if (!kernel->arguments) {
    Py_DECREF(kernel);
    return PyErr_NoMemory();
  }
  for (Py_ssize_t i = 0; i < count; ++i) kernel->arguments[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(arguments, i));
  if (PyErr_Occurred()) {
    Py_DECREF(kernel);
    return NULL;
  }
  return (PyObject *)kernel;
}

/* remember(stream, counters): the counters that calls on a stream take, outside of captures. */
static PyObject *kernel_remember(PyObject *self, PyObject *args) {
  Kernel *kernel = (Kernel *)self;
  Py_ssize_t stream, counters;
  if (!PyArg_ParseTuple(args, "nn:remember", &stream, &counters)) return NULL;
  uint32_t at = 0;
  while (at < MAX_STREAMS && !(kernel->streams[at].counters && kernel->streams[at].stream == (void *)(uintptr_t)stream)) ++at;
  if (at == MAX_STREAMS) at = kernel->remembered++ % MAX_STREAMS;
  kernel->streams[at].stream = (void *)(uintptr_t)stream;
  kernel->streams[at].counters = (uint64_t)counters;
  Py_RETURN_NONE;
}

/* The current stream and all arguments but the workspace; nonzero where Python must do it. */
static int prepare(const Kernel *kernel, void *const *pointers, void **stream, uint64_t *arguments) {
  int device, capturing;
  if (kernel->current_device(&device) || device != kernel->device || torch.current_stream(kernel->device, stream)) return -1;
  memcpy(arguments, kernel->arguments, sizeof(uint64_t) * (size_t)kernel->count);
  for (int32_t i = 0; i < kernel->tensors; ++i) arguments[i] = (uint64_t)(uintptr_t)pointers[i];
  if (!kernel->workspace) return 0;
  if (kernel->is_capturing(*stream, &capturing) || capturing) return -1; /* a launch in a graph has counters of its own */
  for (uint32_t at = 0; at < MAX_STREAMS; ++at)
    if (kernel->streams[at].counters && kernel->streams[at].stream == *stream) {
      arguments[kernel->tensors + 1] = kernel->streams[at].counters;
      return 0;
    }
  return -1;
}

/* Launch what is prepared; nonzero where the driver refused. */
static int start(const Kernel *kernel, void *stream, uint64_t *arguments) {
  void *addresses[MAX_ARGUMENTS], *memory = NULL, *workspace = NULL;
  if (kernel->workspace) {
    if (!(workspace = allocate(kernel->device, kernel->workspace, &memory))) return -1;
    arguments[kernel->tensors] = (uint64_t)(uintptr_t)memory;
  }
  for (int32_t i = 0; i < kernel->count; ++i) addresses[i] = &arguments[i];
  Attribute attribute = {EARLY_START, 0, 1, {0}};
  Config config = {{kernel->grid, 1, 1}, {kernel->block, 1, 1}, kernel->shared, stream, &attribute, kernel->early ? 1 : 0};
  int status = kernel->launch(&config, kernel->function, addresses, NULL);
  if (workspace) torch.delete(workspace);
  return status;
}

static PyMethodDef kernel_methods[] = {
    {"remember", kernel_remember, METH_VARARGS, "remember(stream, counters): the counters that calls on a stream take"},
    {NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_new, kernel_new},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_methods, kernel_methods},
    {Py_tp_doc, "How the CUDA driver launches a kernel for tensors of certain shapes."},
    {0, NULL},
};

static PyType_Spec kernel_spec = {"postlude.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT, kernel_slots};

/* Plans ------------------------------------------------------------------------------------------------------------- */

typedef struct {
  uint64_t hash;
  int words;
  int64_t *key;     /* NULL: free */
  PyObject *launch; /* a Plan, or a callable */
} Entry;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *planner; /* called with the tensors where no plan is known: plans, adds the plan, and launches */
  Entry *entries;    /* open addressing; at most half full */
  size_t size, used, last;
} Plans;

static PyTypeObject *plans_type;

static uint64_t hash_of(const int64_t *words, int count) {
  uint64_t hash = (uint64_t)count;
  for (int i = 0; i < count; ++i) {
    hash = (hash ^ (uint64_t)words[i]) * UINT64_C(0x9E3779B97F4A7C15);
    hash ^= hash >> 29;
  }
  return hash;
}

static int same(const Entry *entry, const int64_t *words, int count) {
  return entry->key && entry->words == count && memcmp(entry->key, words, sizeof(int64_t) * (size_t)count) == 0;
}

static Entry *slot_of(Plans *plans, uint64_t hash, const int64_t *words, int count) {
  size_t slot = (size_t)hash & (plans->size - 1);
  while (plans->entries[slot].key && !(plans->entries[slot].hash == hash && same(&plans->entries[slot], words, count)))
    slot = (slot + 1) & (plans->size - 1);
  return &plans->entries[slot];
}

static Entry *find(Plans *plans, const int64_t *words, int count) {
  if (!plans->size) return NULL;
  if (same(&plans->entries[plans->last], words, count)) return &plans->entries[plans->last];
  Entry *entry = slot_of(plans, hash_of(words, count), words, count);
  if (!entry->key) return NULL;
  plans->last = (size_t)(entry - plans->entries);
  return entry;
}

static int plans_clear(PyObject *self) {
  Plans *plans = (Plans *)self;
  Entry *entries = plans->entries;
  size_t size = plans->size;
  plans->entries = NULL;
  plans->size = plans->used = plans->last = 0;
  for (size_t i = 0; i < size; ++i) {
    free(entries[i].key);
    Py_XDECREF(entries[i].launch);
  }
  free(entries);
  return 0;
}

static int grow(Plans *plans) {
  if (plans->used >= MAX_PLANS) plans_clear((PyObject *)plans);
  if ((plans->used + 1) * 2 <= plans->size) return 0;
  size_t size = plans->size ? plans->size * 2 : 4;
  Entry *old = plans->entries, *entries = calloc(size, sizeof(Entry));
  if (!entries) return -1;
  size_t before = plans->size;
  plans->entries = entries;
  plans->size = size;
  plans->last = 0;
  for (size_t i = 0; i < before; ++i)
    if (old[i].key) *slot_of(plans, old[i].hash, old[i].key, old[i].words) = old[i];
  free(old);
  return 0;
}

/* add(tensors, launch): the plan of tensors like these. */
static PyObject *plans_add(PyObject *self, PyObject *args) {
  Plans *plans = (Plans *)self;
  PyObject *tensors, *launch;
  int64_t words[WORDS];
  void *pointers[MAX_TENSORS];
  if (!PyArg_ParseTuple(args, "O!O:add", &PyTuple_Type, &tensors, &launch)) return NULL;
  Py_ssize_t given = PyTuple_GET_SIZE(tensors);
  int count = given > MAX_TENSORS ? -1 : describe(&PyTuple_GET_ITEM(tensors, 0), given, words, pointers);
  if (count < 0) Py_RETURN_NONE; /* can't be found later: each call is planned by Python */
  int needed = Py_TYPE(launch) == plan_type ? ((Plan *)launch)->tensors : 0;
  if (Py_TYPE(launch) == kernel_type) needed = ((Kernel *)launch)->tensors;
  if (needed > given) return PyErr_Format(PyExc_ValueError, "the plan is for %d tensors, got %zd", needed, given);
  int64_t *key = malloc(sizeof(int64_t) * (size_t)count + 1);
  if (!key || grow(plans)) {
    free(key);
    return PyErr_NoMemory();
  }
  memcpy(key, words, sizeof(int64_t) * (size_t)count);
  Entry *entry = slot_of(plans, hash_of(words, count), words, count), old = *entry;
  *entry = (Entry){hash_of(words, count), count, key, Py_NewRef(launch)};
  plans->used += !old.key;
  free(old.key);
  Py_XDECREF(old.launch);
  Py_RETURN_NONE;
}

/* Launch through Python: its answer, or NULL. */
static PyObject *call_launch(PyObject *launch, PyObject *const *tensors, Py_ssize_t count, void *const *pointers) {
  PyObject *list = PyList_New(count), *tuple = PyTuple_New(count), *answer = NULL;
  for (Py_ssize_t i = 0; list && tuple && i < count; ++i) {
    PyObject *pointer = PyLong_FromVoidPtr(pointers[i]);
    if (!pointer) goto done;
    PyList_SET_ITEM(list, i, pointer);
    PyTuple_SET_ITEM(tuple, i, Py_NewRef(tensors[i]));
  }
  if (list && tuple) {
    PyObject *arguments[2] = {list, tuple};
    answer = PyObject_Vectorcall(launch, arguments, 2, NULL);
  }
done:
  Py_XDECREF(list);
  Py_XDECREF(tuple);
  return answer;
}

static PyObject *plans_call(PyObject *self, PyObject *const *tensors, size_t nargsf, PyObject *names) {
  Plans *plans = (Plans *)self;
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  int64_t words[WORDS];
  void *pointers[MAX_TENSORS];
  if (names && PyTuple_GET_SIZE(names)) return PyErr_Format(PyExc_TypeError, "a Postlude kernel takes no arguments by name");
  int described = count > MAX_TENSORS ? -1 : describe(tensors, count, words, pointers);
  Entry *entry = described < 0 ? NULL : find(plans, words, described);
  uintptr_t low = 0;
  for (Py_ssize_t i = 0; entry && i < count; ++i) low |= (uintptr_t)pointers[i];
  if (!entry || low & (ALIGNMENT - 1)) return PyObject_Vectorcall(plans->planner, tensors, (size_t)count, NULL);
  PyObject *plan = Py_NewRef(entry->launch); /* another thread may drop the entry meanwhile */
  int status = -1;
  if (Py_TYPE(plan) == kernel_type) {
    void *stream;
    uint64_t arguments[MAX_ARGUMENTS];
    if (!prepare((Kernel *)plan, pointers, &stream, arguments)) {
      Py_BEGIN_ALLOW_THREADS
      status = start((Kernel *)plan, stream, arguments);
      Py_END_ALLOW_THREADS
    }
  } else if (Py_TYPE(plan) != plan_type) {
    PyObject *answer = call_launch(plan, tensors, count, pointers);
    Py_DECREF(plan);
    if (!answer) return NULL;
    int refused = answer == Py_False;
    Py_DECREF(answer);
    return PyBool_FromLong(!refused);
  } else if (in_order((Plan *)plan, pointers)) {
    Py_BEGIN_ALLOW_THREADS
    status = launch((Plan *)plan, pointers);
    Py_END_ALLOW_THREADS
  }
  Py_DECREF(plan);
  /* A function that refuses says why when Python calls it. */
  return status ? PyObject_Vectorcall(plans->planner, tensors, (size_t)count, NULL) : Py_NewRef(Py_True);
}

static int plans_traverse(PyObject *self, visitproc visit, void *arg) {
  Plans *plans = (Plans *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(plans->planner);
  for (size_t i = 0; i < plans->size; ++i) Py_VISIT(plans->entries[i].launch);
  return 0;
}

static int plans_gc_clear(PyObject *self) {
  Py_CLEAR(((Plans *)self)->planner);
  return plans_clear(self);
}

static void plans_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  plans_gc_clear(self);
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

static PyObject *plans_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"planner", NULL};
  PyObject *planner;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Plans", names, &planner)) return NULL;
  Plans *plans = PyObject_GC_New(Plans, type);
  if (!plans) return NULL;
  memset((char *)plans + sizeof(PyObject), 0, sizeof *plans - sizeof(PyObject));
  plans->vectorcall = plans_call;
  plans->planner = Py_NewRef(planner);
  PyObject_GC_Track(plans);
  return (PyObject *)plans;
}

static PyMethodDef plans_methods[] = {
    {"add", plans_add, METH_VARARGS, "add(tensors, launch): the plan of tensors like these"},
    {NULL},
};

static PyMemberDef plans_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Plans, vectorcall), READONLY, NULL},
    {NULL},
};

static PyType_Slot plans_slots[] = {
    {Py_tp_new, plans_new},           {Py_tp_dealloc, plans_dealloc}, {Py_tp_traverse, plans_traverse},
    {Py_tp_clear, plans_gc_clear},    {Py_tp_call, PyVectorcall_Call}, {Py_tp_methods, plans_methods},
    {Py_tp_members, plans_members},   {Py_tp_doc, "A Region's kernels, called with its tensors."},
    {0, NULL},
};

static PyType_Spec plans_spec = {"postlude.Plans", sizeof(Plans), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, plans_slots};

/* Module ------------------------------------------------------------------------------------------------------------ */

/* configure(tensor_type, impl_offset, addresses): addresses in the order of the members of `torch`. */
static PyObject *configure(PyObject *module, PyObject *args) {
  PyObject *type;
  Py_ssize_t offset, data, dim, sizes, strides, dtype, device_type, device, empty, delete, current_stream, set_stream;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!n(nnnnnnnnnnn):configure", &PyType_Type, &type, &offset, &data, &dim, &sizes, &strides, &dtype,
                        &device_type, &device, &empty, &delete, &current_stream, &set_stream))
    return NULL;
  torch.data = (get_pointer_t)(uintptr_t)data;
  torch.dim = (get_int64_t)(uintptr_t)dim;
  torch.sizes = (get_array_t)(uintptr_t)sizes;
  torch.strides = (get_array_t)(uintptr_t)strides;
  torch.dtype = (get_int32_t)(uintptr_t)dtype;
  torch.device_type = (get_int32_t)(uintptr_t)device_type;
  torch.device = (get_int32_t)(uintptr_t)device;
  torch.empty = (empty_t)(uintptr_t)empty;
  torch.delete = (delete_t)(uintptr_t)delete;
  torch.current_stream = (get_stream_t)(uintptr_t)current_stream;
  torch.set_stream = (set_stream_t)(uintptr_t)set_stream;
  torch.impl_offset = offset;
  Py_XSETREF(torch.tensor_type, (PyTypeObject *)Py_NewRef(type));
  Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"configure", configure, METH_VARARGS, "configure(tensor_type, impl_offset, addresses)"},
    {NULL},
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "postlude_plans", "Launches planned kernels.", -1,
                                               module_methods};

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit_postlude_plans(void) {
  name_cdata = PyUnicode_InternFromString("_cdata");
  plan_type = (PyTypeObject *)PyType_FromSpec(&plan_spec);
  kernel_type = (PyTypeObject *)PyType_FromSpec(&kernel_spec);
  plans_type = (PyTypeObject *)PyType_FromSpec(&plans_spec);
  PyObject *module = PyModule_Create(&module_definition);
  if (!name_cdata || !plan_type || !kernel_type || !plans_type || !module || PyModule_AddObjectRef(module, "Plan", (PyObject *)plan_type) ||
      PyModule_AddObjectRef(module, "Kernel", (PyObject *)kernel_type) ||
      PyModule_AddObjectRef(module, "Plans", (PyObject *)plans_type)) {
    Py_XDECREF(module);
    return NULL;
  }
  return module;
}
