"""The codecs of a store: bytes in, fewer bytes out, and the same bytes again.

    interface   what a codec is; contract.py has the tests that every one must pass
    names       which there are                            registry    the codecs themselves
    streams     compressed byte streams with bounds        elements    words and their planes
    planes      planes: alone, of XOR, of differences      steps       small differences
    sparse      few differences                            places      a few places among many
    records     a tensor, chunk by chunk
    choosing    which codec a tensor gets, by measurement on samples

Nothing here touches files, knows dtypes or trusts what it decodes: whoever reads a tensor compares
its bytes with its digest.
"""
