"""Kernels for CUDA GPUs; what needs triton or flash-attn asks for them in available.py alone.

    dense.py      rows side by side: flash-attn, else torch's own FlashAttention
    scattered.py  rows anywhere: a Triton kernel; without it flex.py, then masked.py
    packed.py     many chunks in one launch: flash-attn's variable lengths
    place.py      stored keys rotated and put into the cache in one launch a layer
    staging.py    stored layers on their way to the device        graphs.py  steps without their launches

Everything imports and runs without a GPU, triton or flash-attn.
"""
