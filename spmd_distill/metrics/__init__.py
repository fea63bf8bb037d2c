"""What a run measured: ``metrics.jsonl`` and TensorBoard while it trains, a picture and a table at its end.

A line of ``metrics.jsonl`` is one JSON object: ``step`` (optimizer steps done), ``split`` (``"train"`` or
``"eval"``), ``seconds`` (wall clock since the run began; a resumed run counts on), and one key a metric. What
is no finite number is null, and ``nonfinite`` then says what it was: ``{"loss": "nan"}``. Where there are several
held-out sets, an evaluation writes a line for all of them together, and after it one for each with its name under
``set``. Metrics in use:

* ``loss``, the weighted sum, and every term's own value, without its weight, under the term's name: ``forward_kl``;
* ``kl kl_reverse ce_student ce_teacher entropy_student entropy_teacher``, nats a token, with ``perplexity_student``
  and ``perplexity_teacher``, the exponentials of the two CE; ``top1`` and ``acceptance``, fractions of 1;
* ``learning_rate``, and what else a schedule moves: ``forward_kl.weight``, ``forward_kl.temperature``,
  ``skew_kl.skew``, each as it was used in the step;
* ``grad_norm``, ``tokens`` (the valid tokens trained on);
* ``tokens_per_second``, ``flops_per_second`` (model operations), ``mfu`` where the peak of the devices is known, and
  ``data_wait``, the share of the time spent waiting for batches: see `throughput`.

A line of ``train`` is about the steps since the line before it (``logging.every``): averages over their valid tokens,
of ``grad_norm``, ``clipped`` and ``skipped`` over the steps; schedules and totals are those of its own step. In
TensorBoard and other sinks the same numbers are ``train/loss``, ``eval/kl``, and ``eval/SET/kl``.

`metrics.steplog`, which fetches the numbers from the devices, imports jax and is not imported here.
"""

from spmd_distill.metrics.plots import plot_curves
from spmd_distill.metrics.reading import Line, read_metrics
from spmd_distill.metrics.similarity import plot_similarity
from spmd_distill.metrics.sinks import Sink, Wandb, check_wandb
from spmd_distill.metrics.table import comparison_table, perplexity, results_table
from spmd_distill.metrics.throughput import CLOCKED, Meter, Work
from spmd_distill.metrics.writer import MetricWriter

__all__ = [
    "CLOCKED",
    "Line",
    "Meter",
    "MetricWriter",
    "Sink",
    "Wandb",
    "Work",
    "check_wandb",
    "comparison_table",
    "perplexity",
    "plot_curves",
    "plot_similarity",
    "read_metrics",
    "results_table",
]
