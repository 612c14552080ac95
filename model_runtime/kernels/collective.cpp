#include "collective.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <ctime>

#include <cerrno>
#include <csignal>
#include <sched.h>
#include <unistd.h>
#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#endif

#include "pool.h"
#include "vec.h"

namespace {

constexpr int SPINS = 500;  // some 10 microseconds
// Then it gives the core to whoever wants it, such as the rank it waits for, but stays awake: who sleeps comes back late,
// so that the others wait for it at the next sum, and sleep.
constexpr int YIELDS = 300;
constexpr int64_t SLICE_NS = 20'000'000;  // of a longer wait, after which it looks whether the rank lives
constexpr int64_t LINE = 64, PAGE = 4096;
constexpr int64_t LINK_SLOTS = 8;  // as in shared_memory.py
constexpr int64_t BLOCK = 1024;  // floats that are summed in the nearest cache

// Counts up; ranks that wait for it sleep on it.
struct Counter {
    std::atomic<uint32_t> count, sleepers;
    bool has_reached(int64_t wanted) const { return int32_t(count.load() - uint32_t(wanted)) >= 0; }
};

// What a rank tells the others.
struct alignas(LINE) Line {
    Counter arrivals, sent, taken;
    std::atomic<int64_t> pid;
};
static_assert(sizeof(Line) == LINE && std::atomic<uint32_t>::is_always_lock_free);

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

Line& line(const Collective& c, int64_t rank) { return reinterpret_cast<Line*>(c.memory)[rank]; }

char* slots(const Collective& c) { return c.memory + divide_up(c.size * LINE, PAGE) * PAGE; }

// Of the arrival that comes next.
char* slot(const Collective& c, int64_t rank) {
    return slots(c) + (2 * rank + (c.arrivals & 1)) * c.slot_bytes;
}

// Of the piece with that number that a rank sends to the next one.
char* link_slot(const Collective& c, int64_t rank, int64_t piece) {
    return slots(c) + (2 * c.size + LINK_SLOTS * rank + piece % LINK_SLOTS) * c.slot_bytes;
}

#if defined(__linux__)
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec slice{0, SLICE_NS};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}
void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// A process that has ended and that nobody has waited for is dead too.
bool is_dead(pid_t pid) {
    const int process = int(syscall(SYS_pidfd_open, pid, 0));
    if (process < 0) return errno == ESRCH;
    pollfd ended{process, POLLIN, 0};
    const bool dead = poll(&ended, 1, 0) == 1;
    close(process);
    return dead;
}
#else
void sleep_on(std::atomic<uint32_t>&, uint32_t) {
    const timespec slice{0, 50'000};
    nanosleep(&slice, nullptr);
}
void wake(std::atomic<uint32_t>&) {}
bool is_dead(pid_t pid) { return kill(pid, 0) && errno == ESRCH; }
#endif

void raise(Counter& counter, int64_t count) {
    counter.count = uint32_t(count);
    if (counter.sleepers) wake(counter.count);
}

// Whether a counter of `rank` has reached `count`; false once that rank is dead or the time is over.
bool has_come(const Collective& c, int64_t rank, Counter& counter, int64_t count) {
    for (int i = 0; i < SPINS; i++, pause())
        if (counter.has_reached(count)) return true;
    for (int i = 0; i < YIELDS; i++, sched_yield())
        if (counter.has_reached(count)) return true;
    for (int64_t waited = 0; !counter.has_reached(count);) {
        const int64_t began = now();
        counter.sleepers++;
        // count and sleepers are in one order for all: either this rank sees the new count, or that one the sleeper
        if (const uint32_t seen = counter.count; int32_t(seen - uint32_t(count)) < 0) sleep_on(counter.count, seen);
        counter.sleepers--;
        waited += std::min(now() - began, SLICE_NS);  // who sleeps longer was stopped, as the other may have been
        const pid_t pid = pid_t(line(c, rank).pid);
        if (waited > c.timeout_ns || (pid && is_dead(pid))) return counter.has_reached(count);
    }
    return true;
}

// Returns when a counter of `rank` has reached `count`, or 1 + the rank that does not come.
int64_t wait_for(Collective& c, int64_t rank, Counter& counter, int64_t count) {
    const int64_t began = now();
    if (!has_come(c, rank, counter, count)) return 1 + rank;
    c.waiting_ns += now() - began;
    return 0;
}

// This rank has filled its slot. Returns when all have, or 1 + the rank that does not come.
int64_t arrive(Collective& c) {
    c.arrivals++;
    raise(line(c, c.rank).arrivals, c.arrivals);
    for (int64_t rank = 0; rank < c.size; rank++)
        if (rank != c.rank)
            if (const int64_t lost = wait_for(c, rank, line(c, rank).arrivals, c.arrivals)) return lost;
    return 0;
}

// Counts a call when it is over.
struct Counted {
    Collective& c;
    int64_t began = now();
    ~Counted() {
        c.calls++;
        c.ns += now() - began;
    }
};

// Bytes [begin, end) of a part into a slot, past this core's caches: the slot's lines are in the other cores', and taking
// them from there costs three times what it costs to write to memory. `begin` is at the start of a line.
void publish(const char* part, int64_t begin, int64_t end, char* into) {
    int64_t i = begin;
#if defined(__AVX__)
    for (; i + 32 <= end; i += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(part + i));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(into + i), bytes);
    }
    _mm_sfence();  // no later store, such as the arrival, is seen before these
#endif
    std::copy(part + i, part + end, into + i);
}

