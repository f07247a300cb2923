"""Build in a new folder: setuptools packs whatever lies in its build folder.

By default that is `build/` in the clone, where `pip install .` leaves all modules, and where the
next one packs them again, those that were deleted or renamed since as well. pyproject.toml, which
has everything else, can only name a folder that stays.
"""

import atexit
import shutil
import tempfile

from setuptools import setup
from setuptools.command.build import build


class Build(build):
    """The command `build`, into a folder that goes when the process ends."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = tempfile.mkdtemp(prefix="tensor-dedup-build-")
        atexit.register(shutil.rmtree, self.build_base, ignore_errors=True)


setup(cmdclass={"build": Build})
