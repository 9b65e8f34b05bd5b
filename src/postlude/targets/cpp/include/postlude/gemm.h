// The driver: from a call to microkernels and epilogues. Compiled once, into the library of microkernels.
//
// Two ways to spread the work, chosen per group:
//
//   panels   One weight matrix for all rows. A task is one panel of columns times a range of rows; the epilogue runs on a tile
//            that is still in L1. Groups that need whole rows write their accumulators to a shared buffer instead, and
//            after a barrier the threads share out the rows. This splits the columns even where there is one row, and packs
//            each panel of natural weights once, by the thread that needs it, in its L2. Where there are many rows and
//            packed weights that fit into L2, a task is all panels times a few rows instead, without buffer and barrier.
//   rows     Batched groups, and chains. A task is a range of rows of one batch item, from the first contraction to the last
//            epilogue, in the thread's own buffers. Packed right operands are kept from one task to the next of an item.
//
// The tasks of a phase are shared out in as many pieces as there are threads, each with an atomic counter. A thread takes from its
// own piece first, so that from call to call a core meets much of the memory that it used before, then from the others': one that
// loses its core to another process delays only what it has in hand.
// Included by micro.cpp only.
#ifndef POSTLUDE_GEMM_H
#define POSTLUDE_GEMM_H

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include <postlude/gemm_view.h>
#include <postlude/micro_codes.h>
#include <postlude/micro_kernels.h>
#include <postlude/micro_pack.h>

namespace postlude {

// Thread-local buffers that only grow. Slots at and above kPacked hold packed right operands, one per contraction.
enum Slot : int {
  kSharedRows, kSharedLeft, kSharedPanels, kSharedCounters, kPanel, kTile, kTwoTiles, kRows, kNextEven, kNextOdd, kLeft,
  kLeftConverted, kLeftPairs, kLeftPanel, kLeftArranged, kScales, kTotals,
  kDecoded,
  kPacked = kDecoded + kMaxContractions
};
constexpr int kMaxGroups = 16;
constexpr int kSlots = kPacked + kMaxContractions * kMaxGroups;
void *scratch(int slot, int64_t bytes);  // aligned to 64 bytes and padded by 64
bool in_parallel_region();
int thread_number();  // in the team
int may_use_threads(int wanted);  // 1 in a forked child, where the pool of threads does not exist

// Below how many rows weights are used where they lie, because packing them would cost more than it saves.
// Sums over the lanes at the end of each dot product cost as much as kDotDepth steps of k per block of rows.
constexpr int64_t kDotRows = 64, kDotDepth = 32;
// From how many rows on AMX is used: with weights that it reads as they are, and where it packs them on the fly. Swept with one
// thread of an Emerald Rapids, three sizes of weights: with 2 rows AMX was 0.72 to 1.19 times as fast as the vector kernels, with 3
// 1.28 to 1.61; packing, with 4 rows 0.82 to 0.92, with 6 1.96.
constexpr int64_t kAmxRowsAsIs = 3, kAmxRowsPacking = 6;
// All panels of a task may fill so much of L2: no CPU with AMX has less than 2 MB.
constexpr int64_t kAmxBudget = 1280 << 10;
// Up to how many rows AMX reads weights [n, k] where they lie: beyond, turning the product around costs as much as packing.
// Swept likewise: with 128 rows it was 1.05 to 1.16 times as fast as packing, with 192 0.94, with 256 0.90 to 1.02.
constexpr int64_t kAmxWeightsRows = 128;
// Weights [n, k] of float as the left operand of the transposed product (`turn_pays`): from how many rows on, and up to how many
// bytes of rows, which are read again for each panel of weights. Packing or turning an element takes as long as multiplying it with
// kPackingRows rows: an estimate from one thread of an Emerald Rapids (docs/benchmarks.md); not measured on AMD.
constexpr int64_t kTurnFrom = 33, kTurnBytes = 1 << 20, kPackingRows = 14;
// From how many rows on, and up to how many bytes, all threads pack natural weights together before the first product. Then the
// call goes on as if they had been packed before: a task may be all panels of a few rows. With fewer rows a thread packs the panel
// that it is about to use, without a barrier. In MiniLM with two threads of an Emerald Rapids this was 1.08 to 1.23 times as fast in
// bfloat16 with 1024 rows and 1.01 with 512; in float32 1.00 to 1.08 with 1024 and 0.96 with 512.
constexpr int64_t pack_all_rows(Element e) { return e == Element::bf16 ? 512 : 1024; }
constexpr int64_t kPackAllBytes = 16 << 20;
// Weights [k, n]: rows of 16-bit elements must be interleaved or converted at every reading.
constexpr int64_t in_place_rows(Element e) { return element_bytes(e) == 2 ? 12 : 40; }
// Rows of both operands in the dot form: a block of them should fit into L1.
constexpr int64_t kDotBytes = 4096;
// One thread's share of L2 that a packed panel may fill, and the shared buffers' sizes.
// Weights larger than this do not stay in L2 between calls: prefetch. `kNear` bytes ahead in a packed panel and
// `kNearRows` rows ahead in weights [k, n], where there is no
// other block of rows to hide the reading of the next panel behind.
constexpr int64_t kPrefetchBytes = 1 << 20, kNear = 16 << 10, kNearRows = 16;
// Groups that need whole rows: how many rows make a task of their own, and of how many such tasks a thread must have its choice.
constexpr int64_t kOwnRows = 8 * kTileRows, kOwnTasks = 3;
// So many rows at most are added up in one partial sum over rows: a short chain of roundings. And so many by one task that finishes
// whole rows.
constexpr int64_t kTotalRows = 24, kFinishedRows = 16;
constexpr int64_t kPanelBudget = 640 << 10, kRowsBudget = 8 << 20, kLeftBudget = 16 << 20, kKeepPacked = 4 << 20;

// Up to how many rows codes are multiplied as they are decoded; beyond, a panel of weight rows is decoded first. Where bfloat16 is
// multiplied in tiles, the products are nearly free.
constexpr int64_t kCodedFew = kCodedRows;

#if defined(POSTLUDE_CODES)
constexpr Codes kCodes = Codes::POSTLUDE_CODES;
#else
constexpr Codes kCodes = Codes::none;
#endif

enum class Form { packed, dot, in_place, pack, codes };

struct Right {
  View view;  // of codes: their sizes, and strides that say that k is contiguous
  const char *packed = nullptr;
  CodedRows coded;
};

struct Left {
  View view;
  int shared = -1;      // index into the shared copies; -1: none
  bool direct = false;  // the kernels read it where it lies
};

struct Group {
  const GroupInfo *info = nullptr;
  KernelSet kernels{};
  Left left[kMaxContractions];
  Right right[kMaxContractions];
  int64_t batch = 1, m = 0, n = 0, k = 0;
  int64_t width = 0, panels = 0;  // columns of a panel, panels of n
  int64_t item = 0;               // bytes of an accumulator
  bool chained = false;           // the left operand is the previous group's `next`
  bool by_rows = false;
  bool prefetch = false;  // the weights do not stay in L2
  bool one_left = true;   // all contractions have the same left operand
  int64_t block = kTileRows;  // rows of a block: kAmxRows where AMX multiplies
  bool all_panels = false;  // panels: a task is all panels times rows_each rows, its epilogue included
  bool turned = false;  // panels: the transposed product, weights where they lie times rows in panels
  bool pack_first[kMaxContractions] = {};  // panels: natural weights that all threads pack before the first product
  bool rows_outside = false;  // panels: tasks of the same rows follow each other, not those of the same panel
  int64_t rows_each = 0, tasks = 0, shared_at = 0;  // panels: rows of a task, tasks
  int64_t totals_at = 0, slots = 0;  // panels: partial sums over rows, where they begin and how many for one sum
};

// Rows [0, rows) in blocks: of nearly equal size, none larger than a tile of registers; with AMX of full size but for the last.
struct Blocks {
  int64_t count, base, longer, rows;
  Blocks(int64_t all, int64_t most)
      : count((all + most - 1) / most),
        base(most != kTileRows ? most : count ? all / count : 0),
        longer(most != kTileRows ? 0 : count ? all % count : 0),
        rows(all) {}
  int size(int64_t i) const { return static_cast<int>(std::min(base + (i < longer ? 1 : 0), rows - i * base)); }
};

class Driver {
 public:
  Driver(const ProgramInfo &program, const PostludeCall &call, const void *tensors)
      : program_(program), call_(call), tensors_(tensors) {}

