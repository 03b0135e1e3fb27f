"""What runs on a CUDA GPU, and needs triton or flash-attn, which are asked for in available.py alone.

    dense.py      rows side by side: flash-attn, else torch's own FlashAttention
    attention.py  rows anywhere: a Triton kernel; without it flex.py, then masked.py
    place.py      stored keys rotated and put into the cache in one launch a layer

Everything imports and runs without a GPU, triton or flash-attn; blend/attention.py chooses among them. A kernel serves
only after it gave the formula's numbers on this very GPU (proven.py).
"""
