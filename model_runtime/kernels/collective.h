// What the ranks of one machine do together, in memory that they share.
//
// A rank writes its part into its own slot, counts up its arrivals, and waits for those of the others; then it reads
// their slots. Slots are two, taken in turn: a rank that comes to collective n + 2 has seen everybody arrive at n + 1,
// who had read what it wrote for n by then. So one arrival a collective is enough. What is longer than a slot goes in
// pieces.
//
// Links are beside that: a rank may send something to the next one, round to the first, through slots of its own; one
// counts what it has sent, the other what it has taken.
//
// Every rank calls the same functions in the same order with the same sizes. A rank that died, or does not come within
// the time-out, is an error on all others; then the ranks can only be started again, in new memory.
#pragma once

#include <cstdint>

// One rank's side. `shared_memory.py` fills it; the order of its fields is the same there.
struct Collective {
    char* memory;  // all zero before the first rank comes
    int64_t rank, size, slot_bytes, timeout_ns;
    int64_t arrivals, sent, taken;             // so far
    int64_t calls, sent_bytes, ns, waiting_ns;  // counters
};

// Rank r has bytes[r] bytes, of which [begins[r], ends[r]) come to into[r] of this rank, where that is not null. Its own
// are `mine`, which may be where they are to come to. `bytes` is the same everywhere. Returns 0, or 1 + the rank that did
// not come.
int64_t exchange(Collective& collective, const char* mine, const int64_t* bytes, char* const* into,
                 const int64_t* begins, const int64_t* ends);

// x[count] = the sum of all ranks' x, added in the order of ranks. Returns 0, or 1 + the rank that did not come.
int64_t all_reduce(Collective& collective, float* x, int64_t count);
