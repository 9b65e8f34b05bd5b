/* The launcher: a CPython extension that calls compiled Regions with torch tensors in well under a microsecond.
 *
 * Kernel   a callable around the three functions of a Region's object:  kernel(operand, ..., result, ...)
 * Packed   one right operand in packed form, with the description of the tensor it was made from
 *
 * It is compiled at first use against the running interpreter's headers and knows torch only by the addresses of a few C
 * functions that launcher.py hands to configure(). There are two ways to see a tensor:
 *
 *  - torch's stable C functions (torch_get_const_data_ptr, aoti_torch_get_sizes, ...). Reading through them does not count as a
 *    write to a copy-on-write storage, which is what frozen weights rest on (freeze.py). They take a pointer to an at::Tensor,
 *    which is one pointer to a TensorImpl: the address of a variable that holds the TensorImpl's address serves as one, with no
 *    allocation and no reference taken. The caller of a Kernel holds its arguments, so the TensorImpl outlives the call.
 *  - torch's DLPack exchange table, where those are missing. It hands out writable pointers, so nothing is frozen then.
 *
 * Everything here runs under the GIL except postlude_run itself, and that only where the tensors are large enough for other
 * threads to profit. A Packed that a call uses is held by it, so that another thread may replace it meanwhile.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <postlude/abi.h>

enum {
  MAX_TENSORS = 64,
  MAX_PACKED_DIMS = 4,
  MESSAGE_SIZE = 1024,
  DTYPES = 64,
  DL_CPU = 1
};

/* Below this many bytes of tensors a call is shorter than a few microseconds, and giving the GIL away could cost a switch
 * interval (5 ms) to get back when another thread computes in Python. */
#define RELEASE_GIL_BYTES (128 * 1024)

/* Large packed weights go on huge pages where the system gives them: fewer TLB misses when streaming. */
#define HUGE_PAGE ((size_t)2 << 20)

/* torch ------------------------------------------------------------------------------------------------------------- */

typedef int32_t (*get_pointer_t)(void *tensor, const void **out);
typedef int32_t (*get_int64_t)(void *tensor, int64_t *out);
typedef int32_t (*get_array_t)(void *tensor, int64_t **out);
typedef int32_t (*get_int32_t)(void *tensor, int32_t *out);
typedef int32_t (*get_threads_t)(uint32_t *out);
typedef int (*dltensor_t)(void *object, DLTensor *out);

static struct {
  get_pointer_t const_data_ptr, mutable_data_ptr;
  get_int64_t dim;
  get_array_t sizes, strides;
  get_int32_t dtype, device_type;
  get_threads_t num_threads;
  dltensor_t dltensor;
  Py_ssize_t impl_offset; /* of the TensorImpl pointer in a tensor object; 0: ask for the attribute _cdata */
  PyTypeObject *tensor_type;
  DLDataType dtypes[DTYPES]; /* by c10::ScalarType; bits 0: no such type in DLPack */
  int stable;                /* all of the first three lines are there */
} torch;

static PyObject *name_cdata;

/* The TensorImpl of a tensor object (borrowed), or NULL with an exception. */
static void *impl_of(PyObject *object) {
  if (torch.impl_offset) {
    void *impl = *(void **)((char *)object + torch.impl_offset);
    if (!impl) PyErr_SetString(PyExc_RuntimeError, "a tensor object without a tensor");
    return impl;
  }
  PyObject *address = PyObject_GetAttr(object, name_cdata);
  if (!address) return NULL;
  void *impl = PyLong_AsVoidPtr(address);
  Py_DECREF(address);
  return impl;
}

static int fail(Py_ssize_t index, const char *what) {
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_TypeError, "argument %zd of a Postlude kernel %s; a dense tensor on the CPU was expected", index, what);
  return -1;
}

