// What every machine of the architecture has: SSE2 on x86-64, NEON on ARM (built there for the machine itself, so that
// the dot product instructions are used where they exist).
#include "bodies.h"

METALCTL_TABLE(baseline_kernels, "baseline")
