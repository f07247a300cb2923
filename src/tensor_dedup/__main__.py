"""Entry point of `python -m tensor_dedup`: runs the same command line as `tensor-dedup`."""

from tensor_dedup.cli import main

if __name__ == "__main__":
    main(prog_name="python -m tensor_dedup")
