#define MUSTER_ISA avx512_updates
#include "optim/kernels.inl"
