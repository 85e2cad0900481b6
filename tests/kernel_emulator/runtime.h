// What a kernel compiled for the emulator sees of the machine it believes to run on.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace emulator {

enum Space : int { DEVICE = 1, THREADGROUP = 2 };
constexpr unsigned SIMD_WIDTH = 32, PAYLOAD = 64;

// One thread's place in the dispatch. `self` is the thread that runs now.
struct Place {
  unsigned at[3], group[3], groups[3], group_size[3], nominal_size[3], grid[3];
  unsigned index, lane, simd, simds;
};
extern const Place* self;

// What the lanes of a SIMD-group published with one collective operation.
struct Exchange {
  unsigned active;  // a bit for each lane that takes part
  alignas(16) unsigned char slot[SIMD_WIDTH][PAYLOAD];
};

// Publishes this lane's bytes and returns once every running lane of the SIMD-group has published its own.
// All of them must come from the same operation on the same source line.
const Exchange* exchange(const char* operation, int line, const void* payload, size_t size);

// Returns once every thread of the threadgroup (or every lane of the SIMD-group) has arrived; orders their accesses to
// the memory named by `spaces`.
void barrier(bool whole_group, int spaces, int line);

// A variable that the whole threadgroup shares: the same storage for the same key in every thread.
void* shared(const void* key, const char* name, size_t size, size_t item, size_t alignment);

// An access that cannot race.
void atomic_access(const volatile void* address, size_t size);

[[noreturn]] void fail(const char* format, ...);

}  // namespace emulator
