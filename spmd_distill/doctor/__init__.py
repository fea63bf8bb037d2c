"""What is wrong with a machine or a run folder, said before it costs a run. Nothing here writes to disk.

`machine.check_machine` needs no jax in this process; `run.check_run` imports it and uses no device.
"""

from spmd_distill.doctor.finding import Finding, findings_table, plain, worst

__all__ = ["Finding", "findings_table", "plain", "worst"]
