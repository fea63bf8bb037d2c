"""A text file as one record."""

from etils import epath

from spmd_distill.data.base import AbstractSource, BadRecord, Record
from spmd_distill.data.sources.files import ByteFile, file_fingerprint
from spmd_distill.data.text import decode_text
from spmd_distill.errors import UserError


class TextFile(AbstractSource):
    """A ``.txt`` file: one record, whose ``text`` is all of it.

    Text is UTF-8; a byte-order mark is dropped and line ends become ``\\n``.
    """

    def __init__(self, path: epath.Path, name: str, shown: str, field: str):
        self.name = name
        self._shown = shown
        self._file = ByteFile(path)

    def __len__(self) -> int:
        """One."""
        return 1

    def __getitem__(self, index: int) -> Record:
        """The text. Raises `BadRecord` where it is empty or not UTF-8."""
        if index not in (0, -1):
            raise IndexError(index)
        data = b"".join(self._file.chunks())
        try:
            return Record({"text": decode_text(data)}, self._shown)
        except UserError as error:
            raise BadRecord(self._shown, str(error)) from None

    def fingerprint(self) -> str:
        """Of the file's bytes."""
        return file_fingerprint(self._file.path, "text")
