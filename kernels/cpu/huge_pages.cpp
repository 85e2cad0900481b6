#include "huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <mutex>

#include "mlx/allocator.h"

namespace metalctl {
namespace {

namespace mx = mlx::core;

constexpr size_t PAGE = 2 << 20, ROOM = 32 << 20, LINE = 64;

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Matrices one after the other. It lives as long as one of them, or as it is the one that is filled.
struct Chunk {
  char* mapped;
  size_t mapped_bytes;
  char* free;
  char* end;
  int matrices = 0;
};

// Before each matrix; the last word is the one in which MLX keeps the size of a buffer.
struct Head {
  Chunk* chunk;
  size_t bytes;
};

std::mutex mutex;
Chunk* filled = nullptr;

Chunk* map_chunk(size_t bytes) {
  const size_t size = rounded(bytes, PAGE), mapped_bytes = size + PAGE;
  void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* start = reinterpret_cast<char*>(rounded(reinterpret_cast<uintptr_t>(mapped), PAGE));
#ifdef MADV_HUGEPAGE
  madvise(start, size, MADV_HUGEPAGE);
#endif
  return new Chunk{static_cast<char*>(mapped), mapped_bytes, start, start + size};
}

void unmap(Chunk* chunk) {
  munmap(chunk->mapped, chunk->mapped_bytes);
  delete chunk;
}

Head* take(size_t bytes) {
  const size_t size = rounded(bytes, LINE) + LINE;
  std::lock_guard<std::mutex> lock(mutex);
  Chunk* chunk = filled;
  if (chunk == nullptr || size_t(chunk->end - chunk->free) < size) {
    chunk = map_chunk(size > ROOM ? size : ROOM);
    if (chunk == nullptr) return nullptr;
    if (size <= ROOM) {
      if (filled != nullptr && filled->matrices == 0) unmap(filled);
      filled = chunk;
    }
  }
  char* data = chunk->free + LINE;
  chunk->free += size;
  chunk->matrices++;
  Head* head = reinterpret_cast<Head*>(data) - 1;
  *head = {chunk, bytes};
  return head;
}

void give_back(Head* head) {
  std::lock_guard<std::mutex> lock(mutex);
  Chunk* chunk = head->chunk;
  if (--chunk->matrices > 0) return;
  if (chunk == filled) filled = nullptr;
  unmap(chunk);
}

// Whether a buffer of MLX's is a pointer to its size, which its bytes follow.
bool buffers_are_plain() {
  mx::allocator::Data data = mx::allocator::malloc(LINE);
  mx::allocator::Buffer buffer = data.buffer();
  return static_cast<char*>(buffer.raw_ptr()) - static_cast<char*>(buffer.ptr()) == sizeof(size_t);
}

}  // namespace

bool lay_in_huge_pages(mx::array& a) {
  static const bool plain = buffers_are_plain();
  Head* head = plain ? take(a.nbytes()) : nullptr;
  if (head == nullptr) return false;
  a.set_data(mx::allocator::Data(mx::allocator::Buffer(&head->bytes), [](mx::allocator::Buffer b) {
    give_back(reinterpret_cast<Head*>(static_cast<size_t*>(b.ptr()) + 1) - 1);
  }));
  return true;
}

}  // namespace metalctl
