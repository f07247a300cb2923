"""Checkpoint folders of ServerlessLLM and tensorcast: files `tensor.data_N` and their index.

`tensor_index` reads and writes the index of the tensors, in JSON or CBOR. `storage_graph` computes
an index from the storages of a state dict and the tensors in them. `artifact` reads and writes
tensorcast's descriptor and verification files. `data_files` gives each data file a header as other
weight files have it. No module here imports torch.
"""
