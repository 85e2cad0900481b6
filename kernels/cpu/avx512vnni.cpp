#if defined(__x86_64__) && !defined(METALCTL_LEFT_OUT)
#include "bodies.h"

METALCTL_TABLE(avx512vnni_kernels, "avx512-vnni")
#else
#include "kernels.h"

const metalctl::Kernels* metalctl::avx512vnni_kernels() { return nullptr; }
#endif
