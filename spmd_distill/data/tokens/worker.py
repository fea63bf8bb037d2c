"""A process that encodes: reads a job and ranges of records from its input, writes chunks to its output."""

import os
import pickle
import signal
import sys

from spmd_distill.data.tokens.pool import answer


def main() -> None:
    """Work until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    wanted, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anyone prints must not get between the answers
    try:
        job = pickle.load(wanted)
        while True:
            pickle.dump(answer(job, pickle.load(wanted)), out)
            out.flush()
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