/* Describe argument `index` in `out`. The description lives as long as the tensor. */
static int describe(PyObject *object, Py_ssize_t index, int writable, DLTensor *out) {
  if (!PyObject_TypeCheck(object, torch.tensor_type)) return fail(index, "is not a torch.Tensor");
  if (torch.stable) {
    void *impl = impl_of(object);
    if (!impl) return -1;
    void *tensor = &impl;
    int64_t dim = 0;
    int32_t dtype = 0, device = 0;
    if (torch.device_type(tensor, &device) || device != 0) return fail(index, "is on another device");
    if ((writable ? torch.mutable_data_ptr : torch.const_data_ptr)(tensor, (const void **)&out->data) ||
        torch.dim(tensor, &dim) || torch.sizes(tensor, &out->shape) || torch.strides(tensor, &out->strides) ||
        torch.dtype(tensor, &dtype))
      return fail(index, "has no memory of its own (sparse, fake, or inside a transform)");
    if (dtype < 0 || dtype >= DTYPES || !torch.dtypes[dtype].bits) return fail(index, "has a dtype that DLPack does not know");
    out->ndim = (int32_t)dim;
    out->dtype = torch.dtypes[dtype];
    out->device.device_type = DL_CPU;
    out->device.device_id = 0;
    out->byte_offset = 0;
  } else {
    if (torch.dltensor(object, out)) {
      PyErr_Clear(); /* torch's reasons have many types; ours is one */
      return fail(index, "can't be described by DLPack");
    }
    if (out->device.device_type != DL_CPU) return fail(index, "is on another device");
  }
  return 0;
}

/* Bytes of the elements (not of the memory they span), or -1 where a tensor with elements has no memory. */
static int64_t bytes_of(const DLTensor *tensor) {
  int64_t count = tensor->dtype.bits / 8;
  for (int32_t i = 0; i < tensor->ndim; ++i) count *= tensor->shape[i];
  return count && !tensor->data ? -1 : count;
}

/* Packed ------------------------------------------------------------------------------------------------------------ */

typedef struct {
  PyObject_HEAD
  void *buffer;
  size_t bytes;
  int64_t uses;     /* calls that took it */
  PyObject *keep;   /* holds the memory at `data`, unchanged, for as long as this lives */
  const void *data; /* what the tensor looked like */
  int32_t ndim;
  DLDataType dtype;
  int64_t shape[MAX_PACKED_DIMS], strides[MAX_PACKED_DIMS];
} Packed;

static PyTypeObject *packed_type;

static int same_description(const Packed *packed, const DLTensor *tensor) {
  return packed->data == tensor->data && packed->ndim == tensor->ndim && packed->dtype.code == tensor->dtype.code &&
         packed->dtype.bits == tensor->dtype.bits &&
         memcmp(packed->shape, tensor->shape, sizeof(int64_t) * (size_t)tensor->ndim) == 0 &&
         memcmp(packed->strides, tensor->strides, sizeof(int64_t) * (size_t)tensor->ndim) == 0;
}

static void packed_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Packed *packed = (Packed *)self;
  free(packed->buffer);
  Py_XDECREF(packed->keep);
  PyObject_Free(self);
  Py_DECREF(type);
}

static PyMemberDef packed_members[] = {
    {"nbytes", T_PYSSIZET, offsetof(Packed, bytes), READONLY, "bytes of the packed form"},
    {"uses", T_LONGLONG, offsetof(Packed, uses), READONLY, "calls that took the packed form"},
    {NULL},
};

static PyObject *packed_address(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromVoidPtr((void *)((Packed *)self)->data);
}

static PyGetSetDef packed_getset[] = {
    {"address", packed_address, NULL, "address of the elements that were packed", NULL},
    {NULL},
};

static PyType_Slot packed_slots[] = {
    {Py_tp_dealloc, packed_dealloc},
    {Py_tp_members, packed_members},
    {Py_tp_getset, packed_getset},
    {Py_tp_doc, "One right operand in packed form."},
    {0, NULL},
};

static PyType_Spec packed_spec = {"postlude.Packed", sizeof(Packed), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, packed_slots};

