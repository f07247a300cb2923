"""Folders as ServerlessLLM writes them: `tensor.data_0`, ... and what describes them. No torch.

`tensor_index` is the index of the tensors, in JSON or CBOR; `storage_graph` rebuilds one from an
artifact's storages and aliases; `artifact` holds the descriptor and the verification files beside
it; `data_files` reads a folder's data files as other formats' files of weights are read.
"""
