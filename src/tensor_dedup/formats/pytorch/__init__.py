"""Checkpoints of torch.save (`.pt`, `.pth`, `.bin`), read without torch and without running code.

A file is a zip archive of a pickle and one entry for each storage. `archive` finds the entries,
`opcodes` cuts the pickle into instructions, and `machine` evaluates them to `values`, which are
plain data, and says which globals the pickle may name. `naming` gives the tensors their names,
`geometry` finds their bytes, and `reader` combines all of it.
"""
