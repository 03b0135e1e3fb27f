"""The operations of the forward pass and their kernels: ops.py has the table. They take tensors, never a model."""
