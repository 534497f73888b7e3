"""What can go wrong, said in one line."""

import difflib
import errno
import sys
from collections.abc import Iterable


class InputError(ValueError):
    """Something the caller gave is wrong: the command line prints the message alone and exits with code 2."""


class AttachError(InputError):
    """A router cannot be attached to this model; the message says why, and the model is unchanged."""


class RunError(RuntimeError):
    """The work itself failed: the command line prints the message alone and exits with code 1."""


def unknown(kind: str, name: str, known: Iterable[str], more: str = "") -> InputError:
    """The error for a name that is not among the known ones. It names those that look alike; `more` ends the list."""
    known = list(known)
    return InputError(f"unknown {kind} {short(name)}{alike(name, known)} (known: {', '.join(known)}{more})")


def alike(name: str, known: Iterable[str], before: str = "") -> str:
    """The end of a line about a name that is not there: those that look like it, with what stands before each of them."""
    close = difflib.get_close_matches(name, known)
    return f"; did you mean {' or '.join(before + one for one in close)}?" if close else ""


def is_number(value: object, whole: bool = False) -> bool:
    """Whether this is a finite number that a float can hold; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        return False
    return abs(value) <= sys.float_info.max


def of_files(error: OSError) -> str:
    """What the system says of a file, in a line of ours."""
    where = f"{error.filename}: " if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    more = "; make room and run the same command again" if full else ""
    return f"{where}{error.strerror or error}{more}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class where the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def short(value: object) -> str:
    """A value as an error quotes it: whoever wrote a file may have written anything into it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
