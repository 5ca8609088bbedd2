#define MUSTER_ISA portable_updates
#include "model/update_kernels.inl"
