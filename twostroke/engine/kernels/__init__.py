"""Triton kernels for GPUs, one a file, each with the function that launches it and a torch reference to be tested against."""
