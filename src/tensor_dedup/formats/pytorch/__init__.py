"""Checkpoints of torch.save (`.pt`, `.pth`, `.bin`), read without torch and without running them.

A file is a zip of a pickle and one entry for each storage. archive.py finds the entries, opcodes.py
and machine.py evaluate the pickle to inert values, allowed.py says which globals those may name,
naming.py gives the tensors their names, geometry.py finds their bytes, reader.py puts it together.
"""
