#define MUSTER_ISA portable_kernel
#include "node/kernels.inl"
