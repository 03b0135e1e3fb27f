"""Kernels for CUDA GPUs. available.py finds the optional packages triton and flash-attn.

    dense.py      contiguous rows: flash-attn, else torch's FlashAttention
    scattered.py  rows at any positions: a Triton kernel
    packed.py     many chunks in one launch: flash-attn's variable lengths
    place.py      stored keys rotated and copied into the cache in one launch a layer
    graphs.py     CUDA graphs of decoding steps

Everything imports and runs without a GPU, triton or flash-attn.
"""