  int run() {
    if (program_.count > kMaxGroups) return fail("this kernel has %d groups; the driver takes %d", program_.count, kMaxGroups);
    for (int g = 0; g < program_.count; ++g)
      if (const int code = prepare(g)) return code;
    threads_ = in_parallel_region() ? 1 : may_use_threads(std::max(1, static_cast<int>(call_.threads)));
    plan();
    if (work_ < kSerialWork) threads_ = 1;
    int64_t phases = 0;
    for (int64_t s = 0; s < total_; s += super_) phases += 3;
    last_phase_ = phases + program_.count;
    const int64_t counters = (last_phase_ + 1) * threads_;
    counters_ = static_cast<Counter *>(scratch(kSharedCounters, counters * static_cast<int64_t>(sizeof(Counter))));
    for (int64_t i = 0; i < counters; ++i) counters_[i].next.store(0, std::memory_order_relaxed);
    shared_rows_ = shared_rows_bytes_ ? static_cast<char *>(scratch(kSharedRows, shared_rows_bytes_)) : nullptr;
    if (totals_bytes_ > 0) {
      totals_ = static_cast<char *>(scratch(kTotals, totals_bytes_));
      std::memset(totals_, 0, static_cast<size_t>(totals_bytes_));
    }
    shared_left_ = shared_left_bytes_ ? static_cast<char *>(scratch(kSharedLeft, shared_left_bytes_)) : nullptr;
    if (threads_ == 1) {
      work(false);
    } else {
#pragma omp parallel num_threads(threads_)
      work(true);
    }
    for (int i = 0; i < program_.count; ++i)
      if (groups_[i].info->totals > 0) add_totals(groups_[i]);
    return 0;
  }

 private:
  struct alignas(64) Counter {
    std::atomic<int64_t> next;
  };
  struct Rows {
    const char *data;
    int64_t stride;  // elements
  };
  struct SharedLeft {
    View view;
    Element as;
    int64_t k, stride, at;  // stride in elements; `at` in bytes
  };
  // About one microsecond on two threads pays for waking the second: products, or elements of weights read.
  static constexpr int64_t kSerialWork = 400000;

  const ProgramInfo &program_;
  const PostludeCall &call_;
  const void *tensors_;
  int threads_ = 1;
  Group groups_[kMaxGroups];
  SharedLeft lefts_[kMaxGroups * 2];
  int left_count_ = 0;
  int64_t total_ = 0, super_ = 1;  // rows of the panel groups; rows handled between barriers
  int64_t panel_tasks_ = 0, grain_ = 1, work_ = 0;
  int64_t last_phase_ = 0, pack_tasks_ = 0;  // panels of weights that the threads pack together
  bool whole_rows_ = false;
  int64_t shared_rows_bytes_ = 0, shared_left_bytes_ = 0;
  Counter *counters_ = nullptr;
  char *shared_rows_ = nullptr, *shared_left_ = nullptr, *totals_ = nullptr;
  int64_t totals_bytes_ = 0;

#if defined(__GNUC__)
  __attribute__((format(printf, 2, 3)))
#endif
  int fail(const char *format, ...) {
    if (call_.message != nullptr && call_.message_size > 0) {
      va_list arguments;
      va_start(arguments, format);
      std::vsnprintf(call_.message, call_.message_size, format, arguments);
      va_end(arguments);
    }
    return 1;
  }

  // --- what the tensors say ---------------------------------------------------------------------------------------------

  int check(int tensor, Element type, bool batched, bool may_lead) {
    const DLTensor &t = call_.tensors[tensor];
    const int bits = static_cast<int>(element_bytes(type) * 8), code = type == Element::bf16 ? 4 : 2;
    if (t.dtype.code != code || t.dtype.bits != bits || t.dtype.lanes != 1)
      return fail("tensor %d has dtype code %d with %d bits, this kernel was compiled for code %d with %d bits", tensor, t.dtype.code,
                  t.dtype.bits, code, bits);
    if (t.ndim < 2 || t.ndim > kMaxDims || (t.ndim > 2 && !batched && !may_lead))
      return fail("tensor %d has %d dimensions, expected %s", tensor, t.ndim, batched || may_lead ? "2 to 16" : "2");
    return 0;
  }

  // The parts of a weight that is kept as codes.
  int coded(Right &right, const GroupInfo &info, int i) {
    if (info.codes != kCodes) return fail("the library of microkernels was compiled for other codes than this kernel's");
    const DLTensor &t = call_.tensors[info.right[i].tensor];
    const bool pairs = codes_bits(info.codes) == 4;
    if (t.ndim != 2 || t.dtype.bits != 8 || (t.shape[1] > 1 && t.strides[1] != 1))
      return fail("tensor %d is a weight in codes: expected bytes [n, k] that lie along k", info.right[i].tensor);
    right.view.rows.add(t.shape[0], 1);
    right.view.type = info.right_type;
    right.view.k = t.shape[1] * (pairs ? 2 : 1);
    right.view.stride_k = 1;
    right.coded.codes = static_cast<const uint8_t *>(t.data) + t.byte_offset;
    right.coded.stride = t.strides[0];
    if (info.block == 0) return 0;
    right.coded.block = info.block, right.coded.scale_type = info.scale_type;
    for (const int index : {info.scales[i].scale, info.scales[i].shift}) {
      if (index < 0) continue;
      const DLTensor &s = call_.tensors[index];
      if (s.ndim != 2 || s.shape[0] != t.shape[0] || s.shape[1] != (right.view.k + info.block - 1) / info.block ||
          (s.shape[1] > 1 && s.strides[1] != 1))
        return fail("tensor %d holds scales: expected one for each row and %d columns of tensor %d, along k", index,
                    static_cast<int>(info.block), info.right[i].tensor);
      const char *data = static_cast<const char *>(s.data) + s.byte_offset;
      if (index == info.scales[i].scale)
        right.coded.scale = data, right.coded.scale_stride = s.strides[0] * (s.dtype.bits / 8);
      else
        right.coded.shift = reinterpret_cast<const int8_t *>(data), right.coded.shift_stride = s.strides[0];
    }
    return 0;
  }

  int prepare(int index) {
    const GroupInfo &info = program_.groups[index];
    Group &g = groups_[index];
    g.info = &info;
    g.kernels = kernels_for(info.left_type, info.right_type);
    if (g.kernels.panel == nullptr) return fail("the library of microkernels was compiled for another type than this kernel's");
    g.width = panel_columns(info.right_type);
    g.item = compute_bytes(info.right_type);
    g.chained = info.left[0].tensor < 0;
    if (g.chained && index == 0) return fail("the first group has no left operand");
    for (int i = 0; i < info.contractions; ++i) {
      const Source l = info.left[i], r = info.right[i];
      if (info.codes != Codes::none) {
        if (const int code = coded(g.right[i], info, i)) return code;
      } else {
        if (const int code = check(r.tensor, info.right_type, info.batched, false)) return code;
        g.right[i].view = view_of(call_.tensors[r.tensor], info.right_type, r.transposed, info.batched);
      }
      const View &right = g.right[i].view;
      if (call_.packed != nullptr && right.batch.total == 1 && info.codes == Codes::none)
        g.right[i].packed = static_cast<const char *>(call_.packed[r.tensor]);
      int64_t batch = right.batch.total, m, k;
      if (g.chained) {
        const Group &before = groups_[index - 1];
        m = before.m, k = before.n;
        if (batch == 1) batch = before.batch;
        if (batch != before.batch)
          return fail("tensor %d has a batch of %lld, its left operand of %lld", r.tensor, static_cast<long long>(batch),
                      static_cast<long long>(before.batch));
      } else {
        if (const int code = check(l.tensor, info.left_type, info.batched, !l.transposed)) return code;
        g.left[i].view = view_of(call_.tensors[l.tensor], info.left_type, !l.transposed, info.batched);
        const View &left = g.left[i].view;
        if (left.batch.total != batch && left.batch.total != 1 && batch != 1)
          return fail("tensors %d and %d have batches of %lld and %lld", l.tensor, r.tensor, static_cast<long long>(left.batch.total),
                      static_cast<long long>(batch));
        if (batch == 1) batch = left.batch.total;
        m = left.rows.total, k = left.k;
        g.left[i].direct = info.left_type == g.kernels.left && left.stride_k == 1 && left.rows.uniform();
      }
      if (right.k != k)
        return fail("tensors %d and %d do not fit: the contracted sizes are %lld and %lld", l.tensor, r.tensor, static_cast<long long>(k),
                    static_cast<long long>(right.k));
      if (i > 0 && (batch != g.batch || m != g.m || right.rows.total != g.n))
        return fail("contraction %d of group %d is [%lld, %lld, %lld], the first is [%lld, %lld, %lld]", i, index,
                    static_cast<long long>(batch), static_cast<long long>(m), static_cast<long long>(right.rows.total),
                    static_cast<long long>(g.batch), static_cast<long long>(g.m), static_cast<long long>(g.n));
      g.one_left = g.one_left && l.tensor == info.left[0].tensor && l.transposed == info.left[0].transposed;
      g.batch = batch, g.m = m, g.n = right.rows.total, g.k = k;
    }
    g.panels = (g.n + g.width - 1) / g.width;
    g.prefetch = g.n * g.k * element_bytes(info.right_type) * info.contractions > kPrefetchBytes;
    g.by_rows = g.info->batched || g.chained || g.info->feeds_next;
    if (g.chained) groups_[index - 1].by_rows = true;
    if (amx_pays(g)) g.block = kAmxRows;
    return 0;
  }

