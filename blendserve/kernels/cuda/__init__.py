"""Kernels for CUDA GPUs.

    scattered.py  attention for rows at any positions, in Triton; of contiguous rows: ../sdpa.py
    place.py      stored keys rotated and copied into the cache in one launch a layer
    graphs.py     CUDA graphs of decoding steps

Everything imports and runs without a GPU or Triton.
"""
