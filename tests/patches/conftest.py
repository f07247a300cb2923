"""What the tests of the patches share."""

import pytest

import tiny_checkpoints as checkpoints


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny llama: the path of its folder."""
    return str(checkpoints.make("llama", tmp_path_factory.mktemp("llama")).base)