/* What a frozen Kernel knows about the weights it has met ------------------------------------------------------------- */

typedef struct {
  const void *data; /* NULL: free */
  Packed *packed;   /* NULL: this one takes the natural path */
  int64_t patience; /* natural path: calls until the handler is asked again; negative: never */
} Entry;

typedef struct {
  Entry *entries; /* open addressing; at most half full */
  size_t size, used, last;
} Table;

static size_t slot_of(const Table *table, const void *data) {
  size_t slot = (size_t)(((uint64_t)(uintptr_t)data * UINT64_C(0x9E3779B97F4A7C15)) >> 20) & (table->size - 1);
  while (table->entries[slot].data && table->entries[slot].data != data) slot = (slot + 1) & (table->size - 1);
  return slot;
}

static Entry *table_find(Table *table, const void *data) {
  if (!table->size) return NULL;
  if (table->entries[table->last].data != data) table->last = slot_of(table, data);
  Entry *entry = &table->entries[table->last];
  return entry->data ? entry : NULL;
}

static int table_resize(Table *table, size_t size) {
  Table larger = {calloc(size, sizeof(Entry)), size, table->used, 0};
  if (!larger.entries) return -1;
  for (size_t i = 0; i < table->size; ++i)
    if (table->entries[i].data) larger.entries[slot_of(&larger, table->entries[i].data)] = table->entries[i];
  free(table->entries);
  *table = larger;
  return 0;
}

/* Steals the reference to `packed`, also on failure. */
static int table_set(Table *table, const void *data, Packed *packed, int64_t patience) {
  if ((table->used + 1) * 2 > table->size && table_resize(table, table->size ? table->size * 2 : 8)) {
    Py_XDECREF(packed);
    PyErr_NoMemory();
    return -1;
  }
  Entry *entry = &table->entries[slot_of(table, data)];
  Packed *old = entry->packed;
  table->used += !entry->data;
  *entry = (Entry){data, packed, patience};
  Py_XDECREF(old);
  return 0;
}

static int table_remove(Table *table, const void *data) {
  if (!table->size) return 0;
  size_t hole = slot_of(table, data);
  if (!table->entries[hole].data) return 0;
  Packed *old = table->entries[hole].packed;
  table->entries[hole] = (Entry){NULL, NULL, 0};
  --table->used;
  /* The entries of the same run move up, so that no search ends at the hole too early. */
  for (size_t i = (hole + 1) & (table->size - 1); table->entries[i].data; i = (i + 1) & (table->size - 1)) {
    Entry moved = table->entries[i];
    table->entries[i] = (Entry){NULL, NULL, 0};
    table->entries[slot_of(table, moved.data)] = moved;
  }
  Py_XDECREF(old);
  return 1;
}

static void table_clear(Table *table) {
  Table old = *table;
  *table = (Table){NULL, 0, 0, 0};
  for (size_t i = 0; i < old.size; ++i) Py_XDECREF(old.entries[i].packed);
  free(old.entries);
}

/* Kernel ------------------------------------------------------------------------------------------------------------ */

typedef int (*run_t)(const PostludeCall *);
typedef int64_t (*pack_size_t)(const DLTensor *, int32_t);
typedef int (*pack_t)(const DLTensor *, int32_t, void *);

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  run_t run;
  pack_size_t pack_size;
  pack_t pack;
  const void *micro;
  Py_ssize_t operands;     /* arguments that are only read; the others are written. */
  PyObject *path;
  PyObject *handler;       /* handler(kernel, index, tensor): asked about weights that are not in the tables. Or NULL */
  Py_ssize_t frozen_count; /* operands with a table */
  Py_ssize_t frozen[MAX_TENSORS];
  Table *tables;
} Kernel;

static PyTypeObject *kernel_type;

static int kernel_traverse(PyObject *self, visitproc visit, void *arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Kernel *)self)->handler);
  return 0;
}

