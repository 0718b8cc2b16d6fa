"""Copies between tensors: Triton kernels, each beside its plain torch reference."""
