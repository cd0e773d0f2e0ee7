// Whether this processor has the instruction set of the library. This file is compiled with the same flags, so it must not
// contain code that could use those instructions.
#include "kernels.h"
#if defined(__AVXVNNI__)
#include <cpuid.h>
#endif
#if defined(__AMX_INT8__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// Linux lets a process use tile registers after a request.
static int tiles_granted() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

extern "C" int soothsay_runs_here() {
    int yes = 1;
#if defined(__x86_64__)
#if defined(__AMX_INT8__)
    yes = yes && tiles_granted();
#endif
#if defined(__AVX512BF16__)
    yes = yes && __builtin_cpu_supports("avx512bf16");
#endif
#if defined(__AVX512VNNI__)
    yes = yes && __builtin_cpu_supports("avx512vnni");
#endif
#if defined(__AVXVNNI__)
    unsigned a, b, c, d;  // some compilers emit the instructions but do not know the name
    yes = yes && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#endif
#if defined(__AVX512F__)
    yes = yes && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
#if defined(__AVX2__)
    yes = yes && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#endif
    return yes;
}
