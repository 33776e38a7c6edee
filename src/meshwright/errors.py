"""The one exception that stands for a mistake of the user's, and how it leaves the program."""


class UserError(Exception):
    """Something the user can put right: one clear sentence, no traceback, exit status 2.

    The message says what is wrong, where, and what would be right.
    """


class RunFailed(Exception):
    """A run that started and failed: a rank died, hung, or met a loss that is not a number; exit status 1."""
