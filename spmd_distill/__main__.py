"""``python -m spmd_distill``: the command ``spmd-distill``."""

import sys

from spmd_distill.cli import main

sys.exit(main())
