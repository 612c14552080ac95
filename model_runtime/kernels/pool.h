// The threads that share the chunks of an operation.
//
// The caller works too and waits only for chunks that another thread has begun: a thread that the system does not run,
// because the core is busy with something else, delays nobody. (An OpenMP region waits for all its threads: with a
// second busy process on the machine a step took ten times as long.) Idle threads spin briefly, so that the many small
// operations of a step find them awake, then sleep.
#pragma once

#include <algorithm>
#include <cstdint>

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

namespace pool {

// Threads that work on an operation, the caller included. Not to be called during one.
void set_threads(int64_t count);
int64_t threads();

// work(context, chunk) for every chunk in [0, chunks), each once, in any order; returns when all are done.
void run(int64_t chunks, void (*work)(void* context, int64_t chunk), void* context);

template <class Function> void parallel(int64_t chunks, Function function) {
    run(chunks, [](void* context, int64_t chunk) { (*static_cast<Function*>(context))(chunk); }, &function);
}

// function(begin, end) over [0, count) in ranges of nearly equal length: enough of them to balance the threads, but none
// with less than a sensible share of `work`, given in operations of about a tenth of a nanosecond.
template <class Function> void parallel_ranges(int64_t count, int64_t work, Function function) {
    int64_t chunks = std::min({count, 4 * threads(), work >> 17});
    if (chunks > threads()) chunks -= chunks % threads();  // the same for each
    if (chunks < 2 || threads() == 1) return function(int64_t(0), count);
    parallel(chunks, [&](int64_t chunk) { function(count * chunk / chunks, count * (chunk + 1) / chunks); });
}

}  // namespace pool
