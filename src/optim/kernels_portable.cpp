#define MUSTER_ISA portable_updates
#include "optim/kernels.inl"
