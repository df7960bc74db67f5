"""The import name: hands on everything of :mod:`lily_py`; ``python -m lily`` is the command line."""

from lily_py import *  # noqa: F403
from lily_py import __version__ as __version__
