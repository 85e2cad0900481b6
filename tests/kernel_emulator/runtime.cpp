// Runs the threads of a GPU kernel as fibres on one CPU thread, a threadgroup at a time, and watches every access.
//
// The kernel is compiled with -fsanitize=thread and linked without its library: the compiler then calls the __tsan_*
// functions below before each load and store, and what they check is up to this file. The first finding ends the run.
#include "runtime.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

extern "C" void emulator_kernel(void** buffers);

namespace emulator {
namespace {

constexpr size_t STACK = 256 << 10;
constexpr unsigned MAX_THREADS = 1024, MAX_REGIONS = 96, MANY = ~0u;

struct Thread;
void describe(const Thread& thread, const char* format, va_list arguments);
void report(const Thread& thread, const char* format, ...);

// ---- fibres ---------------------------------------------------------------------------------------------------------

extern "C" void emulator_switch(void** save, void* load);
#if defined(__x86_64__)
asm(".text\n.globl emulator_switch\nemulator_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr int FRAME_WORDS = 8, RETURN_WORD = 6;  // a function starts 8 bytes off an alignment of 16
#elif defined(__aarch64__)
asm(".text\n.p2align 2\n.globl emulator_switch\nemulator_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
constexpr int FRAME_WORDS = 20, RETURN_WORD = 11;
#else
#error "the emulator knows how to switch fibres on x86-64 and arm64"
#endif

enum State { READY, AT_EXCHANGE, AT_SIMD_BARRIER, AT_BARRIER, FINISHED };

struct Thread {
  Place place;
  State state;
  void* stack_pointer;
  char* stack;
  const char* operation;
  int line, spaces;
};

struct Simd {
  Exchange exchange[2];  // of this operation and the last one: a lane can be one ahead of the others, not two
  unsigned turn, fences[3];
};

Thread threads[MAX_THREADS];
Simd simds[MAX_THREADS / SIMD_WIDTH];
unsigned thread_count, simd_count, group_number, fences[3];
char* stacks;
Thread* running;
void* scheduler;
char finding[1024];
const char* finding_at;  // return address of the access
void** kernel_buffers;

// ---- memory ---------------------------------------------------------------------------------------------------------

// Who touched a byte last, and in which interval between barriers.
struct Touch {
  unsigned group, thread, simd, fence, simd_fence;
};
struct Cell {
  Touch write, read;
};

struct Region {
  const void* key;
  const char* name;
  char* begin;
  size_t size, item;
  Space space;
  bool writable, initialised;
  Cell* cells;  // none for what is only read
};

Region regions[MAX_REGIONS];
unsigned region_count, kernel_regions, last_region;
size_t shared_limit;
char *image_begin, *image_end;

Region* find(const char* address) {
  Region* hit = &regions[last_region];
  if (last_region < region_count && address >= hit->begin && address < hit->begin + hit->size) return hit;
  for (unsigned i = 0; i < region_count; i++)
    if (address >= regions[i].begin && address < regions[i].begin + regions[i].size) {
      last_region = i;
      return &regions[i];
    }
  return nullptr;
}

Region* nearest(const char* address) {
  Region* best = nullptr;
  size_t distance = ~size_t(0);
  for (unsigned i = 0; i < region_count; i++) {
    const char* end = regions[i].begin + regions[i].size;
    size_t away = address < regions[i].begin ? regions[i].begin - address : address - end;
    if (away < distance) distance = away, best = &regions[i];
  }
  return best;
}

void add_region(const void* key, const char* name, void* begin, size_t size, size_t item, Space space, bool writable, bool initialised) {
  Cell* cells = writable ? static_cast<Cell*>(malloc(size * sizeof(Cell) + 1)) : nullptr;
  if (cells) memset(cells, 0xff, size * sizeof(Cell));
  regions[region_count++] = {key, name, static_cast<char*>(begin), size, item, space, writable, initialised, cells};
}

long element(const Region* region, const char* address) {
  long offset = address - region->begin;
  long item = static_cast<long>(region->item);
  return offset >= 0 ? offset / item : -((-offset + item - 1) / item);
}

[[noreturn]] void stop() {
  void* nowhere;
  emulator_switch(&nowhere, scheduler);
  __builtin_unreachable();
}

Touch touch_now(Space space) {
  const Place& place = running->place;
  return {group_number, place.index, place.simd, fences[space], simds[place.simd].fences[space]};
}

// Whether nothing orders an earlier access before this one.
bool unordered(const Touch& earlier, const Touch& now) {
  if (earlier.group == MANY) return false;
  if (earlier.group != now.group) return true;
  if (earlier.thread == now.thread || earlier.fence != now.fence) return false;
  return earlier.simd != now.simd || earlier.simd_fence == now.simd_fence;
}

void report_race(const Region* region, const char* address, const Touch& earlier, const char* what) {
  if (earlier.group == group_number)
    fail("data race on %s[%ld]: %s, thread %u and an earlier access of thread %d with no barrier between them",
         region->name, element(region, address), what, running->place.index, static_cast<int>(earlier.thread));
  fail("data race on %s[%ld]: %s, and threadgroup %u touched it too: threadgroups are not ordered", region->name,
       element(region, address), what, earlier.group);
}

void check_cell(Region* region, const char* address, bool write, bool atomic) {
  Cell& cell = region->cells[address - region->begin];
  const Touch now = touch_now(region->space);
  if (region->space == THREADGROUP) {  // an earlier threadgroup's contents are gone
    if (cell.write.group != now.group) cell.write.group = MANY;
    if (cell.read.group != now.group) cell.read.group = MANY;
  }
  if (!write && !region->initialised && cell.write.group == MANY)
    fail("%s[%ld] is read before anything was written there", region->name, element(region, address));
  if (!atomic && unordered(cell.write, now)) report_race(region, address, cell.write, write ? "a write" : "a read");
  if (write && !atomic && unordered(cell.read, now)) report_race(region, address, cell.read, "a write");
  if (write) cell.write = now;
  if (write || atomic) return;
  const bool same_interval = cell.read.group == now.group && cell.read.fence == now.fence;
  Touch seen = now;
  if (same_interval && cell.read.thread != now.thread) seen.thread = MANY;
  if (same_interval && cell.read.simd != now.simd) seen.simd = MANY;
  cell.read = seen;
}

void check(const volatile void* pointer, size_t size, bool write, bool atomic, bool aligned, const void* from) {
  const char* address = const_cast<const char*>(static_cast<const volatile char*>(pointer));
  if (!running || (address >= running->stack && address + size <= running->stack + STACK)) return;
  finding_at = static_cast<const char*>(from);
  Region* region = find(address);
  if (!region || address + size > region->begin + region->size) {
    if (!region && address >= image_begin && address + size <= image_end) return;
    region = region ? region : nearest(address);
    if (!region) fail("%s of %zu bytes at no buffer at all", write ? "a write" : "a read", size);
    fail("%s of %zu bytes at %s[%ld], which has %zu elements", write ? "a write" : "a read", size, region->name,
         element(region, address), region->size / region->item);
  }
  if (aligned && reinterpret_cast<uintptr_t>(address) % size)
    fail("%s of %zu bytes at %s[%ld] is not aligned", write ? "a write" : "a read", size, region->name,
         element(region, address));
  if (write && !region->writable) fail("a write to %s[%ld], an input", region->name, element(region, address));
  if (!region->cells) return;
  for (size_t i = 0; i < size; i++) check_cell(region, address + i, write, atomic);
}

// ---- findings -------------------------------------------------------------------------------------------------------

void describe(const Thread& thread, const char* format, va_list arguments) {
  const int length = vsnprintf(finding, sizeof(finding), format, arguments);
  if (length < 0 || static_cast<size_t>(length) >= sizeof(finding)) return;
  const Place& place = thread.place;
  snprintf(finding + length, sizeof(finding) - length, " (thread [%u, %u, %u] of threadgroup [%u, %u, %u])",
           place.at[0], place.at[1], place.at[2], place.group[0], place.group[1], place.group[2]);
}

void report(const Thread& thread, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe(thread, format, arguments);
  va_end(arguments);
}

// ---- scheduling -----------------------------------------------------------------------------------------------------

void wait_in(State state, const char* operation, int line, int spaces) {
  running->state = state;
  running->operation = operation;
  running->line = line;
  running->spaces = spaces;
  emulator_switch(&running->stack_pointer, scheduler);
}

void fibre() {
  emulator_kernel(kernel_buffers);
  running->state = FINISHED;
  stop();
}

void prepare(Thread& thread) {
  void** frame = reinterpret_cast<void**>(thread.stack + STACK - 64) - FRAME_WORDS;
  memset(frame, 0, FRAME_WORDS * sizeof(void*));
  frame[RETURN_WORD] = reinterpret_cast<void*>(fibre);
  thread.stack_pointer = frame;
  thread.state = READY;
}

void run(Thread& thread) {
  running = &thread;
  self = &thread.place;
  emulator_switch(&scheduler, thread.stack_pointer);
  running = nullptr;
}

bool all_in(unsigned from, unsigned to, State state) {
  bool any = false;
  for (unsigned i = from; i < to; i++) {
    if (threads[i].state != FINISHED && threads[i].state != state) return false;
    any |= threads[i].state == state;
  }
  return any;
}

bool check_same(unsigned from, unsigned to, State state) {
  Thread* first = nullptr;
  for (unsigned i = from; i < to; i++) {
    if (threads[i].state != state) continue;
    if (!first) first = &threads[i];
    const bool same_place = threads[i].line == first->line && !strcmp(threads[i].operation, first->operation);
    if (!same_place)
      report(*first, "divergent control flow: this thread is at %s (line %d), thread %u at %s (line %d)",
             first->operation, first->line, i, threads[i].operation, threads[i].line);
    else if (threads[i].spaces != first->spaces)
      report(*first, "%s (line %d) with different memory flags in one group", first->operation, first->line);
    else
      continue;
    return false;
  }
  return true;
}

void release(unsigned from, unsigned to, unsigned* fence) {
  int spaces = 0;
  for (unsigned i = from; i < to; i++)
    if (threads[i].state != FINISHED) spaces = threads[i].spaces;
  if (fence)
    for (int space = DEVICE; space <= THREADGROUP; space++)
      if (spaces & space) fence[space]++;
  for (unsigned i = from; i < to; i++)
    if (threads[i].state != FINISHED) threads[i].state = READY;
}

bool advance_simd(unsigned simd) {
  const unsigned from = simd * SIMD_WIDTH;
  const unsigned to = from + SIMD_WIDTH < thread_count ? from + SIMD_WIDTH : thread_count;
  if (all_in(from, to, AT_EXCHANGE)) {
    if (!check_same(from, to, AT_EXCHANGE)) return false;
    release(from, to, nullptr);
    simds[simd].exchange[++simds[simd].turn % 2].active = 0;
    return true;
  }
  if (all_in(from, to, AT_SIMD_BARRIER)) {
    if (!check_same(from, to, AT_SIMD_BARRIER)) return false;
    release(from, to, simds[simd].fences);
    return true;
  }
  return false;
}

bool advance_group() {
  if (!all_in(0, thread_count, AT_BARRIER) || !check_same(0, thread_count, AT_BARRIER)) return false;
  unsigned ended = 0, waiting = 0;
  for (unsigned i = 0; i < thread_count; i++) *(threads[i].state == FINISHED ? &ended : &waiting) = i;
  if (threads[ended].state == FINISHED) {
    report(threads[waiting], "a barrier in divergent control flow: thread %u has ended, this one waits in line %d", ended,
           threads[waiting].line);
    return false;
  }
  release(0, thread_count, fences);
  return true;
}

void report_stuck() {
  Thread *one = nullptr, *other = nullptr;
  for (unsigned i = 0; i < thread_count; i++) {
    Thread& thread = threads[i];
    if (thread.state == FINISHED) continue;
    if (!one) one = &thread;
    if (thread.state != one->state || thread.line != one->line) other = &thread;
  }
  if (!other) other = one;
  report(*one, "divergent control flow: this thread waits at %s (line %d), thread %u at %s (line %d)", one->operation,
         one->line, other->place.index, other->operation, other->line);
}

void run_group() {
  memset(simds, 0, sizeof(simds[0]) * simd_count);
  for (unsigned left = thread_count; left;) {
    bool moved = false;
    left = 0;
    for (unsigned i = 0; i < thread_count; i++) {
      if (threads[i].state != READY) continue;
      run(threads[i]);
      if (finding[0]) return;
      moved = true;
    }
    for (unsigned i = 0; i < simd_count && !finding[0]; i++) moved |= advance_simd(i);
    if (!finding[0]) moved |= advance_group();
    for (unsigned i = 0; i < thread_count; i++) left += threads[i].state != FINISHED;
    if (left && !moved && !finding[0]) report_stuck();
    if (finding[0]) return;
  }
}

void place_threads(const unsigned* group, const unsigned* groups, const unsigned* nominal, const unsigned* grid) {
  unsigned size[3];
  for (int i = 0; i < 3; i++) {
    const unsigned left = grid[i] - group[i] * nominal[i];
    size[i] = left < nominal[i] ? left : nominal[i];
  }
  thread_count = size[0] * size[1] * size[2];
  simd_count = (thread_count + SIMD_WIDTH - 1) / SIMD_WIDTH;
  for (unsigned i = 0; i < thread_count; i++) {
    Place& place = threads[i].place;
    const unsigned at[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    for (int k = 0; k < 3; k++) {
      place.at[k] = at[k], place.group[k] = group[k], place.groups[k] = groups[k];
      place.group_size[k] = size[k], place.nominal_size[k] = nominal[k], place.grid[k] = grid[k];
    }
    place.index = i, place.lane = i % SIMD_WIDTH, place.simd = i / SIMD_WIDTH, place.simds = simd_count;
    threads[i].stack = stacks + i * STACK;
    prepare(threads[i]);
  }
}

}  // namespace

const Place* self;

const Exchange* exchange(const char* operation, int line, const void* payload, size_t size) {
  if (size > PAYLOAD) fail("%s of a value of %zu bytes", operation, size);
  Simd& simd = simds[running->place.simd];
  Exchange& box = simd.exchange[simd.turn % 2];
  box.active |= 1u << running->place.lane;
  memcpy(box.slot[running->place.lane], payload, size);
  wait_in(AT_EXCHANGE, operation, line, 0);
  return &box;
}

void barrier(bool whole_group, int spaces, int line) {
  if (whole_group)
    wait_in(AT_BARRIER, "a barrier of the threadgroup", line, spaces);
  else
    wait_in(AT_SIMD_BARRIER, "a barrier of the SIMD-group", line, spaces);
}

void* shared(const void* key, const char* name, size_t size, size_t item, size_t alignment) {
  size_t used = 0;
  for (unsigned i = kernel_regions; i < region_count; i++) {
    if (regions[i].key == key) return regions[i].begin;
    used += regions[i].size;
  }
  if (used + size > shared_limit) fail("%zu bytes of shared memory, the limit is %zu", used + size, shared_limit);
  if (region_count == MAX_REGIONS) fail("more than %u buffers and shared variables", MAX_REGIONS);
  void* memory = aligned_alloc(alignment < 64 ? 64 : alignment, (size + 127) / 64 * 64);
  memset(memory, 0xff, size);
  add_region(key, name, memory, size, item, THREADGROUP, true, false);
  return memory;
}

void atomic_access(const volatile void* address, size_t size) {
  check(address, size, true, true, true, __builtin_return_address(0));
}

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe(*running, format, arguments);
  stop();
}

}  // namespace emulator

using namespace emulator;

// ---- what the compiler calls ----------------------------------------------------------------------------------------

#define HOOK(size)                                                                                            \
  extern "C" void __tsan_read##size(void* p) { check(p, size, 0, 0, 1, __builtin_return_address(0)); }         \
  extern "C" void __tsan_write##size(void* p) { check(p, size, 1, 0, 1, __builtin_return_address(0)); }        \
  extern "C" void __tsan_unaligned_read##size(void* p) { check(p, size, 0, 0, 0, __builtin_return_address(0)); } \
  extern "C" void __tsan_unaligned_write##size(void* p) { check(p, size, 1, 0, 0, __builtin_return_address(0)); } \
  extern "C" void __tsan_read_write##size(void* p) {                                                          \
    check(p, size, 0, 0, 1, __builtin_return_address(0));                                                     \
    check(p, size, 1, 0, 1, __builtin_return_address(0));                                                     \
  }                                                                                                           \
  extern "C" void __tsan_unaligned_read_write##size(void* p) {                                                \
    check(p, size, 0, 0, 0, __builtin_return_address(0));                                                     \
    check(p, size, 1, 0, 0, __builtin_return_address(0));                                                     \
  }
