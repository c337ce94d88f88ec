"""Triton kernels for GPUs: one a file, each with the function that launches it.

A launch takes tensors and starts the kernel; it chooses nothing and checks nothing. What goes with what is checked
once, where a backend is made over a cache (`engine/attention/gpu.py`). Numbers of warps and of stages are stated at
each launch: nothing is tuned while requests wait.
"""
