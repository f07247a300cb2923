"""The calls of the CUDA driver that device memory needs: a protocol, and NVIDIA's driver."""
