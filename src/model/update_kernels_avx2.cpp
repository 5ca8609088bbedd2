#define MUSTER_ISA avx2_updates
#include "model/update_kernels.inl"
