"""What can go wrong, said in one line."""


class InputError(ValueError):
    """Something the caller gave is wrong: the command line prints the message alone and exits with code 2."""


class AttachError(InputError):
    """A router cannot be attached to this model; the message says why, and the model is unchanged."""


class RunError(RuntimeError):
    """The work itself failed: the command line prints the message alone and exits with code 1."""
