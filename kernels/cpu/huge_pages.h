// Memory for packed matrices, beside the C library's heap.
#pragma once

#include "mlx/array.h"

namespace metalctl {

// Gives `a` memory in pages of 2 MB where the system has them: it is ready sooner and read faster, the matrices of a
// model lie together, and all of it is gone with them. False where MLX's arrays do not lie in plain memory.
bool lay_in_huge_pages(mlx::core::array& a);

}  // namespace metalctl
