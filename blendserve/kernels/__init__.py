"""The operations that someone must compute: ops.py has the table. They take tensors and a rotary form, never a model."""
