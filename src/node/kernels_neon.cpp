#define MUSTER_ISA neon_kernel
#define MUSTER_NEON
#include "node/kernels.inl"
