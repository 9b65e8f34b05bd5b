// What a generated file includes: describes its Program to the library's driver and exports the four functions of abi.h.
//
// run<Program>(call) checks the call, constructs Tensors once and hands over to the driver (gemm.h in the library of
// microkernels). The contract of Program and its Groups is in run_program.h.
#ifndef POSTLUDE_RUN_H
#define POSTLUDE_RUN_H

#include <cstdarg>
#include <cstdio>
#include <tuple>
#include <utility>

#include <postlude/micro.h>
#include <postlude/pack.h>
#include <postlude/tensor.h>

namespace postlude {

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
inline int fail(const PostludeCall &call, const char *format, ...) {
  if (call.message != nullptr && call.message_size > 0) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(call.message, call.message_size, format, arguments);
    va_end(arguments);
  }
  return 1;
}

namespace run_detail {

// An epilogue for one row (run_program.h has both forms).
template <class C>
using RowEpilogue = void (*)(const Tensors &, int64_t, int64_t, int64_t, C *const *, void *);

// Longer rows are taken one by one: several would not stay in L1 from one pass to the next.
constexpr int64_t kLongRow = 2048;

// Sums over the rows of a group that has some.
template <class Group, class = void>
struct TotalsOf {
  static constexpr int count = 0;
  static constexpr Totals finish = nullptr;
};
template <class Group>
struct TotalsOf<Group, std::void_t<decltype(Group::totals)>> {
  static constexpr int count = Group::totals;
  static void finish(const void *tensors, int64_t nc, void *const *sums) {
    typename Group::Compute *rows[count];
    for (int i = 0; i < count; ++i) rows[i] = static_cast<typename Group::Compute *>(sums[i]);
    Group::finish(*static_cast<const Tensors *>(tensors), nc, rows);
  }
};

template <class Group>
void block_epilogue(const void *tensors, int64_t row, int64_t rows, int64_t c0, int64_t nc, void *const *acc, int64_t acc_stride,
                    void *next, int64_t next_stride) {
  using Compute = typename Group::Compute;
  const Tensors &t = *static_cast<const Tensors *>(tensors);
  Compute *pieces[Group::contractions];
  for (int i = 0; i < Group::contractions; ++i) pieces[i] = static_cast<Compute *>(acc[i]);
  constexpr bool by_row = std::is_same_v<decltype(&Group::epilogue), RowEpilogue<Compute>>;
  int64_t each = 1;
  if constexpr (!by_row) each = Group::rows_at_once == 0 ? rows : nc < kLongRow ? Group::rows_at_once : 1;
  for (int64_t r = 0; r < rows; r += each) {
    if constexpr (by_row)
      Group::epilogue(t, row + r, c0, nc, pieces, next);
    else
      Group::epilogue(t, row + r, rows - r < each ? rows - r : each, c0, nc, pieces, acc_stride, next, next_stride);
    for (int i = 0; i < Group::contractions; ++i) pieces[i] += each * acc_stride;
    if (next != nullptr && TotalsOf<Group>::count == 0) next = static_cast<char *>(next) + each * next_stride;
  }
}

template <class Group>
constexpr GroupInfo describe() {
  static_assert(Group::contractions >= 1 && Group::contractions <= kMaxContractions, "too many contractions in one group");
  static_assert(!Group::feeds_next || Group::whole_rows, "a group that feeds the next one needs whole rows");
  static_assert(TotalsOf<Group>::count <= kMaxTotals, "too many sums over the rows");
  static_assert(TotalsOf<Group>::count == 0 || (!Group::batched && !Group::feeds_next), "sums over the rows of one product only");
  static_assert(sizeof(typename Group::Compute) == compute_bytes(ElementOf<typename Group::Right>::value),
                "float accumulates all but double");
  GroupInfo info{ElementOf<typename Group::Left>::value, ElementOf<typename Group::Right>::value,
                   Group::contractions,                    Group::left,
                   Group::right,                           Group::batched,
                   Group::whole_rows,                      Group::feeds_next,
                   &block_epilogue<Group>,                 TotalsOf<Group>::count,
                   TotalsOf<Group>::finish};
  if constexpr (requires { Group::codes; })
    info.codes = Group::codes, info.scale_type = Group::scale_type, info.block = Group::block, info.scales = Group::scales;
  return info;
}

template <class Groups>
struct Describe;
template <class... Groups>
struct Describe<std::tuple<Groups...>> {
  static constexpr int count = sizeof...(Groups);
  static constexpr GroupInfo groups[] = {describe<Groups>()...};
};

// The group in which tensor `index` is a right operand that can be packed: two dimensions, one set of panels for all rows.
template <class Program>
const GroupInfo *packable(const DLTensor &operand, int32_t index, bool *transposed) {
  using D = Describe<typename Program::Groups>;
  if (operand.ndim != 2) return nullptr;
  for (const GroupInfo &group : D::groups)
    for (int i = 0; i < group.contractions; ++i)
      if (group.right[i].tensor == index && group.codes == Codes::none) {
        *transposed = group.right[i].transposed;
        return &group;
      }
  return nullptr;
}

}  // namespace run_detail

