#define MUSTER_ISA avx512_updates
#include "model/update_kernels.inl"