  // --- the plan ---------------------------------------------------------------------------------------------------------

  static bool amx(const Group &g) { return g.block == kAmxRows; }
  static bool is_coded(const Group &g) { return g.info->codes != Codes::none; }

  // With AMX the panels of a task are read once for so many rows; as few tasks as leave every thread a choice.
  int64_t own_rows(const Group &g) const {
    if (!amx(g)) return kOwnRows;
    int64_t rows = 4 * kAmxRows;
    while (rows > kAmxRows && g.m < threads_ * kOwnTasks * rows) rows /= 2;
    return rows;
  }

  static bool amx_pays(const Group &g) {
    if (g.kernels.amx.panel == nullptr) return false;
    bool as_is = true;
    for (int c = 0; c < g.info->contractions; ++c) as_is = as_is && (g.right[c].packed != nullptr || weights_as_left(g, g.right[c]));
    return g.m >= (as_is ? kAmxRowsAsIs : kAmxRowsPacking);
  }

  // Whether AMX can multiply with weights [n, k] where they lie, in the transposed product.
  static bool weights_as_left(const Group &g, const Right &r) { return !g.by_rows && g.one_left && r.view.stride_k == 1; }

  static Form form(const Group &g, const Right &r, int64_t rows, int64_t panel) {
    if (r.packed != nullptr) return Form::packed;
    if (is_coded(g) && !amx(g) && rows <= kCodedFew) return Form::codes;
    const View &v = r.view;
    if (amx(g)) {
      const bool dot = weights_as_left(g, r) && rows <= kAmxWeightsRows && g.n - panel * g.width >= 16;
      return dot ? Form::dot : Form::pack;
    }
    if (v.stride_k == 1 && rows <= kDotRows && Blocks(rows, g.block).count * kDotDepth <= g.k) return Form::dot;
    if (v.rows.step() == 1 && rows <= in_place_rows(v.type) && (panel + 1) * g.width <= g.n) return Form::in_place;
    return Form::pack;
  }

  // Makes natural weights of many rows packed ones, which `work` fills in first.
  void pack_together() {
    int64_t bytes = 0;
    const auto each = [&](auto visit) {
      for (int i = 0; i < program_.count; ++i) {
        Group &g = groups_[i];
        if (g.by_rows || g.panels == 0 || g.m < pack_all_rows(g.info->right_type) || turn_pays(g)) continue;
        for (int c = 0; c < g.info->contractions; ++c)
          if (form(g, g.right[c], g.m, 0) == Form::pack) visit(g, c, g.panels * panel_bytes(g.info->right_type, g.k));
      }
    };
    each([&](Group &, int, int64_t size) { bytes += size; });
    if (bytes == 0 || bytes > kPackAllBytes) return;
    char *to = static_cast<char *>(scratch(kSharedPanels, bytes));
    each([&](Group &g, int c, int64_t size) {
      g.right[c].packed = to, to += size;
      g.pack_first[c] = true;
      pack_tasks_ += g.panels;
    });
  }

  void pack_task(int64_t task) {
    for (int i = 0; i < program_.count; ++i) {
      const Group &g = groups_[i];
      for (int c = 0; c < g.info->contractions; ++c) {
        if (!g.pack_first[c]) continue;
        if (task < g.panels)
          return pack_right(g, c, task, 0, const_cast<char *>(g.right[c].packed) + task * panel_bytes(g.info->right_type, g.k));
        task -= g.panels;
      }
    }
  }

  void plan() {
    pack_together();
    int64_t rows_bytes = 0, left_bytes = 0;
    int64_t panel_work = 0, all_panels = 0;
    for (int i = 0; i < program_.count; ++i) {
      Group &g = groups_[i];
      work_ += g.batch * g.n * g.info->contractions * (g.m * (g.k + 32) + (g.batch == 1 ? 2 * g.k : 0));
      if (g.by_rows) continue;
      total_ = g.m;
      g.all_panels = g.info->whole_rows && g.m >= threads_ * kOwnTasks * own_rows(g) &&
                     g.panels * panel_bytes(g.info->right_type, g.k) * g.info->contractions <= (amx(g) ? kAmxBudget : kPanelBudget);
      for (int c = 0; c < g.info->contractions; ++c) g.all_panels = g.all_panels && g.right[c].packed != nullptr;
      all_panels += g.panels;
      panel_work += g.n * g.info->contractions * (g.m * (g.k + 32) + 16 * g.k);
      if (g.info->whole_rows && !g.all_panels) {
        whole_rows_ = true;
        rows_bytes += g.info->contractions * g.panels * g.width * g.item;
      }
      for (int c = 0; c < g.info->contractions; ++c)
        if (!g.left[c].direct) left_bytes += share_left(g, c);
    }
    if (total_ > 0) {
      super_ = total_;
      if (rows_bytes > 0) super_ = std::min(super_, std::max<int64_t>(96, kRowsBudget / rows_bytes));
      if (left_bytes > 0) super_ = std::min(super_, std::max<int64_t>(96, kLeftBudget / left_bytes));
      if (super_ < total_) super_ = round_up((total_ + (total_ + super_ - 1) / super_ - 1) / ((total_ + super_ - 1) / super_), kTileRows);
      shared_rows_bytes_ = super_ * rows_bytes;
      int64_t at = 0;
      for (int i = 0; i < left_count_; ++i) {
        lefts_[i].at = at;
        at += round_up(super_ * lefts_[i].stride * element_bytes(lefts_[i].as), 64);
      }
      shared_left_bytes_ = at;
    }
    int64_t shared_at = 0;
    for (int i = 0; i < program_.count; ++i) {
      Group &g = groups_[i];
      if (g.by_rows) continue;
      g.shared_at = shared_at;
      if (g.info->whole_rows && !g.all_panels) shared_at += g.info->contractions * g.panels * g.width * g.item * super_;
      spread(g, all_panels);
      panel_tasks_ += g.tasks;
    }
    for (int i = 0; i < program_.count; ++i) {
      Group &g = groups_[i];
      if (g.info->totals == 0) continue;
      const bool finished = g.info->whole_rows && !g.all_panels;
      const int64_t ranges = g.rows_each > 0 ? (super_ + g.rows_each - 1) / g.rows_each : 0;
      g.slots = std::max<int64_t>(1, finished ? (super_ + finished_rows() - 1) / finished_rows() : ranges * slots_of(g.rows_each));
      g.totals_at = totals_bytes_;
      totals_bytes_ += g.slots * g.info->totals * totals_stride(g);
    }
    if (panel_tasks_ > 0) {  // a handful of microseconds for each visit to the counter
      const int64_t each = std::max<int64_t>(1, panel_work / std::max<int64_t>(1, panel_tasks_ * ((total_ + super_ - 1) / super_)));
      grain_ = std::max<int64_t>(1, std::min<int64_t>(300000 / each, panel_tasks_ / (threads_ * 6)));
    }
  }

  // --- sums over the rows -----------------------------------------------------------------------------------------------
  // Each task has partial sums of its own, so that they are added up in the same order whoever does the tasks.

  static int64_t slots_of(int64_t rows) { return (rows + kTotalRows - 1) / kTotalRows; }
  static int64_t totals_stride(const Group &g) { return g.panels * g.width * g.item; }
  int64_t finished_rows() const { return std::max<int64_t>(1, std::min<int64_t>(kFinishedRows, super_ / (threads_ * 4))); }
  char *totals(const Group &g, int64_t slot) const {
    return g.info->totals > 0 ? totals_ + g.totals_at + slot * g.info->totals * totals_stride(g) : nullptr;
  }

