"""The codecs of a store: lossless encodings that make the bytes of tensors smaller.

    interface     the protocol of a codec, and the names of all codecs
    streams       compressed byte streams of bounded size; words and their byte planes
    planes        `planes`, `xor`, `diff`: byte planes of a tensor, or of its difference from a base
    steps         `step`, `nibble`: small differences from a base, a byte or half a byte for each
    sparse        `sparse`: positions and values of the few elements that differ from a base
    records       the layout of an encoded tensor, one chunk for each leaf
    leaves        `leaves`: a tensor that shares some leaves with a base, of any size
    parts         `parts`: a tensor whose changed leaves are stored as pieces of their own
    choice        the codec objects, and the choice of a codec by measurement on samples

A leaf is 2 MiB of a tensor, counted from its start (the last leaf may be shorter). A base is
another stored tensor that an encoded one is decoded against. A piece is anything that a store keeps
under a digest: a tensor, a file header or a small file.

No module here opens files or knows dtypes. Decoders do not trust their input, and the caller
compares the decoded bytes with the tensor's digest.
"""