static int kernel_clear(PyObject *self) {
  Kernel *kernel = (Kernel *)self;
  for (Py_ssize_t i = 0; i < kernel->frozen_count; ++i) table_clear(&kernel->tables[i]);
  Py_CLEAR(kernel->handler);
  return 0;
}

static void kernel_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  kernel_clear(self);
  free(((Kernel *)self)->tables);
  Py_XDECREF(((Kernel *)self)->path);
  PyObject_GC_Del(self); /* the object stays loaded: a call on another thread may be in it */
  Py_DECREF(type);
}

/* The packed form of frozen operand number `which`, held, or NULL: take the natural path. -1: an exception is set. */
static int find_packed(Kernel *kernel, Py_ssize_t which, PyObject *object, Packed **out) {
  Py_ssize_t index = kernel->frozen[which];
  Table *table = &kernel->tables[which];
  DLTensor tensor;
  *out = NULL;
  if (describe(object, index, 0, &tensor)) return -1;
  if (!tensor.data) return 0;
  Entry *entry = table_find(table, tensor.data);
  if (entry) {
    if (entry->packed && same_description(entry->packed, &tensor)) {
      ++entry->packed->uses;
      *out = (Packed *)Py_NewRef((PyObject *)entry->packed);
      return 0;
    }
    if (!entry->packed && (entry->patience < 0 || entry->patience-- > 0)) return 0;
  }
  PyObject *position = PyLong_FromSsize_t(index);
  if (!position) return -1;
  PyObject *arguments[3] = {(PyObject *)kernel, position, object};
  PyObject *answer = PyObject_Vectorcall(kernel->handler, arguments, 3, NULL);
  Py_DECREF(position);
  if (!answer) return -1;
  Py_DECREF(answer);
  /* The handler speaks through the table. It ran Python code: look again from the start. */
  if (describe(object, index, 0, &tensor)) return -1;
  entry = table_find(&kernel->tables[which], tensor.data);
  if (entry && entry->packed && same_description(entry->packed, &tensor))
    *out = (Packed *)Py_NewRef((PyObject *)entry->packed);
  return 0;
}

static PyObject *kernel_call(PyObject *self, PyObject *const *arguments, size_t nargsf, PyObject *names) {
  Kernel *kernel = (Kernel *)self;
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  if ((names && PyTuple_GET_SIZE(names)) || count < kernel->operands || count > MAX_TENSORS)
    return PyErr_Format(PyExc_TypeError,
                        "a Postlude kernel was called with %zd arguments; its %zd operands and then its results were expected, "
                        "at most %d in all, none by name",
                        count, kernel->operands, (int)MAX_TENSORS);

  DLTensor tensors[MAX_TENSORS];
  const void *packed[MAX_TENSORS];
  Packed *held[MAX_TENSORS];
  Py_ssize_t holds = 0;
  PyObject *result = NULL;
  int any_packed = 0;

  for (; holds < kernel->frozen_count; ++holds)
    if (find_packed(kernel, holds, arguments[kernel->frozen[holds]], &held[holds])) goto done;

  int64_t bytes = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (describe(arguments[i], i, i >= kernel->operands, &tensors[i])) goto done;
    int64_t size = bytes_of(&tensors[i]);
    if (size < 0) {
      fail(i, "has no memory (it is fake, meta, or was freed)");
      goto done;
    }
    bytes += size;
  }
  for (Py_ssize_t i = 0; i < holds; ++i) {
    Py_ssize_t index = kernel->frozen[i];
    if (!any_packed) memset(packed, 0, sizeof(void *) * (size_t)count);
    any_packed = 1;
    /* A result that shares memory with the weight has just made it move: then what was packed is what it was. */
    packed[index] = held[i] && same_description(held[i], &tensors[index]) ? held[i]->buffer : NULL;
  }

  char message[MESSAGE_SIZE];
  message[0] = 0;
  uint32_t threads = 1;
  if (torch.num_threads(&threads)) threads = 1;
  PostludeCall call = {tensors, (int32_t)count, any_packed ? packed : NULL, kernel->micro, (int32_t)threads,
                       message, sizeof message};
  int status;
  if (bytes >= RELEASE_GIL_BYTES) {
    Py_BEGIN_ALLOW_THREADS
    status = kernel->run(&call);
    Py_END_ALLOW_THREADS
  } else {
    status = kernel->run(&call);
  }
  if (status) {
    message[MESSAGE_SIZE - 1] = 0;
    PyErr_Format(PyExc_RuntimeError, "Postlude kernel failed (code %d): %s", status, message[0] ? message : "no message");
    goto done;
  }
  result = Py_NewRef(Py_None);
