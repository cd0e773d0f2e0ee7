// Calls functions of a library of kernels for a process on another processor, whose memory it sees as its own.
//
// It is run by an emulator; tests/helpers/emulated.py is the other process, which waits during a call. A page of that process is
// fetched when it is first touched, at the same address. What is written to is kept twice, and what changed in it is sent back after
// the call. So pointers within structs need no translation. Both have the same layout of structs, and pages of 4096 bytes.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr uint64_t PAGE = 4096, LINE = 64;
enum { FETCH, CHANGE, RESULT, COLLISION };

void receive(void* data, uint64_t size) {
    for (char* p = (char*)data; size;) {
        const ssize_t got = read(0, p, size);
        if (got <= 0) _exit(0);  // the other process has ended
        p += got, size -= got;
    }
}

void send(const void* data, uint64_t size) {
    for (const char* p = (const char*)data; size;) {
        const ssize_t sent = write(1, p, size);
        if (sent <= 0) _exit(0);
        p += sent, size -= sent;
    }
}

void tell(uint64_t what, uint64_t address, uint64_t size) {
    const uint64_t message[3] = {what, address, size};
    send(message, sizeof message);
}

// Pages that were fetched together, and what they had before they were written to; null: they were not.
struct Fetched {
    char *memory, *before;
    uint64_t size;
};

Fetched fetched[1 << 16];
int count;
std::atomic_flag lock = ATOMIC_FLAG_INIT;  // threads of the library fetch pages too

char* allocate(uint64_t size, int protection = PROT_READ | PROT_WRITE, void* at = nullptr) {
    return (char*)mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

void fetch(int, siginfo_t* info, void*) {
    while (lock.test_and_set()) {}
    const uint64_t address = uint64_t(info->si_addr) / PAGE * PAGE;
    Fetched* known = nullptr;
    for (int i = count; i-- > 0 && !known;)
        if (address >= uint64_t(fetched[i].memory) && address < uint64_t(fetched[i].memory) + fetched[i].size) known = &fetched[i];
    if (!known) {
        uint64_t size;
        tell(FETCH, address, 0);
        receive(&size, sizeof size);
        char* copy = allocate(size);
        receive(copy, size);
        char* memory = allocate(size, PROT_NONE, (void*)address);
        if (uint64_t(memory) != address) {  // page by page, since the next ones are here already
            munmap(memory, size), memory = allocate(PAGE, PROT_NONE, (void*)address);
            if (uint64_t(memory) != address) tell(COLLISION, address, 0), _exit(1);
            uint64_t more = PAGE;
            for (char* next; more < size && (next = allocate(PAGE, PROT_NONE, memory + more), true); more += PAGE)
                if (next != memory + more) {
                    munmap(next, PAGE);
                    break;
                }
            munmap(copy + more, size - more), size = more;
        }
        mprotect(copy, size, PROT_READ);
        mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, memory);  // at once: other threads never see empty pages
        fetched[count++] = {memory, nullptr, size};
    } else if (!known->before) {  // a write, or a read that another thread was faster with
        known->before = allocate(known->size);
        std::memcpy(known->before, known->memory, known->size);
        mprotect(known->memory, known->size, PROT_READ | PROT_WRITE);
    }
    lock.clear();
}

// In runs of bytes.
void send_changes(const Fetched& f) {
    for (uint64_t i = 0; i < f.size; ++i) {
        if (i % LINE == 0 && !std::memcmp(f.memory + i, f.before + i, LINE)) {
            i += LINE - 1;
            continue;
        }
        uint64_t end = i;
        while (end < f.size && f.memory[end] != f.before[end]) ++end;
        if (end == i) continue;
        tell(CHANGE, uint64_t(f.memory + i), end - i);
        send(f.memory + i, end - i);
        i = end;
    }
}

// Sends what changed, and forgets all pages.
void give_back() {
    for (; count; --count) {
        const Fetched& f = fetched[count - 1];
        if (f.before) send_changes(f), munmap(f.before, f.size);
        munmap(f.memory, f.size);
    }
}

// Integers and pointers go to eight registers, and then to the stack; floating-point numbers to eight registers of their own.
typedef uint64_t (*Function)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double, double, double,
                             double, double, double, double, double, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                             uint64_t, uint64_t);

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    struct sigaction action = {};
    action.sa_sigaction = fetch, action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    for (;;) {
        char name[64];
        uint64_t n[16];
        double f[8];
        receive(name, sizeof name), receive(n, sizeof n), receive(f, sizeof f);
        const Function function = (Function)dlsym(library, name);
        if (!function) return std::fprintf(stderr, "no function %s\n", name), 1;
        const uint64_t result = function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], f[0], f[1], f[2], f[3], f[4], f[5], f[6],
                                         f[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15]);
        give_back();
        tell(RESULT, result, 0);
    }
}
