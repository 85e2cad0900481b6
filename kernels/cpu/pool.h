// A pool of threads for short pieces of work that follow each other within microseconds. Between pieces a worker looks
// for the next one for a moment, then sleeps: an idle program uses no processor time. The caller works too and never
// waits for a worker that has not started, so a core that something else occupies costs its share and no more.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace metalctl {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Calls work(i) for each i in [0, count), on any thread and in any order; returns when all are done. A second caller
  // at the same time does its work alone.
  template <class Work>
  void each(int count, const Work& work) {
    run(count, [](const void* w, int i) { (*static_cast<const Work*>(w))(i); }, &work);
  }

 private:
  using Call = void (*)(const void*, int);

  void run(int count, Call call, const void* work);
  void take();
  void serve();

  std::vector<std::thread> workers_;
  std::mutex caller_;
  Call call_ = nullptr;
  const void* work_ = nullptr;
  int count_ = 0;
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> inside_{0};  // workers that may touch the present piece
  std::atomic<bool> open_{false};
  alignas(64) std::atomic<unsigned> round_{0};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace metalctl