done:
  for (Py_ssize_t i = 0; i < holds; ++i) Py_XDECREF(held[i]);
  return result;
}

static void *symbol(void *library, PyObject *path, const char *name) {
  void *address = dlsym(library, name);
  if (!address) PyErr_Format(PyExc_OSError, "%U has no function %s", path, name);
  return address;
}

static Kernel *kernel_alloc(void) {
  Kernel *kernel = PyObject_GC_New(Kernel, kernel_type);
  if (!kernel) return NULL;
  memset((char *)kernel + sizeof(PyObject), 0, sizeof *kernel - sizeof(PyObject));
  kernel->vectorcall = kernel_call;
  return kernel;
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"path", "micro", "operands", NULL};
  PyObject *path = NULL, *micro = NULL;
  Py_ssize_t operands = 0;
  (void)type;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UO|n:Kernel", names, &path, &micro, &operands)) return NULL;
  const char *file = PyUnicode_AsUTF8(path);
  void *table = PyLong_AsVoidPtr(micro);
  if (!file || PyErr_Occurred()) return NULL;
  if (operands < 0 || operands > MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "%zd operands", operands);
  if (!torch.tensor_type) return PyErr_Format(PyExc_RuntimeError, "the launcher has not been configured");
  void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  Kernel *kernel = kernel_alloc();
  if (!kernel) return NULL;
  kernel->micro = table;
  kernel->operands = operands;
  kernel->path = Py_NewRef(path);
  if (!(kernel->run = (run_t)symbol(library, path, "postlude_run")) ||
      !(kernel->pack_size = (pack_size_t)symbol(library, path, "postlude_pack_size")) ||
      !(kernel->pack = (pack_t)symbol(library, path, "postlude_pack"))) {
    Py_DECREF(kernel);
    return NULL;
  }
  PyObject_GC_Track(kernel);
  return (PyObject *)kernel;
}

static PyObject *kernel_pack_size(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *object;
  DLTensor tensor;
  if (!PyArg_ParseTuple(args, "nO:pack_size", &index, &object) || describe(object, index, 0, &tensor)) return NULL;
  return PyLong_FromLongLong(((Kernel *)self)->pack_size(&tensor, (int32_t)index));
}

static void *allocate(size_t bytes) {
  void *buffer = NULL;
  int huge = bytes >= 2 * HUGE_PAGE;
  if (posix_memalign(&buffer, huge ? HUGE_PAGE : 64, bytes)) return NULL;
#ifdef MADV_HUGEPAGE
  if (huge) madvise(buffer, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); /* a wish; no harm if not granted */
#endif
  return buffer;
}