// x = the sum of all parts, of which parts[rank] is x.
void sum(const float* const* parts, int64_t size, int64_t begin, int64_t end, float* x) {
    for (int64_t first = begin; first < end; first += BLOCK) {
        const int64_t count = std::min(end - first, BLOCK);
        float total[BLOCK];
        for (int64_t i = 0; i < count; i++) total[i] = parts[0][first + i] + parts[1][first + i];
        for (int64_t rank = 2; rank < size; rank++)
            for (int64_t i = 0; i < count; i++) total[i] += parts[rank][first + i];
        std::copy(total, total + count, x + first);
    }
}

// function(begin, end) over [0, count) in ranges of whole lines.
template <class Function> void for_lines(int64_t count, int64_t work, Function function) {
    constexpr int64_t FLOATS = LINE / sizeof(float);
    pool::parallel_ranges(divide_up(count, FLOATS), work, [&](int64_t begin, int64_t end) {
        function(begin * FLOATS, std::min(end * FLOATS, count));
    });
}

constexpr int64_t MOST_RANKS = 64;

}  // namespace

int64_t all_reduce(Collective& c, float* x, int64_t count) {
    const Counted counted{c};
    const int64_t most = c.slot_bytes / int64_t(sizeof(float));
    for (int64_t done = 0; done < count; done += most) {
        const int64_t piece = std::min(most, count - done);
        char* mine = slot(c, c.rank);
        float* x_piece = x + done;
        const float* parts[MOST_RANKS];
        for (int64_t rank = 0; rank < c.size; rank++)
            parts[rank] = rank == c.rank ? x_piece : reinterpret_cast<float*>(slot(c, rank));
        for_lines(piece, 4 * piece, [&](int64_t begin, int64_t end) {
            publish(reinterpret_cast<char*>(x_piece), begin * sizeof(float), end * sizeof(float), mine);
        });
        c.sent_bytes += piece * int64_t(sizeof(float));
        if (const int64_t lost = arrive(c)) return lost;
        for_lines(piece, 4 * c.size * piece,
                  [&](int64_t begin, int64_t end) { sum(parts, c.size, begin, end, x_piece); });
    }
    return 0;
}

int64_t exchange(Collective& c, const char* mine, const int64_t* bytes, char* const* into, const int64_t* begins,
                 const int64_t* ends) {
    const Counted counted{c};
    const int64_t longest = *std::max_element(bytes, bytes + c.size);
    for (int64_t done = 0; done < longest; done += c.slot_bytes) {
        const char* slots[MOST_RANKS];
        for (int64_t rank = 0; rank < c.size; rank++) slots[rank] = slot(c, rank);
        const int64_t piece = std::clamp<int64_t>(bytes[c.rank] - done, 0, c.slot_bytes);
        publish(mine + done, 0, piece, const_cast<char*>(slots[c.rank]));
        c.sent_bytes += piece;
        if (const int64_t lost = arrive(c)) return lost;
        for (int64_t rank = 0; rank < c.size; rank++) {
            const int64_t begin = std::max(begins[rank], done), end = std::min(ends[rank], done + c.slot_bytes);
            if (!into[rank] || begin >= end) continue;
            const char* from = rank == c.rank ? mine + begin : slots[rank] + begin - done;
            char* to = into[rank] + begin - begins[rank];
            if (from != to) std::memcpy(to, from, end - begin);
        }
    }
    return 0;
}

extern "C" {

// This rank is there. Returns 0 if there are more ranks than the memory's format knows.
int64_t fl_join(Collective* c) {
    if (c->size > MOST_RANKS) return 0;
    line(*c, c->rank).pid = getpid();
    return 1;
}

// See all_reduce.
int64_t fl_all_reduce(Collective* c, float* x, int64_t count) { return c->size > 1 ? all_reduce(*c, x, count) : 0; }

// See exchange.
int64_t fl_exchange(Collective* c, const char* mine, const int64_t* bytes, char* const* into, const int64_t* begins,
                    const int64_t* ends) {
    return exchange(*c, mine, bytes, into, begins, ends);
}

// x comes to the next rank, the first one behind the last; returns as soon as it is in the slots between the two, which
// are LINK_SLOTS. Returns 0, or 1 + the rank that did not make room.
int64_t fl_send(Collective* c, const char* x, int64_t bytes) {
    const Counted counted{*c};
    const int64_t next = (c->rank + 1) % c->size;
    for (int64_t done = 0; done < bytes; done += c->slot_bytes) {
        if (const int64_t lost = wait_for(*c, next, line(*c, next).taken, c->sent + 1 - LINK_SLOTS)) return lost;
        const int64_t piece = std::min(bytes - done, c->slot_bytes);
        publish(x + done, 0, piece, link_slot(*c, c->rank, c->sent));
        raise(line(*c, c->rank).sent, ++c->sent);
        c->sent_bytes += piece;
    }
    return 0;
}

// x = what the rank before sent, which must be as long. Returns 0, or 1 + the rank that did not send.
int64_t fl_receive(Collective* c, char* x, int64_t bytes) {
    const Counted counted{*c};
    const int64_t before = (c->rank + c->size - 1) % c->size;
    for (int64_t done = 0; done < bytes; done += c->slot_bytes) {
        if (const int64_t lost = wait_for(*c, before, line(*c, before).sent, c->taken + 1)) return lost;
        std::memcpy(x + done, link_slot(*c, before, c->taken), std::min(bytes - done, c->slot_bytes));
        raise(line(*c, c->rank).taken, ++c->taken);
    }
    return 0;
}
}
