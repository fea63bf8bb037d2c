"""A folder that a run writes to for days: is it still the one at its path?"""

import os
from pathlib import Path


class HeldFolder:
    """Holds a folder open, to know it again. Where it was moved away, orbax makes another one at its path."""

    def __init__(self, path: Path):
        self.path = path
        self._open: int | None = os.open(path, os.O_RDONLY)

    @property
    def there(self) -> bool:
        """Whether the folder at the path is the one that was opened; once released, whether there is any."""
        try:
            found = os.stat(self.path)
            return self._open is None or os.path.samestat(found, os.fstat(self._open))
        except OSError:
            return False

    def release(self) -> None:
        """Let go of the folder."""
        if self._open is not None:
            os.close(self._open)
            self._open = None
