"""The version of the installed package, which pyproject.toml states; of sources that are not installed it is not known."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vmoer")
except PackageNotFoundError:
    __version__ = "0+sources"
