"""The few calls of the CUDA driver that device memory needs: an interface, NVIDIA's, and a fake."""
