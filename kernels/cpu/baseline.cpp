// What every machine of the architecture has: SSE2 on x86-64, NEON on ARM (built there for the machine itself, so that
// the dot product instructions are used where they exist).
#if !defined(METALCTL_LEFT_OUT)
#include "bodies.h"

METALCTL_TABLE(baseline_kernels, "baseline")
#else
#include "kernels.h"

const metalctl::Kernels* metalctl::baseline_kernels() { return nullptr; }
#endif
