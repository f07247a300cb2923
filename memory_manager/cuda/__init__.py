"""The calls of the CUDA driver that the backends for GPU memory need.

`driver` has the interface, `nvidia` implements it with NVIDIA's driver, and `nvml` reads how much
memory of a GPU is in use.
"""
