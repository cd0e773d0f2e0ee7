// Threads that share a loop. The caller always takes part and can finish alone, so a worker that the system does not run
// delays it by at most the worker's current piece.
#pragma once
#include <cstdint>
#include <type_traits>

typedef void (*Piece)(void* body, int64_t begin, int64_t end);

// Threads that the pool may use, with the caller.
int pool_threads();

// Runs piece(body, begin, end) for consecutive parts of 0..count, each of at most `grain`. A single part, and a loop that
// begins while another one runs, stays in the calling thread.
void pool_run(int64_t count, int64_t grain, Piece piece, void* body);

// body(begin, end) for parts of 0..count. Bodies must not start loops themselves.
template <class Body>
void parallel(int64_t count, int64_t grain, Body&& body) {
    typedef typename std::remove_reference<Body>::type Plain;
    pool_run(count, grain < 1 ? 1 : grain,
             [](void* it, int64_t begin, int64_t end) { (*(Plain*)it)(begin, end); }, (void*)&body);
}
