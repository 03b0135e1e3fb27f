"""Triton kernels. Importing a module here imports triton: ask blendserve.gpu.available first."""
