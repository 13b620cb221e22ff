// The CUDA kernels of all operators but AddLayerNormGrad, in one compilation: each file by itself would read CUDA's headers
// again for every architecture, a second each.
#include "adamw/cuda.cu"
#include "add_layer_norm/cuda.cu"
#include "attention/cuda.cu"
#include "batch_norm_grad/cuda.cu"
#include "cross_entropy/cuda.cu"
#include "embedding_grad/cuda.cu"
#include "gelu_grad/cuda.cu"
#include "max_pool_grad/cuda.cu"
#include "relu_grad/cuda.cu"
