#define MUSTER_ISA avx2_kernel
#include "node/kernels.inl"
