// In the emulation everything is in one header.
#include "cuda_runtime.h"