static PyObject *kernel_pack(PyObject *self, PyObject *args) {
  Kernel *kernel = (Kernel *)self;
  Py_ssize_t index;
  PyObject *object, *keep;
  DLTensor tensor;
  if (!PyArg_ParseTuple(args, "nOO:pack", &index, &object, &keep) || describe(object, index, 0, &tensor)) return NULL;
  int64_t bytes = bytes_of(&tensor);
  if (bytes > 0 && tensor.ndim <= MAX_PACKED_DIMS) bytes = kernel->pack_size(&tensor, (int32_t)index);
  else bytes = 0;
  if (bytes <= 0) Py_RETURN_NONE;

  Packed *packed = PyObject_New(Packed, packed_type);
  if (!packed) return NULL;
  packed->keep = NULL;
  packed->uses = 0;
  packed->bytes = (size_t)bytes;
  packed->buffer = allocate(packed->bytes);
  if (!packed->buffer) {
    Py_DECREF(packed);
    return PyErr_NoMemory();
  }
  packed->data = tensor.data;
  packed->ndim = tensor.ndim;
  packed->dtype = tensor.dtype;
  memcpy(packed->shape, tensor.shape, sizeof(int64_t) * (size_t)tensor.ndim);
  memcpy(packed->strides, tensor.strides, sizeof(int64_t) * (size_t)tensor.ndim);
  packed->keep = Py_NewRef(keep);
  if (kernel->pack(&tensor, (int32_t)index, packed->buffer)) {
    Py_DECREF(packed);
    return PyErr_Format(PyExc_RuntimeError, "operand %zd could not be packed", index);
  }
  return (PyObject *)packed;
}

static PyObject *kernel_frozen(PyObject *self, PyObject *args) {
  Kernel *from = (Kernel *)self;
  PyObject *handler, *indices;
  if (!PyArg_ParseTuple(args, "OO!:frozen", &handler, &PyTuple_Type, &indices)) return NULL;
  Py_ssize_t count = PyTuple_GET_SIZE(indices);
  Kernel *kernel = kernel_alloc();
  if (!kernel) return NULL;
  kernel->run = from->run;
  kernel->pack_size = from->pack_size;
  kernel->pack = from->pack;
  kernel->micro = from->micro;
  kernel->operands = from->operands;
  kernel->path = Py_NewRef(from->path);
  kernel->handler = Py_NewRef(handler);
  kernel->tables = calloc(count ? (size_t)count : 1, sizeof(Table));
  if (!kernel->tables) {
    Py_DECREF(kernel);
    return PyErr_NoMemory();
  }
  if (!torch.stable) count = 0; /* DLPack would take a writable pointer, and every call would look like a write */
  for (Py_ssize_t i = 0; i < count; ++i) {
    Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(indices, i));
    if (index < 0 || index >= from->operands) {
      Py_DECREF(kernel);
      return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "operand %zd of %zd", index, from->operands);
    }
    kernel->frozen[kernel->frozen_count++] = index;
  }
  PyObject_GC_Track(kernel);
  return (PyObject *)kernel;
}

static Table *table_of(Kernel *kernel, Py_ssize_t index) {
  for (Py_ssize_t i = 0; i < kernel->frozen_count; ++i)
    if (kernel->frozen[i] == index) return &kernel->tables[i];
  PyErr_Format(PyExc_IndexError, "operand %zd is not frozen", index);
  return NULL;
}

static PyObject *kernel_use_packed(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *packed;
  if (!PyArg_ParseTuple(args, "nO!:use_packed", &index, packed_type, &packed)) return NULL;
  Table *table = table_of((Kernel *)self, index);
  if (!table || table_set(table, ((Packed *)packed)->data, (Packed *)Py_NewRef(packed), -1)) return NULL;
  Py_RETURN_NONE;
}

static PyObject *kernel_use_natural(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *address;
  long long patience;
  if (!PyArg_ParseTuple(args, "nO!L:use_natural", &index, &PyLong_Type, &address, &patience)) return NULL;
  void *data = PyLong_AsVoidPtr(address);
  if (!data && PyErr_Occurred()) return NULL;
  Table *table = table_of((Kernel *)self, index);
  if (!table || (data && table_set(table, data, NULL, patience))) return NULL;
  Py_RETURN_NONE;
}

static PyObject *kernel_forget(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *address;
  if (!PyArg_ParseTuple(args, "nO!:forget", &index, &PyLong_Type, &address)) return NULL;
  void *data = PyLong_AsVoidPtr(address);
  if (!data && PyErr_Occurred()) return NULL;
  Table *table = table_of((Kernel *)self, index);
  if (!table) return NULL;
  return PyBool_FromLong(table_remove(table, data));
}

