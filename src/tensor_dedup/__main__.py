"""Command `python -m tensor_dedup`: the command line, for when its script is not on the path."""

from tensor_dedup.cli import main

if __name__ == "__main__":
    main(prog_name="python -m tensor_dedup")