  void add_totals(const Group &g) {
    void *sums[kMaxTotals];
    auto *exact = static_cast<double *>(scratch(kTile, g.n * static_cast<int64_t>(sizeof(double))));
    for (int i = 0; i < g.info->totals; ++i) {
      sums[i] = totals(g, 0) + i * totals_stride(g);
      if (g.item == 8) add_slots<double>(g, i, exact, static_cast<double *>(sums[i]));
      else add_slots<float>(g, i, exact, static_cast<float *>(sums[i]));
    }
    g.info->finish(tensors_, g.n, sums);
  }

  template <class T>
  void add_slots(const Group &g, int i, double *exact, T *to) const {
    std::fill(exact, exact + g.n, 0.0);
    for (int64_t slot = 0; slot < g.slots; ++slot) {
      const T *part = reinterpret_cast<const T *>(totals(g, slot) + i * totals_stride(g));
      for (int64_t c = 0; c < g.n; ++c) exact[c] += part[c];
    }
    for (int64_t c = 0; c < g.n; ++c) to[c] = static_cast<T>(exact[c]);
  }

  // A shared copy of a left operand, one for all contractions that read the same. Returns the new bytes per row.
  int64_t share_left(Group &g, int c) {
    const View &v = g.left[c].view;
    for (int i = 0; i < left_count_; ++i) {
      const View &have = lefts_[i].view;
      if (have.data == v.data && lefts_[i].as == g.kernels.left && have.k == v.k && have.stride_k == v.stride_k && have.type == v.type &&
          have.rows.count == v.rows.count && std::equal(v.rows.stride, v.rows.stride + v.rows.count, have.rows.stride)) {
        g.left[c].shared = i;
        return 0;
      }
    }
    const int64_t stride = padded_stride(v.k, g.kernels.left);
    lefts_[left_count_] = SharedLeft{v, g.kernels.left, v.k, stride, 0};
    g.left[c].shared = left_count_++;
    return stride * element_bytes(g.kernels.left);
  }

  // Whether weights should be multiplied where they lie, as the left operand of the transposed product: then only the rows and the
  // results are turned. Columns of the last vector that no row fills are multiplied all the same.
  static bool turn_pays(const Group &g) {
    if (is_coded(g)) return false;
    if (kVectorBytes != 64 || g.kernels.left != Element::f32 || g.info->right_type != Element::f32) return false;
    if (g.m < kTurnFrom || g.m * g.k * 4 > kTurnBytes || !g.one_left || !g.left[0].direct) return false;
    for (int c = 0; c < g.info->contractions; ++c)
      if (g.right[c].packed != nullptr || g.right[c].view.stride_k != 1) return false;
    const int64_t idle = round_up(g.m, kTransposed) - g.m;
    const int64_t instead = form(g, g.right[0], g.m, 0) == Form::dot ? kDotDepth * g.m * g.n : kPackingRows * g.n * g.k;
    return idle * g.n * g.k + kPackingRows * g.m * (g.n + g.k) < instead;
  }

  // Row strides of whole cache lines, but not of whole pages: those fall into the same few sets of L1.
  static int64_t padded_stride(int64_t k, Element type) {
    const int64_t bytes = round_up(std::max<int64_t>(k, 1) * element_bytes(type), 64);
    return (bytes % 1024 == 0 ? bytes + 64 : bytes) / element_bytes(type);
  }

  // How many rows at a time pass all panels, where that reads less from beyond L2 than all rows passing panel by panel; else 0.
  // Measured with AMX's 2 MB of L2 only.
  int64_t rows_to_keep(const Group &g, int64_t rows) const {
    if (!kAmx || g.panels == 1 || rows < threads_ * kOwnTasks * own_rows(g)) return 0;
    const int64_t row_bytes = std::max<int64_t>(1, g.k * element_bytes(g.kernels.left)), left = rows * row_bytes;
    const int64_t right = g.panels * panel_bytes(g.info->right_type, g.k) * g.info->contractions;
    if (right <= kAmxBudget) return own_rows(g);
    const int64_t each = std::max(own_rows(g), kAmxBudget / 2 / row_bytes);
    return left > kAmxBudget / 2 && (rows + each - 1) / each * right < g.panels * left ? each : 0;
  }

  // Cuts a panel group into tasks.
  void spread(Group &g, int64_t all_panels) {
    const int64_t rows = super_;
    if (g.all_panels) {
      const int64_t count = round_up((rows + own_rows(g) - 1) / own_rows(g), threads_);
      g.rows_each = amx(g) ? round_up((rows + count - 1) / count, kAmxRows) : (rows + count - 1) / count;
      g.tasks = (rows + g.rows_each - 1) / g.rows_each;
      return;
    }
    if (g.panels == 0) return;
    const int64_t slabs = (rows + g.width - 1) / g.width;  // panels of rows
    if (rows == total_ && turn_pays(g) && (threads_ == 1 || g.panels * slabs >= 2 * threads_)) {
      g.turned = g.rows_outside = true;  // a thread turns few rows, and reads all weights
      g.rows_each = round_up((rows + slabs - 1) / slabs, kTransposed);
      g.tasks = g.panels * slabs;
      return;
    }
    bool packs = is_coded(g);
    for (int c = 0; c < g.info->contractions; ++c) packs = packs || form(g, g.right[c], rows, 0) == Form::pack;
    const auto pieces = [&](int64_t count) { return round_up((rows + count - 1) / count, g.block); };
    // One thread that keeps all rows in L2 lets them pass panel by panel.
    const bool stays = threads_ == 1 && (!amx(g) || rows * g.k * element_bytes(g.kernels.left) <= kAmxBudget);
    if (const int64_t each = packs || stays ? 0 : rows_to_keep(g, rows); each > 0) {
      g.rows_outside = true;
      g.rows_each = pieces(round_up((rows + each - 1) / each, threads_));
    } else if (threads_ == 1) {
      g.rows_each = rows;
    } else {  // a thread that takes over a panel packs it again: not for less than 48 rows
      const int64_t wanted = (8 * threads_ + all_panels - 1) / std::max<int64_t>(1, all_panels);
      g.rows_each = pieces(std::max<int64_t>(1, std::min<int64_t>(wanted, rows / (packs ? 48 : 24))));
      if (!packs) g.rows_each = std::min<int64_t>(g.rows_each, 64 * g.block);
    }
    g.rows_each = std::max<int64_t>(g.rows_each, 1);
    g.tasks = g.panels * ((rows + g.rows_each - 1) / g.rows_each);
  }

  // --- what each thread does ---------------------------------------------------------------------------------------------

  // Calls visit(next, start, stop) for each piece of the tasks, the thread's own first: tickets of `next` count from start.
  template <class Visit>
  void pieces(int64_t phase, int64_t count, Visit visit) {
    const int own = thread_number();
    for (int i = 0; i < threads_; ++i) {
      const int piece = (own + i) % threads_;
      visit(counters_[phase * threads_ + piece].next, count * piece / threads_, count * (piece + 1) / threads_);
    }
  }

  template <class Body>
  void take(int64_t phase, int64_t count, int64_t grain, Body body) {
    if (threads_ == 1) {
      for (int64_t t = 0; t < count; ++t) body(t);
      return;
    }
    pieces(phase, count, [&](std::atomic<int64_t> &next, int64_t start, int64_t stop) {
      for (int64_t begin; (begin = start + next.fetch_add(grain, std::memory_order_relaxed)) < stop;)
        for (int64_t t = begin; t < std::min(begin + grain, stop); ++t) body(t);
    });
  }

  // The same, and tells the body which task it will get next (-1: none): the ticket is drawn one visit early.
  template <class Body>
  void take_ahead(int64_t phase, int64_t count, int64_t grain, Body body) {
    if (threads_ == 1) {
      for (int64_t t = 0; t < count; ++t) body(t, t + 1 < count ? t + 1 : -1);
      return;
    }
    pieces(phase, count, [&](std::atomic<int64_t> &next, int64_t start, int64_t stop) {
      int64_t begin = start + next.fetch_add(grain, std::memory_order_relaxed);
      while (begin < stop) {
        const int64_t after = start + next.fetch_add(grain, std::memory_order_relaxed), end = std::min(begin + grain, stop);
        for (int64_t t = begin; t < end; ++t) body(t, t + 1 < end ? t + 1 : after < stop ? after : -1);
        begin = after;
      }
    });
  }

  static void barrier(bool team) {
    if (team) {
#pragma omp barrier
    }
  }