static PyObject *kernel_status(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *object;
  DLTensor tensor;
  if (!PyArg_ParseTuple(args, "nO:status", &index, &object)) return NULL;
  Table *table = table_of((Kernel *)self, index);
  if (!table || describe(object, index, 0, &tensor)) return NULL;
  Entry *entry = tensor.data ? table_find(table, tensor.data) : NULL;
  if (!entry) return PyUnicode_FromString("unknown");
  if (!entry->packed) return PyUnicode_FromString("natural");
  return PyUnicode_FromString(same_description(entry->packed, &tensor) ? "packed" : "changed");
}

static PyObject *kernel_packed(PyObject *self, PyObject *args) {
  Py_ssize_t index;
  PyObject *address;
  if (!PyArg_ParseTuple(args, "nO!:packed", &index, &PyLong_Type, &address)) return NULL;
  void *data = PyLong_AsVoidPtr(address);
  if (!data && PyErr_Occurred()) return NULL;
  Table *table = table_of((Kernel *)self, index);
  if (!table) return NULL;
  Entry *entry = data ? table_find(table, data) : NULL;
  return Py_NewRef(entry && entry->packed ? (PyObject *)entry->packed : Py_None);
}

static PyObject *address_of_tensor(PyObject *module, PyObject *object) {
  DLTensor tensor;
  (void)module;
  if (!torch.stable) return PyErr_Format(PyExc_RuntimeError, "this torch can't tell an address without writing");
  if (describe(object, 0, 0, &tensor)) return NULL;
  return PyLong_FromVoidPtr(tensor.data);
}

static PyObject *kernel_repr(PyObject *self) {
  Kernel *kernel = (Kernel *)self;
  return PyUnicode_FromFormat("<postlude.Kernel %R, %zd operands, %zd frozen>", kernel->path, kernel->operands,
                              kernel->frozen_count);
}

static PyMethodDef kernel_methods[] = {
    {"pack_size", kernel_pack_size, METH_VARARGS, "pack_size(index, tensor): bytes of the packed form; 0: never packed"},
    {"pack", kernel_pack, METH_VARARGS, "pack(index, tensor, keep): a Packed that holds `keep`, or None"},
    {"frozen", kernel_frozen, METH_VARARGS, "frozen(handler, indices): a Kernel that looks for packed forms of these operands"},
    {"use_packed", kernel_use_packed, METH_VARARGS, "use_packed(index, packed)"},
    {"use_natural", kernel_use_natural, METH_VARARGS, "use_natural(index, address, patience)"},
    {"forget", kernel_forget, METH_VARARGS, "forget(index, address): whether there was something to forget"},
    {"packed", kernel_packed, METH_VARARGS, "packed(index, address): the Packed, or None"},
    {"status", kernel_status, METH_VARARGS, "status(index, tensor): 'packed', 'natural', 'changed' or 'unknown'"},
    {NULL},
};

static PyMemberDef kernel_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Kernel, vectorcall), READONLY, NULL},
    {"path", T_OBJECT, offsetof(Kernel, path), READONLY, "path of the compiled object"},
    {"operands", T_PYSSIZET, offsetof(Kernel, operands), READONLY, "number of arguments that are only read"},
    {NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_new, kernel_new},         {Py_tp_dealloc, kernel_dealloc}, {Py_tp_traverse, kernel_traverse},
    {Py_tp_clear, kernel_clear},     {Py_tp_call, PyVectorcall_Call}, {Py_tp_methods, kernel_methods},
    {Py_tp_members, kernel_members}, {Py_tp_repr, kernel_repr},       {Py_tp_doc, "A compiled Region."},
    {0, NULL},
};

static PyType_Spec kernel_spec = {"postlude.Kernel", sizeof(Kernel), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, kernel_slots};

/* Module ------------------------------------------------------------------------------------------------------------ */

