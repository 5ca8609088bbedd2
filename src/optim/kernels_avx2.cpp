#define MUSTER_ISA avx2_updates
#include "optim/kernels.inl"
