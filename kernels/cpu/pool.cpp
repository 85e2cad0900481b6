#include "pool.h"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace metalctl {
namespace {

constexpr auto PATIENCE = std::chrono::microseconds(50);

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; i++) workers_.emplace_back([this] { serve(); });
}

Pool::~Pool() {
  stop_ = true;
  round_.fetch_add(1);
  round_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::run(int count, Call call, const void* work) {
  std::unique_lock alone(caller_, std::try_to_lock);
  if (count <= 1 || workers_.empty() || !alone) {
    for (int i = 0; i < count; i++) call(work, i);
    return;
  }
  call_ = call, work_ = work, count_ = count;
  next_ = 0;
  open_ = true;
  round_.fetch_add(1);
  if (asleep_ > 0) round_.notify_all();
  take();
  open_ = false;
  for (int turns = 0; inside_ > 0; turns++) turns < 4096 ? relax() : std::this_thread::yield();
}

void Pool::take() {
  for (int i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) call_(work_, i);
}

void Pool::serve() {
  unsigned seen = 0;
  while (!stop_) {
    const auto until = std::chrono::steady_clock::now() + PATIENCE;
    while (round_ == seen && std::chrono::steady_clock::now() < until)
      for (int i = 0; i < 16 && round_ == seen; i++) relax();
    if (round_ == seen) {
      asleep_.fetch_add(1);
      round_.wait(seen);
      asleep_.fetch_sub(1);
    }
    seen = round_;
    inside_.fetch_add(1);
    if (open_) take();
    inside_.fetch_sub(1);
  }
}

}  // namespace metalctl