HOOK(1)
HOOK(2)
HOOK(4)
HOOK(8)
HOOK(16)
extern "C" void __tsan_init() {}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t size) {
  check(from, size, 0, 0, 0, __builtin_return_address(0));
  check(to, size, 1, 0, 0, __builtin_return_address(0));
  return memcpy(to, from, size);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t size) {
  check(from, size, 0, 0, 0, __builtin_return_address(0));
  check(to, size, 1, 0, 0, __builtin_return_address(0));
  return memmove(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int value, size_t size) {
  check(to, size, 1, 0, 0, __builtin_return_address(0));
  return memset(to, value, size);
}

// Older compiler libraries lack this conversion. Rounds to nearest, ties to even.
extern "C" __attribute__((weak)) __bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint16_t upper = nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &upper, 2);
  return result;
}

// ---- what the driver calls ------------------------------------------------------------------------------------------

extern "C" {

struct EmulatorBuffer {
  const char* name;
  void* begin;
  size_t size, item;
  int writable, initialised;
};

extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));

// Runs the whole grid. Returns what was found, or an empty string; `at` gets the code address of the finding relative
// to the image, or 0.
__attribute__((visibility("default"))) const char* emulator_run(const EmulatorBuffer* buffers, unsigned count,
                                                                const int* may_leave, const unsigned* grid,
                                                                const unsigned* nominal, size_t shared_memory,
                                                                size_t* at) {
  group_number = 0, last_region = 0;
  image_begin = __ehdr_start, image_end = _end;
  stacks = static_cast<char*>(
      mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0));
  void* pointers[MAX_REGIONS];
  shared_limit = shared_memory;
  finding[0] = 0, finding_at = nullptr, region_count = 0, running = nullptr;
  for (unsigned i = 0; i < count; i++) {
    pointers[i] = buffers[i].begin;
    add_region(nullptr, buffers[i].name, buffers[i].begin, buffers[i].size, buffers[i].item, DEVICE, buffers[i].writable,
               buffers[i].initialised);
  }
  kernel_regions = region_count;
  kernel_buffers = pointers;
  unsigned groups[3], group[3];
  for (int i = 0; i < 3; i++) groups[i] = (grid[i] + nominal[i] - 1) / nominal[i];
  for (group[2] = 0; group[2] < groups[2] && !finding[0]; group[2]++)
    for (group[1] = 0; group[1] < groups[1] && !finding[0]; group[1]++)
      for (group[0] = 0; group[0] < groups[0] && !finding[0]; group[0]++, group_number++) {
        place_threads(group, groups, nominal, grid);
        fences[DEVICE] = fences[THREADGROUP] = 0;
        run_group();
      }
  for (unsigned i = 0; i < count && !finding[0]; i++)
    if (regions[i].cells && !regions[i].initialised && !may_leave[i])
      for (size_t byte = 0; byte < regions[i].size; byte++)
        if (regions[i].cells[byte].write.group == MANY) {
          snprintf(finding, sizeof(finding), "nothing was written to %s[%zu]", regions[i].name,
                   byte / regions[i].item);
          break;
        }
  *at = finding[0] && finding_at && image_begin ? finding_at - image_begin : 0;
  for (unsigned i = kernel_regions; i < region_count; i++) free(regions[i].begin);
  for (unsigned i = 0; i < region_count; i++) free(regions[i].cells);
  munmap(stacks, MAX_THREADS * STACK);
  return finding;
}

}  // extern "C"
