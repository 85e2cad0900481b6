#if defined(__x86_64__) && !defined(METALCTL_LEFT_OUT)
#include "bodies.h"

METALCTL_TABLE(avx512_kernels, "avx512")
#else
#include "kernels.h"

const metalctl::Kernels* metalctl::avx512_kernels() { return nullptr; }
#endif
