#define MUSTER_ISA avx512_kernel
#include "node/kernels.inl"