static void *address_of(PyObject *functions, const char *name) {
  PyObject *value = PyDict_GetItemString(functions, name);
  return value && PyLong_Check(value) ? PyLong_AsVoidPtr(value) : NULL;
}

/* configure(tensor_type, functions, impl_offset, dtypes): functions by name, dtypes as {ScalarType: (code, bits)} */
static PyObject *configure(PyObject *module, PyObject *args) {
  PyObject *type, *functions, *dtypes, *key, *value;
  Py_ssize_t offset, position = 0;
  (void)module;
  if (!PyArg_ParseTuple(args, "O!O!nO!:configure", &PyType_Type, &type, &PyDict_Type, &functions, &offset, &PyDict_Type,
                        &dtypes))
    return NULL;
  torch.const_data_ptr = (get_pointer_t)address_of(functions, "torch_get_const_data_ptr");
  torch.mutable_data_ptr = (get_pointer_t)address_of(functions, "torch_get_mutable_data_ptr");
  torch.dim = (get_int64_t)address_of(functions, "aoti_torch_get_dim");
  torch.sizes = (get_array_t)address_of(functions, "aoti_torch_get_sizes");
  torch.strides = (get_array_t)address_of(functions, "aoti_torch_get_strides");
  torch.dtype = (get_int32_t)address_of(functions, "aoti_torch_get_dtype");
  torch.device_type = (get_int32_t)address_of(functions, "aoti_torch_get_device_type");
  torch.num_threads = (get_threads_t)address_of(functions, "torch_get_num_threads");
  void **exchange = (void **)address_of(functions, "dlpack_exchange_api");
  /* struct DLPackExchangeAPI: version (8 bytes), an older table, allocate, from_object, to_object, dltensor_from_object, ... */
  torch.dltensor = exchange ? (dltensor_t)exchange[5] : NULL;
  torch.stable = torch.const_data_ptr && torch.mutable_data_ptr && torch.dim && torch.sizes && torch.strides && torch.dtype &&
                 torch.device_type;
  if (PyErr_Occurred()) return NULL;
  if (!torch.num_threads || !(torch.stable || torch.dltensor))
    return PyErr_Format(PyExc_RuntimeError, "this torch offers no way to describe a tensor from C");
  torch.impl_offset = offset;
  memset(torch.dtypes, 0, sizeof torch.dtypes);
  while (PyDict_Next(dtypes, &position, &key, &value)) {
    long index = PyLong_AsLong(key);
    unsigned char code, bits;
    if (!PyArg_ParseTuple(value, "bb", &code, &bits)) return NULL;
    if (index >= 0 && index < DTYPES) torch.dtypes[index] = (DLDataType){code, bits, 1};
  }
  Py_XSETREF(torch.tensor_type, (PyTypeObject *)Py_NewRef(type));
  return PyBool_FromLong(torch.stable);
}

static PyMethodDef module_methods[] = {
    {"configure", configure, METH_VARARGS, "configure(tensor_type, functions, impl_offset, dtypes): whether weights can be frozen"},
    {"address", address_of_tensor, METH_O, "address(tensor): of its first element; does not count as a write"},
    {NULL},
};

static struct PyModuleDef module_definition = {PyModuleDef_HEAD_INIT, "postlude_launcher", "Calls compiled Regions.", -1,
                                               module_methods};

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit_postlude_launcher(void) {
  name_cdata = PyUnicode_InternFromString("_cdata");
  kernel_type = (PyTypeObject *)PyType_FromSpec(&kernel_spec);
  packed_type = (PyTypeObject *)PyType_FromSpec(&packed_spec);
  PyObject *module = PyModule_Create(&module_definition);
  if (!name_cdata || !kernel_type || !packed_type || !module || PyModule_AddObjectRef(module, "Kernel", (PyObject *)kernel_type) ||
      PyModule_AddObjectRef(module, "Packed", (PyObject *)packed_type)) {
    Py_XDECREF(module);
    return NULL;
  }
  return module;
}
