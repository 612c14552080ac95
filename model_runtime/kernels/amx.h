// The processor's matrix unit (Intel AMX): permission to use it and the shapes of its registers. For products of
// integers (integer_amx.h) and of floats (linear_amx.cpp).
#pragma once

#include <cstdint>

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && \
    defined(__linux__)
#define HAVE_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

// Whether the system lets this process use the unit; it must be asked once.
inline bool allowed() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// What `ldtilecfg` reads: rows of each register and bytes of a row.
struct alignas(64) Shapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// The unit's registers of the calling thread, in these shapes until the end of this object.
struct Registers {
    explicit Registers(const Shapes& shapes) {
        asm volatile("" ::"r"(&shapes) : "memory");  // GCC's intrinsic says that it reads the first 8 bytes alone
        _tile_loadconfig(&shapes);
    }
    ~Registers() { _tile_release(); }
    Registers(const Registers&) = delete;
};

}  // namespace amx

#endif
