"""The demonstration: several fine-tunes of one base in one process, beside plain vLLM.

Run it by `scripts/demo`, which brings its own environment. Nothing here loads torch or vllm when
imported; engines and the making of checkpoints run in processes of their own.
"""
