// Whether this processor has the instruction set of the library. This file is compiled with the same flags, so it must not
// contain code that could use those instructions.
#include "kernels.h"
#if defined(__aarch64__)
#include <cstdio>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(_WIN32)
#include <windows.h>
#endif

// Features of the processor: their bits in AT_HWCAP and AT_HWCAP2 of Linux, 32 more in the second, their names on macOS, and
// their numbers on Windows.
struct Feature {
    int bit;
    const char* name;
    int number;
};
[[maybe_unused]] constexpr Feature DOTPROD{20, "hw.optional.arm.FEAT_DotProd", 43}, I8MM{32 + 13, "hw.optional.arm.FEAT_I8MM", 66},
    BF16{32 + 14, "hw.optional.arm.FEAT_BF16", 68};

[[maybe_unused]] static int has(const Feature& feature) {
#if defined(__linux__)
    return getauxval(feature.bit < 32 ? AT_HWCAP : AT_HWCAP2) >> feature.bit % 32 & 1;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    if (sysctlbyname(feature.name, &value, &size, nullptr, 0)) return feature.bit == DOTPROD.bit;  // unknown to macOS 11
    return value;
#elif defined(_WIN32)
    return IsProcessorFeaturePresent(feature.number);
#else
    return 0;
#endif
}

// Whether matrix products are faster than dot products. Apple's and Qualcomm's cores run them at half the rate.
[[maybe_unused]] static int multiplies_pairs_fast() {
#if defined(__APPLE__)
    return 0;
#else
    unsigned long long id = 0;  // the upper byte says who made the core
    if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/regs/identification/midr_el1", "r")) {
        if (std::fscanf(file, "%llx", &id) != 1) id = 0;
        std::fclose(file);
    }
    return id >> 24 != 0x51 && id >> 24 != 0x61;
#endif
}
#endif
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
    int yes = 1, gains = 1;
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
#elif defined(__aarch64__)
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    yes = yes && has(BF16);
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
    yes = yes && has(I8MM), gains = multiplies_pairs_fast();
#endif
#if defined(__ARM_FEATURE_DOTPROD)
    yes = yes && has(DOTPROD);
#endif
#endif
    return yes * (2 - gains);
}
