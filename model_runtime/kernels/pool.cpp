#include "pool.h"

#include <atomic>
#include <thread>

namespace pool {
namespace {

constexpr int SPINS = 2000;  // some 50 microseconds

struct Job {
    void (*work)(void*, int64_t);
    void* context;
};

Job job;                               // valid while a chunk that was taken is not done
std::atomic<uint64_t> state{0};        // number of chunks << 32 | next chunk
std::atomic<uint32_t> done{0};         // finished chunks of the job
std::atomic<uint32_t> published{0};    // jobs so far; what idle threads sleep on
std::atomic_flag running = ATOMIC_FLAG_INIT;
std::atomic<int64_t> thread_count{1};
int64_t num_workers = 0;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

template <class Condition> bool spin_until(Condition condition) {
    for (int i = 0; i < SPINS; i++) {
        if (condition()) return true;
        pause();
    }
    return condition();
}

// Take chunks until none is left. Taking one is an increment of `state`: whoever succeeds owns a chunk of the job that
// is published at that moment, and that job stays valid until the chunk is counted in `done`.
void work_on_chunks() {
    uint64_t seen = state.load(std::memory_order_acquire);
    while (uint32_t(seen) < uint32_t(seen >> 32)) {
        if (!state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
        const uint32_t chunks = uint32_t(seen >> 32);
        job.work(job.context, uint32_t(seen));
        if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks) done.notify_all();
        seen = state.load(std::memory_order_acquire);
    }
}

void worker(int64_t index) {
    for (;;) {
        const uint32_t jobs = published.load(std::memory_order_acquire);
        if (index < thread_count.load(std::memory_order_relaxed)) {
            work_on_chunks();
            if (spin_until([=] { return published.load(std::memory_order_relaxed) != jobs; })) continue;
        }
        published.wait(jobs);
    }
}

}  // namespace

int64_t threads() { return thread_count.load(std::memory_order_relaxed); }

void set_threads(int64_t count) {
    for (; num_workers < count - 1; num_workers++) std::thread(worker, num_workers + 1).detach();
    thread_count = std::max<int64_t>(1, count);
}

void run(int64_t chunks, void (*work)(void*, int64_t), void* context) {
    // One operation at a time has the threads; a second caller does its own work alone.
    if (chunks < 2 || threads() == 1 || running.test_and_set(std::memory_order_acquire)) {
        for (int64_t chunk = 0; chunk < chunks; chunk++) work(context, chunk);
        return;
    }
    job = {work, context};
    done.store(0, std::memory_order_relaxed);
    state.store(uint64_t(chunks) << 32, std::memory_order_release);
    published.fetch_add(1, std::memory_order_release);
    published.notify_all();
    work_on_chunks();
    const auto finished = [=] { return done.load(std::memory_order_acquire) == uint32_t(chunks); };
    while (!spin_until(finished)) {
        const uint32_t count = done.load(std::memory_order_acquire);
        if (count != uint32_t(chunks)) done.wait(count);
    }
    running.clear(std::memory_order_release);
}

}  // namespace pool

extern "C" void fl_set_threads(int64_t count) { pool::set_threads(count); }