  // What a thread carries from one task to the next: the block whose epilogue is yet to be done.
  struct Worker {
    Beside pending;
    int turn = 0;  // which of two accumulator tiles comes next
    const char *paired = nullptr;  // the rows whose pairs stand in kLeftPairs, and how many
    int64_t paired_rows = 0, paired_stride = 0, paired_k = 0;
    const char *turned = nullptr;  // the rows that stand in kLeftPanel, and how many
    int64_t turned_rows = 0, turned_stride = 0, turned_k = 0;
    const char *arranged = nullptr;  // the rows that stand in kLeftArranged, and how many
    int64_t arranged_rows = 0, arranged_stride = 0, arranged_k = 0;
    const Group *held = nullptr;  // whose panel, packed from natural weights, stands in kPanel, and which
    int64_t held_panel = 0, held_item = 0;
    int64_t slot = 0;  // the task's first partial sums over rows

    void finish() { pending.finish(pending.rows); }
  };

  void work(bool team) {
    Worker worker;
    int64_t phase = 0;
    if (pack_tasks_ > 0) {
      take(last_phase_, pack_tasks_, 1, [&](int64_t t) { pack_task(t); });
      barrier(team);
    }
    for (int64_t first = 0; first < total_; first += super_, phase += 3) {
      const int64_t rows = std::min(super_, total_ - first);
      worker.paired = worker.arranged = nullptr;  // shared copies of left operands change
      if (first > 0 && (left_count_ > 0 || whole_rows_)) barrier(team);  // the shared buffers are in use until here
      if (left_count_ > 0) {
        constexpr int64_t each = 32;  // whole squares of a transposition
        const int64_t pieces = (rows + each - 1) / each;
        take(phase, left_count_ * pieces, 1, [&](int64_t t) {
          const int64_t begin = t % pieces * each;
          fill_left(lefts_[t / pieces], first, begin, std::min(rows, begin + each));
        });
        barrier(team);
      }
      take_ahead(phase + 1, panel_tasks_, grain_, [&](int64_t t, int64_t following) { panel_task(worker, t, following, first, rows); });
      worker.finish();
      if (whole_rows_) {
        barrier(team);
        const int64_t each = finished_rows();
        take(phase + 2, (rows + each - 1) / each, 1,
             [&](int64_t t) { finish_rows(first, t * each, std::min(rows, (t + 1) * each), t); });
      }
    }
    for (int g = 0; g < program_.count;) {
      int end = g + 1;
      while (end < program_.count && groups_[end].chained) ++end;
      if (groups_[g].by_rows) chain(worker, g, end, phase + g);
      g = end;
    }
#if defined(POSTLUDE_AMX)
    tile_shapes().release();
#endif
  }

  void fill_left(const SharedLeft &shared, int64_t first, int64_t begin, int64_t end) {
    copy_left(shared.view, 0, first + begin, end - begin, shared.as,
              shared_left_ + shared.at + begin * shared.stride * element_bytes(shared.as), shared.stride);
  }

  static void copy_left(const View &v, int64_t item, int64_t row, int64_t rows, Element as, char *to, int64_t stride) {
    if (v.rows.uniform()) {
      copy_rows(as, to, stride, v.type, v.at(item, row), v.rows.step(), v.stride_k, rows, v.k);
    } else {
      for (int64_t r = 0; r < rows; ++r)
        copy_rows(as, to + r * stride * element_bytes(as), stride, v.type, v.at(item, row + r), 0, v.stride_k, 1, v.k);
    }
  }

  // Where the kernels find one panel of a right operand.
  struct Panel {
    MicroKernel kernel;
    const char *data;
    int64_t ldb;      // elements
    int64_t per_k;    // bytes from one k to the next, over two k for bfloat16 pairs
    int64_t per;      // how many k these bytes are for
    int64_t near;     // bytes ahead to prefetch where rows make one block only; 0: don't
    int64_t step, second;  // of that prefetch
  };

  // `held`: the room has it already, if it must be packed at all.
  Panel panel(const Group &g, int c, int64_t p, int64_t item, int64_t rows, char *room, bool held = false) const {
    if (is_coded(g)) return decoded_panel(g, c, p, rows, room, held);
    const Right &r = g.right[c];
    const Element e = g.info->right_type;
    const View &v = r.view;
    const int64_t bytes = element_bytes(e), per = e == Element::bf16 ? 2 : 1;
    switch (form(g, r, rows, p)) {
      case Form::packed: return {g.kernels.panel, r.packed + p * panel_bytes(e, g.k), 0, kPanelBytes, per, kNear, kPanelBytes, 128};
      case Form::dot: {
        const int64_t row = v.rows.step() * bytes;
        return {g.kernels.dot, v.at(item, p * g.width), v.rows.step(), bytes, 1, 4 * row, 0, 2 * row};
      }
      case Form::in_place: {
        const int64_t row = v.stride_k * bytes;
        return {g.kernels.in_place, v.at(item, p * g.width), v.stride_k, row, 1, kNearRows * row, per * row, per == 2 ? row : 128};
      }
      case Form::pack: case Form::codes: break;
    }
    if (!held) pack_right(g, c, p, item, room);
    return {g.kernels.panel, room, 0, kPanelBytes, per, 0, 0, 0};
  }


  // Weight rows of a panel as numbers, in rows or packed.
  Panel decoded_panel(const Group &g, int c, int64_t p, int64_t rows, char *room, bool held) const {
    const Element e = g.info->right_type;
    const int64_t bytes = element_bytes(e), stride = padded_stride(g.k + 64, e), columns = std::min(g.width, g.n - p * g.width);
    auto *numbers = static_cast<char *>(scratch(kDecoded + c, g.width * stride * bytes));
    if constexpr (kCodes != Codes::none) if (!held) {
      auto *scales = static_cast<float *>(scratch(kScales, 2 * scales_room(g.k, g.info->block) * 4));
      for (int64_t n = 0; n < columns; ++n) {
        const CodedRows row = g.right[c].coded.from(p * g.width + n);
        if (e == Element::bf16)
          decode_row<kCodes>(reinterpret_cast<bfloat16 *>(numbers) + n * stride, row, g.k, scales);
        else
          decode_row<kCodes>(reinterpret_cast<float *>(numbers) + n * stride, row, g.k, scales);
      }
    }
    if (form(g, g.right[c], rows, p) == Form::dot) return {g.kernels.dot, numbers, stride, bytes, 1, 0, 0, 0};
    if (!held) pack_panel_fast(e, room, numbers, 1, stride, g.k, columns);
    return {g.kernels.panel, room, 0, kPanelBytes, e == Element::bf16 ? 2 : 1, 0, 0, 0};
  }

  // How another panel will be read, in whatever form.
  static Ahead next_walk(const Group &g, int c, int64_t p, int64_t pack_rows) {
    const Right &r = g.right[c];
    const Element e = g.info->right_type;
    if (is_coded(g)) return {reinterpret_cast<const char *>(r.coded.from(p * g.width).codes), kPanelBytes, 128, false};
    if (r.packed != nullptr) return {r.packed + p * panel_bytes(e, g.k), kPanelBytes, 128, false};
    const View &v = r.view;
    const char *from = v.at(0, p * g.width);
    const int64_t bytes = element_bytes(e), per = e == Element::bf16 ? 2 : 1;
    if (v.rows.step() == 1) return {from, v.stride_k * bytes * per, per == 2 ? v.stride_k * bytes : 128, false};
    if (form(g, r, pack_rows, p) == Form::dot) return {from, 0, 2 * v.rows.step() * bytes, false};
    return {from, kPanelBytes, 128, false};  // rows of k one after the other: as good as one stream
  }

  static void pack_right(const Group &g, int c, int64_t p, int64_t item, char *room) {
    const View &v = g.right[c].view;
    const int64_t columns = std::min(g.width, g.n - p * g.width);
    pack_panel_fast(g.info->right_type, room, v.at(item, p * g.width), v.stride_k, v.rows.step(), g.k, columns);
  }

  struct Tile {
    int group;
    int64_t panel, begin, end;  // rows
  };

  Tile tile_of(int64_t task, int64_t rows) const {
    Tile tile{};
    for (;; ++tile.group) {
      const Group &g = groups_[tile.group];
      if (g.by_rows) continue;
      if (task < g.tasks) break;
      task -= g.tasks;
    }
    const Group &g = groups_[tile.group];
    const int64_t ranges = (super_ + g.rows_each - 1) / g.rows_each;
    tile.panel = g.rows_outside ? task % g.panels : task / ranges;
    tile.begin = (g.rows_outside ? task / g.panels : task % ranges) * g.rows_each;
    tile.end = std::min(rows, tile.begin + g.rows_each);
    return tile;
  }

