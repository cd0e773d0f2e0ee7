// The pool of threads. Workers spin for a moment after each loop and then sleep until the next one.
#include "pool.h"
#include "kernels.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <pthread.h>
#include <signal.h>

namespace {

typedef std::atomic<uint32_t> Word;
constexpr std::chrono::microseconds SPIN(50);
constexpr int MOST = 256;  // threads

// Returns when `word` is no longer `seen`, or earlier.
void sleep_on(Word& word, uint32_t seen) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (word == seen) std::this_thread::sleep_for(SPIN);
#endif
}

void wake(Word& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
    (void)word;
#endif
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// Whether `done` became true within SPIN.
template <class Done>
bool spin(Done done) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do
        for (int i = 0; i < 16; ++i, relax())
            if (done()) return true;
    while (std::chrono::steady_clock::now() < end);
    return false;
}

struct Pool {
    // A part of the loop. One thread begins with it, so that it reads memory in order; who has finished helps.
    struct alignas(64) Part {
        std::atomic<int64_t> next{0};
        int64_t end;
    };

    // The loop. It changes only while `work` is even and nobody is `active`.
    Piece piece;
    void* body;
    int64_t grain;
    int limit;  // threads that may take part; the caller is the first of them

    std::unique_ptr<Part[]> parts{new Part[MOST]};
    alignas(64) Word work{0};      // odd while pieces may be taken
    Word sleeping{0};              // whether a worker may sleep on `work`
    alignas(64) Word active{0};    // workers that may read the loop
    Word waiting{0};               // whether the caller may sleep on `active`
    std::atomic<bool> busy{false};  // whether a caller owns the loop
    int workers = 0;

    // Computes pieces of a thread's own part, and then of the others.
    void take(int own) {
        for (int i = 0; i < limit; ++i) {
            Part& part = parts[(own + i) % limit];
            // The first look spares threads that come late a costly write.
            for (int64_t begin; part.next < part.end && (begin = part.next.fetch_add(grain)) < part.end;)
                piece(body, begin, begin + grain < part.end ? begin + grain : part.end);
        }
    }

    void serve(int index) {
        for (uint32_t seen = 0;;) {
            auto changed = [&] { return work != seen; };
            while (!changed() && !spin(changed)) {
                sleeping = 1;
                sleep_on(work, seen);
            }
            ++active;
            seen = work;  // read after `active` has grown, so that the caller waits if the loop is open
            if (seen & 1 && index < limit) take(index);
            if (--active == 0 && waiting) wake(active);
        }
    }

    // Starts workers, with signals blocked: those belong to Python's threads, but for those of a worker's own faults.
    void grow(int wanted) {
        sigset_t all, before;
        sigfillset(&all);
        for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, own);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (; workers < wanted; ++workers) std::thread(&Pool::serve, this, workers + 1).detach();
        } catch (const std::system_error&) {  // the system grants no more; the caller goes on with fewer
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void run(int64_t count, int64_t step, Piece f, void* it, int threads) {
        if (workers < threads - 1) grow(threads - 1);
        // A worker that came late to the last loop may still look at it.
        wait();
        piece = f, body = it, grain = step, limit = threads;
        const int64_t pieces = (count + step - 1) / step;
        for (int64_t i = 0; i < threads; ++i) {
            parts[i].next = i * pieces / threads * step;
            parts[i].end = std::min((i + 1) * pieces / threads * step, count);
        }
        ++work;
        if (sleeping.exchange(0)) wake(work);
        take(0);
        ++work;
        wait();
    }

    // Waits until no worker computes. After a moment the caller sleeps, which frees its processor for the worker.
    void wait() {
        if (spin([&] { return active == 0; })) return;
        waiting = 1;
        for (uint32_t left; (left = active);) sleep_on(active, left);
        waiting = 0;
    }
};

std::atomic<int> threads{1};
Pool* pool;  // never freed: workers use it until the process ends

// After a fork the child has no workers.
void renew() { pool = new Pool; }

const int prepared = (renew(), pthread_atfork(nullptr, nullptr, renew));

}  // namespace

int pool_threads() { return threads; }

void pool_run(int64_t count, int64_t grain, Piece piece, void* body) {
    const int granted = threads;
    if (count <= grain || granted < 2 || pool->busy.exchange(true)) {
        if (count > 0) piece(body, 0, count);
        return;
    }
    pool->run(count, grain, piece, body, granted);
    pool->busy = false;
}

extern "C" void soothsay_set_threads(int count) { threads = count < 1 ? 1 : count > MOST ? MOST : count; }
