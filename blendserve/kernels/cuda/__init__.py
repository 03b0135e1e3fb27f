"""Kernels for CUDA GPUs.

    flash.py      attention of contiguous rows and of packed chunks by the package flash-attn; without it: ../sdpa.py
    scattered.py  attention for rows at any positions, in Triton
    place.py      stored keys rotated and copied into the cache in one launch a layer
    graphs.py     CUDA graphs of decoding steps

Everything imports and runs without a GPU, Triton or flash-attn.
"""
