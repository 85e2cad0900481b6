#if defined(__x86_64__) && !defined(METALCTL_LEFT_OUT)
#include "bodies.h"

METALCTL_TABLE(avx2_kernels, "avx2")
#else
#include "kernels.h"

const metalctl::Kernels* metalctl::avx2_kernels() { return nullptr; }
#endif
