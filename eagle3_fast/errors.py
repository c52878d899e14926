"""The one error that means "the user's input is wrong"."""


class InputError(ValueError):
    """A file, config or command of the user cannot be used.

    The message is one line that says what was wrong, where, and what to do. The command line prints it and exits with code 2;
    every other exception is a fault of ours and keeps its traceback.
    """


class Interrupted(Exception):
    """A signal asked the run to end; everything needed to go on has been saved. The command line exits with code 75 (EX_TEMPFAIL)."""
