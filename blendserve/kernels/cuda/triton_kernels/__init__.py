"""Triton kernels. Importing a module here imports triton: ask blendserve.kernels.cuda.available first."""