template <class Program>
int run(const PostludeCall &call) {
  using D = run_detail::Describe<typename Program::Groups>;
  static constexpr ProgramInfo info{D::groups, D::count, Program::operands + Program::results};
  const auto *table = static_cast<const MicroTable *>(call.micro);
  if (table == nullptr || table->version != kMicroVersion)
    return fail(call, "the library of microkernels is missing or was compiled with other flags (version %d, this kernel expects %d); "
                "clear Postlude's cache of compiled kernels", table ? static_cast<int>(table->version) : 0,
                static_cast<int>(kMicroVersion));
  if (call.count != info.tensors)
    return fail(call, "this kernel takes %d tensors (operands, then results), got %d", static_cast<int>(info.tensors),
                static_cast<int>(call.count));
  const Tensors tensors(call);
  return table->run(info, call, &tensors);
}

template <class Program>
int64_t pack_size(const DLTensor *operand, int32_t index) {
  bool transposed = false;
  const GroupInfo *group = run_detail::packable<Program>(*operand, index, &transposed);
  if (group == nullptr) return 0;
  const int64_t n = operand->shape[transposed ? 0 : 1], k = operand->shape[transposed ? 1 : 0], w = panel_columns(group->right_type);
  return (n + w - 1) / w * panel_bytes(group->right_type, k);
}

template <class Program>
int pack(const DLTensor *operand, int32_t index, void *destination) {
  bool transposed = false;
  const GroupInfo *group = run_detail::packable<Program>(*operand, index, &transposed);
  if (group == nullptr) return 1;
  const Element e = group->right_type;
  const int n_dim = transposed ? 0 : 1, k_dim = 1 - n_dim;
  const int64_t n = operand->shape[n_dim], k = operand->shape[k_dim], w = panel_columns(e);
  const char *from = static_cast<const char *>(operand->data) + operand->byte_offset;
  char *to = static_cast<char *>(destination);
  for (int64_t c = 0; c < n; c += w, to += panel_bytes(e, k))
    pack_panel(e, to, from + c * operand->strides[n_dim] * element_bytes(e), operand->strides[k_dim], operand->strides[n_dim], k,
               n - c < w ? n - c : w);
  return 0;
}

}  // namespace postlude

#define POSTLUDE_EXPORT(Program)                                                                                            \
  extern "C" __attribute__((visibility("default"))) int postlude_run(const PostludeCall *call) {                           \
    return postlude::run<Program>(*call);                                                                                   \
  }                                                                                                                         \
  extern "C" __attribute__((visibility("default"))) int64_t postlude_pack_size(const DLTensor *operand, int32_t index) {   \
    return postlude::pack_size<Program>(operand, index);                                                                    \
  }                                                                                                                         \
  extern "C" __attribute__((visibility("default"))) int postlude_pack(const DLTensor *operand, int32_t index,              \
                                                                      void *destination) {                                 \
    return postlude::pack<Program>(operand, index, destination);                                                            \
  }

#endif
