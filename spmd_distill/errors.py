"""The one exception type meant for users of the library."""


class UserError(ValueError):
    """Something the user gave is wrong, and the message says what, where and how to mend it.

    Every message names the thing, what was found, what was expected, and the fix. The command prints it without a
    traceback and exits with code 2; a library caller catches it as the `ValueError` it is. Mistakes of our own stay
    `AssertionError` or whatever Python raises, so that they are never mistaken for the user's.
    """
