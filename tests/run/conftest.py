"""What tests of whole runs share."""

from collections.abc import Iterator

import pytest
from tiny import lighten


@pytest.fixture(scope="module")
def light() -> Iterator[None]:
    """Runs of one module with the same settings share their programs; see `lighten`."""
    with pytest.MonkeyPatch.context() as patch:
        lighten(patch)
        yield