  void panel_task(Worker &worker, int64_t task, int64_t following, int64_t first, int64_t rows) {
    const auto [index, p, begin, end] = tile_of(task, rows);
    if (begin >= end) return;
    const Group &g = groups_[index];
    worker.slot = begin / g.rows_each * slots_of(g.rows_each);
    if (g.all_panels) return whole_rows_task(worker, g, first + begin, end - begin, left_of(g, first, begin));
    int64_t next_panel = -1;
    if (following >= 0 && g.prefetch) {
      const Tile next = tile_of(following, rows);
      if (next.group == index && next.panel != p) next_panel = next.panel;
    }
    const int64_t full = g.panels * g.width;
    Into into{};
    if (g.info->whole_rows) into = {shared_rows_ + g.shared_at + begin * full * g.item, super_ * full * g.item};
    if (g.turned) return turned_panel(worker, g, p, begin, end - begin, into);
    one_panel(worker, g, 0, p, next_panel, left_of(g, first, begin).rows, first + begin, end - begin, super_, into);
  }

  struct LeftRows {
    Rows rows[kMaxContractions];
  };

  LeftRows left_of(const Group &g, int64_t first, int64_t begin) const {
    LeftRows left;
    for (int c = 0; c < g.info->contractions; ++c) {
      const Left &l = g.left[c];
      if (l.direct) {
        left.rows[c] = {l.view.at(0, first + begin), l.view.rows.step()};
      } else {
        const SharedLeft &s = lefts_[l.shared];
        left.rows[c] = {shared_left_ + s.at + begin * s.stride * element_bytes(s.as), s.stride};
      }
    }
    return left;
  }

  // All panels of a few rows, which stay in L2 until their epilogue.
  void whole_rows_task(Worker &worker, const Group &g, int64_t row, int64_t rows, const LeftRows &left) {
    const int64_t full = g.panels * g.width, each = rows * full * g.item;
    char *sums = static_cast<char *>(scratch(kRows, g.info->contractions * each));
    for (int64_t p = 0; p < g.panels; ++p) one_panel(worker, g, 0, p, (p + 1) % g.panels, left.rows, row, rows, super_, {sums, each});
    void *acc[kMaxContractions];
    const int64_t most = g.info->totals > 0 ? kTotalRows : rows;
    for (int64_t at = 0; at < rows; at += most) {
      for (int c = 0; c < g.info->contractions; ++c) acc[c] = sums + c * each + at * full * g.item;
      g.info->epilogue(tensors_, row + at, std::min(most, rows - at), 0, g.n, acc, full, totals(g, worker.slot + at / kTotalRows),
                       totals_stride(g));
    }
  }

  // k in the fewest nearly equal parts of at most `most`, each a multiple of kChain.
  static int64_t even_parts(int64_t k, int64_t most) {
    const int64_t parts = (k + most - 1) / std::max<int64_t>(most, 1);
    return parts <= 1 ? k : round_up((k + parts - 1) / parts, kChain);
  }

  // Where accumulators are kept: whole rows of the first contraction, `each` bytes for those of one. Null: the epilogue follows.
  struct Into {
    char *data;
    int64_t each;
  };

  // Rows times one panel of each contraction.
  void one_panel(Worker &worker, const Group &g, int64_t item, int64_t p, int64_t next_panel, const Rows *left, int64_t row,
                 int64_t rows, int64_t pack_rows, Into into) {
    if (is_coded(g) && form(g, g.right[0], rows, p) == Form::codes) return coded_panel(worker, g, p, left, row, rows, into);
    const int contractions = g.info->contractions;
    const Element e = g.info->right_type;
    const int64_t room_bytes = round_up(panel_bytes(e, g.k), 64), left_bytes = element_bytes(g.kernels.left);
    const int columns = static_cast<int>(std::min(g.width, g.n - p * g.width));
    char *room = static_cast<char *>(scratch(kPanel, room_bytes * contractions));
    Panel b[kMaxContractions];
    // Tasks of a panel's rows follow each other: only a thread that takes over another's packs it again.
    const bool held = worker.held == &g && worker.held_panel == p && worker.held_item == item;
    for (int c = 0; c < contractions; ++c) b[c] = panel(g, c, p, item, pack_rows, room + c * room_bytes, held);
    worker.held = &g, worker.held_panel = p, worker.held_item = item;

    const Blocks blocks(rows, g.block);
    int64_t depth = g.k;  // k at a time, so that a panel stays in L2 while the rows pass
    const int64_t k_bytes = std::max<int64_t>(1, panel_bytes(e, kAmxK) / kAmxK) * contractions;
    if (blocks.count > 1 && g.k * k_bytes > kPanelBudget) depth = even_parts(g.k, kPanelBudget / k_bytes);
    bool in_dots = false;
    for (int c = 0; c < contractions; ++c) in_dots = in_dots || b[c].kernel == g.kernels.dot;
    if (amx(g) && (in_dots || depth == g.k)) return amx_panel(worker, g, p, next_panel, left, b, row, rows, into);
    if (rows > 1)
      for (int c = 0; c < contractions; ++c)
        if (b[c].kernel == g.kernels.dot) depth = std::min(depth, even_parts(g.k, kDotBytes / left_bytes));
    const bool split = depth < g.k;

    const bool keep = into.data != nullptr;
    const int64_t ldc = keep ? g.panels * g.width : g.width;
    char *c_base[kMaxContractions];
    if (keep) {
      for (int c = 0; c < contractions; ++c) c_base[c] = into.data + c * into.each + p * g.width * g.item;
    } else {
      const int64_t bytes = (split ? rows : g.block) * g.width * g.item;
      char *tile = static_cast<char *>(scratch(kTile, bytes * contractions));
      for (int c = 0; c < contractions; ++c) c_base[c] = tile + c * bytes;
    }
    int64_t k0 = 0;
    do {
      const int64_t k1 = std::min(g.k, k0 + depth);
      int64_t at = 0;
      for (int64_t i = 0; i < blocks.count; ++i) {
        const int size = blocks.size(i);
        void *acc[kMaxContractions];
        for (int c = 0; c < contractions; ++c) {
          acc[c] = c_base[c] + (keep || split ? at * ldc * g.item : 0);
          const char *from = b[c].data + k0 / b[c].per * b[c].per_k;
          if (amx(g)) {
            const char *a = left[c].data + (at * left[c].stride + k0) * left_bytes;
            g.kernels.amx.panel(k1 - k0, a, left[c].stride, from, acc[c], ldc, size, columns, k0 > 0, nullptr);
            continue;
          }
          Ahead ahead{};
          if (g.prefetch) {
            const int64_t left_to_do = blocks.count - i;
            if (blocks.count == 1) {
              ahead = {from + b[c].near, b[c].step, b[c].second, true};
              if (b[c].near == 0) ahead.from = nullptr;
            } else if (next_panel >= 0 && left_to_do <= 2 && k1 == g.k) {
              ahead = next_walk(g, c, next_panel, pack_rows);  // half of it with each of the last two blocks
              if (left_to_do == 1) ahead.from += ahead.second;
            }
          }
          b[c].kernel(k1 - k0, left[c].data + (at * left[c].stride + k0) * left_bytes, left[c].stride, from, b[c].ldb, acc[c], ldc, size,
                      columns, k0 > 0, ahead.from == nullptr ? nullptr : &ahead);
        }
        if (!keep && k1 == g.k)
          g.info->epilogue(tensors_, row + at, size, p * g.width, columns, acc, ldc, totals(g, worker.slot + at / kTotalRows),
                           totals_stride(g));
        at += size;
      }
      k0 = k1;
    } while (k0 < g.k);
  }

  // A few rows times one panel of codes.
  void coded_panel(Worker &worker, const Group &g, int64_t p, const Rows *left, int64_t row, int64_t rows, Into into) {
    const bool keep = into.data != nullptr;
    const int64_t ldc = keep ? g.panels * g.width : g.width, ldx = padded_numbers(kCodes, g.k);
    const int columns = static_cast<int>(std::min(g.width, g.n - p * g.width)), contractions = g.info->contractions;
    char *tile = static_cast<char *>(scratch(kTile, contractions * rows * g.width * g.item));
    auto *scales = static_cast<float *>(scratch(kScales, 2 * scales_room(g.k, g.info->block) * 4));
    void *acc[kMaxContractions];
    for (int c = 0; c < contractions; ++c) {
      acc[c] = keep ? into.data + c * into.each + p * g.width * g.item : tile + c * rows * g.width * g.item;
      if constexpr (kCodes == Codes::none) continue;
      else coded_kernel<kCodes>({g.k, arranged_rows(worker, g, left[c], rows, ldx), ldx, g.right[c].coded.from(p * g.width), static_cast<float *>(acc[c]), ldc, scales},
                           static_cast<int>(rows), columns);
    }
    if (!keep) g.info->epilogue(tensors_, row, rows, p * g.width, columns, acc, ldc, nullptr, 0);
  }

