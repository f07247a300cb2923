"""The names by which tensorcas is imported, for programs that were written for it.

    from tensorcas.store import TensorCasStore
    from tensorcas.adapters.pytorch import PyTorchAdapter

Everything here is tensor-dedup's own, from `tensor_dedup.training`, under a second name.
"""
