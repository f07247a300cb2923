"""The codecs of a store: lossless encodings that make the bytes of tensors smaller.

    interface     the protocol of a codec, and the names of all codecs
    streams       compressed byte streams with bounds, made of words and their planes
    planes        `planes`, `xor`, `diff`: planes of words, alone or of what differs from a base
    byte_delta    `step`: small differences from a base, one byte each
    sparse        `sparse`: the few words that differ from a base
    records       an encoded tensor, chunk by chunk
    leaves        `leaves`: a tensor that has some leaves in common with another, of any size
    parts         `parts`: a tensor whose changed leaves are pieces of their own
    choice        the codecs themselves, and which one a tensor gets, measured on samples

Nothing here opens files, knows dtypes or trusts its input: whoever reads a tensor compares its
bytes with its digest.
"""
