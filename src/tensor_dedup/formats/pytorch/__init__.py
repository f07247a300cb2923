"""Checkpoints of torch.save (`.pt`, `.pth`, `.bin`), read without torch and without running them.

A file is a zip of a pickle and one entry for each storage. `archive` finds the entries, `opcodes`
cuts the pickle into instructions, `machine` evaluates them to the inert `values` and says which
globals they may name, `naming` gives the tensors their names, `geometry` finds their bytes, and
`reader` puts it all together.
"""
