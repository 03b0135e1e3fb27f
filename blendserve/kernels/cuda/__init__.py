"""Kernels for CUDA GPUs. Everything imports and runs without a GPU, Triton or flash-attn."""