  // Rows in the order of decoded codes. Kept until other rows are asked for.
  static const float *arranged_rows(Worker &worker, const Group &g, const Rows &left, int64_t rows, int64_t ldx) {
    auto *room = static_cast<float *>(scratch(kLeftArranged, rows * ldx * 4));
    if (worker.arranged == left.data && worker.arranged_rows == rows && worker.arranged_stride == left.stride &&
        worker.arranged_k == g.k)
      return room;
    if constexpr (kCodes != Codes::none) for (int64_t r = 0; r < rows; ++r) {
      if (g.kernels.left == Element::bf16)
        arrange_row<kCodes>(room + r * ldx, reinterpret_cast<const bfloat16 *>(left.data) + r * left.stride, g.k);
      else
        arrange_row<kCodes>(room + r * ldx, reinterpret_cast<const float *>(left.data) + r * left.stride, g.k);
    }
    worker.arranged = left.data, worker.arranged_rows = rows, worker.arranged_stride = left.stride, worker.arranged_k = g.k;
    return room;
  }

  // Weight rows of one panel of columns, where they lie, times rows in panels: the product comes out transposed, and is turned
  // on its way to the epilogue.
  void turned_panel(Worker &worker, const Group &g, int64_t p, int64_t row, int64_t rows, Into into) {
    const bool keep = into.data != nullptr;
    const int64_t tile = g.width * kPanelBytes, stride = keep ? g.panels * kPanelBytes : kPanelBytes;
    const int columns = static_cast<int>(std::min(g.width, g.n - p * g.width)), contractions = g.info->contractions;
    char *room = static_cast<char *>(scratch(kTile, (contractions + 1) * tile)), *sums = room + contractions * tile;
    const char *panel = turned_rows(worker, g, row, rows);
    const int64_t depth = even_parts(g.k, kPanelBudget / kPanelBytes);
    const Blocks blocks(columns, kTileRows);
    void *acc[kMaxContractions];
    for (int c = 0; c < contractions; ++c) {
      const int64_t ldw = g.right[c].view.rows.step();
      const char *weights = g.right[c].view.at(0, p * g.width);
      int64_t k0 = 0;
      do {
        const int64_t k1 = std::min(g.k, k0 + depth);
        int64_t at = 0;
        for (int64_t i = 0; i < blocks.count; at += blocks.size(i++))
          g.kernels.panel(k1 - k0, weights + (at * ldw + k0) * 4, ldw, panel + k0 * kPanelBytes, 0, sums + at * kPanelBytes, g.width,
                          blocks.size(i), static_cast<int>(rows), k0 > 0, nullptr);
        k0 = k1;
      } while (k0 < g.k);
      char *to = keep ? into.data + c * into.each + p * kPanelBytes : room + c * tile;
      acc[c] = to;
      for (int r = 0; r < rows; r += kTransposed)
        for (int n = 0; n < columns; n += kTransposed)
          transpose_square(to + r * stride + n * 4, stride, sums + n * kPanelBytes + r * 4, kPanelBytes,
                           std::min(kTransposed, columns - n), std::min(kTransposed, static_cast<int>(rows) - r));
    }
    if (!keep)
      g.info->epilogue(tensors_, row, rows, p * g.width, columns, acc, g.width, totals(g, worker.slot), totals_stride(g));
  }

  // Rows as a panel. Kept until other rows are asked for.
  static const char *turned_rows(Worker &worker, const Group &g, int64_t row, int64_t rows) {
    const View &v = g.left[0].view;
    const char *from = v.at(0, row);
    const int64_t stride = v.rows.step();
    char *panel = static_cast<char *>(scratch(kLeftPanel, panel_bytes(Element::f32, g.k)));
    if (worker.turned == from && worker.turned_rows == rows && worker.turned_stride == stride && worker.turned_k == g.k) return panel;
    pack_panel_fast(Element::f32, panel, from, 1, stride, g.k, rows);
    worker.turned = from, worker.turned_rows = rows, worker.turned_stride = stride, worker.turned_k = g.k;
    return panel;
  }

  // One panel in blocks of AMX: while one is multiplied, the epilogue of the block before is done beside it.
  void amx_panel(Worker &worker, const Group &g, int64_t p, int64_t next_panel, const Rows *left, const Panel *b, int64_t row,
                 int64_t rows, Into into) {
    constexpr int64_t tile = kAmxRows * kPanelBytes;
    const bool keep = into.data != nullptr;
    const int64_t stride = keep ? g.panels * kPanelBytes : kPanelBytes;
    const int contractions = g.info->contractions, columns = static_cast<int>(std::min(g.width, g.n - p * g.width));
    char *room = static_cast<char *>(scratch(kTwoTiles, 2 * kMaxContractions * tile));
    Beside &beside = worker.pending;
    const Blocks blocks(rows, kAmxRows);
    int64_t steps = 0;
    for (int64_t i = 0; i < blocks.count; ++i) steps += amx_steps(g.k, blocks.size(i), columns) * contractions;
    beside.ahead_bytes = 0;
    if (next_panel >= 0 && g.prefetch && steps > 0) {
      const View &v = g.right[0].view;
      const int64_t each = panel_bytes(g.info->right_type, g.k), next_columns = std::min(g.width, g.n - next_panel * g.width);
      const bool packed = g.right[0].packed != nullptr, in_order = v.stride_k == 1 && v.rows.step() == g.k;
      beside.ahead = packed ? g.right[0].packed + next_panel * each : v.at(0, next_panel * g.width);
      beside.ahead_end = beside.ahead + (packed ? each : in_order ? next_columns * g.k * 2 : 0);
      if (is_coded(g)) {
        const CodedRows next = g.right[0].coded.from(next_panel * g.width);
        beside.ahead = reinterpret_cast<const char *>(next.codes), beside.ahead_end = beside.ahead + next_columns * next.stride;
      }
      beside.ahead_bytes = (beside.ahead_end - beside.ahead + steps - 1) / steps;
    }
    const int64_t block_bytes = pairs_depth(g.k) * kAmxRows * 2;
    const char *pairs[kMaxContractions] = {};
    for (int c = 0; c < contractions; ++c)
      if (b[c].kernel == g.kernels.dot) pairs[c] = pairs_of(worker, g, left[c], blocks);  // the same for all
    int64_t at = 0;
    for (int64_t i = 0; i < blocks.count; ++i) {
      const int size = blocks.size(i);
      char *to = keep ? into.data + at * stride + p * kPanelBytes : room + worker.turn * kMaxContractions * tile;
      const int64_t each = keep ? into.each : tile;
      beside.spread(std::max<int64_t>(1, amx_steps(g.k, size, columns) * contractions));
      for (int c = 0; c < contractions; ++c) {
        const char *a = pairs[c] != nullptr ? pairs[c] + i * block_bytes : left[c].data + at * left[c].stride * 2;
        if (pairs[c] != nullptr)
          g.kernels.amx.weights(g.k, a, b[c].data, b[c].ldb, to + c * each, stride / g.item, size, columns, &beside);
        else
          g.kernels.amx.panel(g.k, a, left[c].stride, b[c].data, to + c * each, stride / g.item, size, columns, false, &beside);
      }
      at += size;
      worker.finish();
      if (keep) continue;
      beside.epilogue = g.info->epilogue, beside.tensors = tensors_, beside.row = row + at - size, beside.rows = size;
      beside.c0 = p * g.width, beside.columns = columns, beside.stride = kPanelBytes, beside.contractions = contractions;
      beside.next = totals(g, worker.slot + (at - size) / kTotalRows), beside.next_stride = totals_stride(g);
      for (int c = 0; c < contractions; ++c) beside.acc[c] = to + c * tile;
      worker.turn ^= 1;
    }
  }

