"""The one exception that is the user's to mend: the command prints its text, without a traceback, and exits with 3."""


class UserError(ValueError):
    """Bad input or an impossible request. The text says what is wrong, where, and what to change."""
