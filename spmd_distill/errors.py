"""The one exception type meant for users of the library, and what it says of files that cannot be written."""

import errno
import os


class UserError(ValueError):
    """Something the user gave is wrong, and the message says what, where and how to mend it.

    Every message names the thing, what was found, what was expected, and the fix. The command prints it without a
    traceback and exits with code 2; a library caller catches it as the `ValueError` it is. Mistakes of our own stay
    `AssertionError` or whatever Python raises, so that they are never mistaken for the user's.
    """


def cannot_write(path: str | os.PathLike[str], error: OSError) -> UserError:
    """What to raise where a file of a run cannot be written."""
    gone = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
    fix = "its folder is gone: was it moved or deleted?" if gone else "free some space, or take another --run"
    return UserError(f"{path}: cannot write: {error.strerror or error}; {fix}")