  // The rows of a task in pairs of k, block by block. Kept until other rows are asked for: all panels are multiplied with them.
  static const char *pairs_of(Worker &worker, const Group &g, const Rows &left, const Blocks &blocks) {
    const int64_t block_bytes = pairs_depth(g.k) * kAmxRows * 2;
    char *room = static_cast<char *>(scratch(kLeftPairs, blocks.count * block_bytes));
    if (worker.paired == left.data && worker.paired_rows == blocks.rows && worker.paired_stride == left.stride &&
        worker.paired_k == g.k)
      return room;
    for (int64_t i = 0; i < blocks.count; ++i)
      g.kernels.amx.pack_rows(room + i * block_bytes, left.data + i * kAmxRows * left.stride * 2, left.stride * 2, g.k, blocks.size(i));
    worker.paired = left.data, worker.paired_rows = blocks.rows, worker.paired_stride = left.stride, worker.paired_k = g.k;
    return room;
  }

  // Epilogues of the groups that need whole rows, for rows of the shared buffer.
  void finish_rows(int64_t first, int64_t begin, int64_t end, int64_t slot) {
    for (int i = 0; i < program_.count; ++i) {
      const Group &g = groups_[i];
      if (g.by_rows || !g.info->whole_rows || g.all_panels) continue;
      const int64_t full = g.panels * g.width;
      void *acc[kMaxContractions];
      for (int c = 0; c < g.info->contractions; ++c) acc[c] = shared_rows_ + g.shared_at + (c * super_ + begin) * full * g.item;
      g.info->epilogue(tensors_, first + begin, end - begin, 0, g.n, acc, full, totals(g, slot), totals_stride(g));
    }
  }

  // --- by rows -----------------------------------------------------------------------------------------------------------

  // Groups [g0, g1): one chain, or one batched group.
  void chain(Worker &worker, int g0, int g1, int64_t phase) {
    const Group &head = groups_[g0];
    if (head.m == 0 || head.batch == 0) return;
    int64_t per_row = 0;  // bytes of accumulators
    int64_t products = 0;  // in a row
    for (int i = g0; i < g1; ++i) {
      const Group &g = groups_[i];
      per_row += (g.info->contractions + 1) * g.panels * g.width * g.item;
      products += g.k * g.n * g.info->contractions;
    }
    const bool columns_first = g1 == g0 + 1 && !head.info->whole_rows;  // no rows to keep: panels outside, epilogue on the tile
    int64_t each = head.m;
    if (!columns_first) each = std::max<int64_t>(kTileRows, std::min(each, (256 << 10) / std::max<int64_t>(1, per_row) / kTileRows * kTileRows));
    if (threads_ > 1) {  // enough tasks to keep all threads busy to the end, but not so many that packing dominates
      const int64_t wanted = (4 * threads_ + head.batch - 1) / head.batch;
      const int64_t least = std::max<int64_t>(kTileRows, std::min<int64_t>(48, head.m / threads_));
      each = std::min(each, std::max(least, (head.m + wanted - 1) / wanted));
    }
    each = std::max<int64_t>(1, (head.m + (head.m + each - 1) / each - 1) / ((head.m + each - 1) / each));
    const int64_t ranges = (head.m + each - 1) / each;
    const int64_t tasks = head.batch * ranges;
    const int64_t grain = std::max<int64_t>(1, std::min(300000 / std::max<int64_t>(1, each * products), tasks / (threads_ * 4)));
    int64_t kept[kMaxGroups * kMaxContractions];  // the batch item whose packed form a slot holds
    std::fill(kept, kept + kMaxGroups * kMaxContractions, int64_t{-1});
    take(phase, tasks, grain, [&](int64_t t) {
      const int64_t item = t / ranges, begin = t % ranges * each;
      const int64_t rows = std::min(head.m, begin + each) - begin;
      if (rows > 0) chain_task(worker, g0, g1, item, begin, rows, columns_first, kept);
    });
    worker.finish();
  }

  void chain_task(Worker &worker, int g0, int g1, int64_t item, int64_t begin, int64_t rows, bool columns_first, int64_t *kept) {
    const char *fed = nullptr;
    int64_t fed_stride = 0;
    for (int i = g0; i < g1; ++i) {
      const Group &g = groups_[i];
      const int contractions = g.info->contractions;
      const int64_t left_bytes = element_bytes(g.kernels.left);
      Rows left[kMaxContractions];
      left_rows(g, item, begin, rows, fed, fed_stride, left);
      const int64_t flat = item * g.m + begin;
      if (columns_first) {
        for (int64_t p = 0; p < g.panels; ++p) one_panel(worker, g, item, p, -1, left, flat, rows, rows, {});
        continue;
      }
      const int64_t full = g.panels * g.width;
      char *sums = static_cast<char *>(scratch(kRows, contractions * rows * full * g.item));
      const Blocks blocks(rows, g.block);
      for (int c = 0; c < contractions; ++c) {
        const Element e = g.info->right_type;
        const int64_t each = round_up(panel_bytes(e, g.k), 64);
        const bool keep = each * g.panels <= kKeepPacked;
        const int slot = kPacked + i * kMaxContractions + c;
        char *room = static_cast<char *>(scratch(keep ? slot : kPanel, keep ? each * g.panels : each));
        int64_t &holds = kept[i * kMaxContractions + c];
        const int64_t source = g.right[c].view.batch.total == 1 ? 0 : item;
        char *out = sums + c * rows * full * g.item;
        for (int64_t p = 0; p < g.panels; ++p) {
          const int columns = static_cast<int>(std::min(g.width, g.n - p * g.width));
          char *place = keep ? room + p * each : room;
          Panel b;
          if (keep && holds == source && form(g, g.right[c], g.m, p) == Form::pack)
            b = {g.kernels.panel, place, 0, 0, 1, 0, 0, 0};
          else
            b = panel(g, c, p, source, g.m, place);
          int64_t at = 0;
          for (int64_t r = 0; r < blocks.count; ++r) {
            const int size = blocks.size(r);
            const char *a = left[c].data + at * left[c].stride * left_bytes;
            char *to = out + (at * full + p * g.width) * g.item;
            if (amx(g))
              g.kernels.amx.panel(g.k, a, left[c].stride, b.data, to, full, size, columns, false, nullptr);
            else
              b.kernel(g.k, a, left[c].stride, b.data, b.ldb, to, full, size, columns, false, nullptr);
            at += size;
          }
        }
        holds = keep ? source : -1;
      }
      char *next = nullptr;
      int64_t next_stride = 0;
      if (g.info->feeds_next) {
        const Element e = groups_[i + 1].info->left_type;
        next_stride = (g.n * element_bytes(e) + 127) / 64 * 64;  // the row's vectors, and kRowNote bytes
        next = static_cast<char *>(scratch(i % 2 == 0 ? kNextEven : kNextOdd, rows * next_stride));
        fed = next, fed_stride = next_stride / element_bytes(e);
      } else if (g.chained) {  // what the group before noted at the end of each row
        next = const_cast<char *>(fed), next_stride = fed_stride * element_bytes(g.info->left_type);
      }
      void *acc[kMaxContractions];
      for (int c = 0; c < contractions; ++c) acc[c] = sums + c * rows * full * g.item;
      g.info->epilogue(tensors_, flat, rows, 0, g.n, acc, full, next, next_stride);
    }
  }

  // The left rows of a task, in a form that the kernels read.
  void left_rows(const Group &g, int64_t item, int64_t begin, int64_t rows, const char *fed, int64_t fed_stride, Rows *left) const {
    const Element as = g.kernels.left;
    const int64_t stride = padded_stride(g.k, as);
    if (g.chained) {
      Rows all{fed, fed_stride};
      if (g.info->left_type != as) {
        char *to = static_cast<char *>(scratch(kLeftConverted, rows * stride * element_bytes(as)));
        copy_rows(as, to, stride, g.info->left_type, fed, fed_stride, 1, rows, g.k);
        all = {to, stride};
      }
      for (int c = 0; c < g.info->contractions; ++c) left[c] = all;
      return;
    }
    char *room = nullptr;
    for (int c = 0; c < g.info->contractions; ++c) {
      const Left &l = g.left[c];
      if (l.direct) {
        left[c] = {l.view.at(l.view.batch.total == 1 ? 0 : item, begin), l.view.rows.step()};
        continue;
      }
      if (c > 0 && g.info->left[c].tensor == g.info->left[0].tensor && g.info->left[c].transposed == g.info->left[0].transposed) {
        left[c] = left[0];
        continue;
      }
      const int64_t bytes = rows * stride * element_bytes(as);
      if (room == nullptr) room = static_cast<char *>(scratch(kLeft, bytes * g.info->contractions));
      copy_left(l.view, l.view.batch.total == 1 ? 0 : item, begin, rows, as, room + c * bytes, stride);
      left[c] = {room + c * bytes, stride};
    }
  }
};

}  // namespace postlude

#endif
