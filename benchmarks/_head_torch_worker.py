"""Worker of `head.py`: one head in torch on CPU, in an environment of its own.

``trl`` is the loss of TRL's GKD trainer at beta 0, which is forward KL, written out here: TRL itself is not needed.
``liger`` is Liger-Kernel's chunked distillation loss. ``{"time": name, "mask": mask}`` runs it once and answers with
its seconds, the loss, and how far the process has ever been above what it held before the call: the first time, that is
what the call needs.
"""

import argparse
import importlib.metadata
from typing import Any

import torch
import torch.nn.functional as F
from _head_problem import ALPHA, TEMPERATURE, add_flags, from_flags
from _worker import Channel, peak_rss, resident, stopwatch

IGNORED = -100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=["trl", "liger"], required=True)
    parser.add_argument("--chunk", type=int, default=128, help="tokens a chunk of Liger's")
    add_flags(parser)
    options = parser.parse_args()
    channel, problem = Channel(), from_flags(options)
    head = trl if options.head == "trl" else liger(options.chunk)
    package = "torch" if options.head == "trl" else "liger-kernel"
    channel.say({"version": importlib.metadata.version(package)})
    h_s, w_s, h_t, w_t, labels = map(torch.from_numpy, problem.inputs())
    students = [x.requires_grad_() for x in (h_s, w_s)]
    for request in channel.requests():
        counted = labels.long().masked_fill(~torch.from_numpy(problem.mask(request["mask"])), IGNORED)
        for x in students:
            x.grad = None
        before = resident()
        with stopwatch() as found:
            loss = head(h_s, w_s, h_t, w_t, counted)
            loss.backward()
        channel.say(found | {"loss": loss.item(), "growth": peak_rss() - before})
        del loss


def trl(h_s: Any, w_s: Any, h_t: Any, w_t: Any, labels: Any) -> Any:
    """`generalized_jsd_loss` at beta 0, times T^2 as in all others here, and the cross-entropy beside it."""
    z_s = h_s @ w_s.T
    with torch.no_grad():
        z_t = h_t @ w_t.T
    log_s, log_t = (F.log_softmax(z / TEMPERATURE, dim=-1) for z in (z_s, z_t))
    kl = F.kl_div(log_s, log_t, reduction="none", log_target=True)
    valid = labels != IGNORED
    kl = kl[valid].sum() / valid.sum()
    return ALPHA * TEMPERATURE**2 * kl + (1 - ALPHA) * F.cross_entropy(z_s, labels, ignore_index=IGNORED)


def liger(chunk: int) -> Any:
    """Uncompiled: its compiled form is for GPUs."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    return LigerFusedLinearJSDLoss(
        weight_hard_loss=1 - ALPHA,
        weight_soft_loss=ALPHA * TEMPERATURE**2,
        beta=0.0,
        ignore_index=IGNORED,
        temperature=TEMPERATURE,
        compiled=False,
        chunk_size=chunk,
    ).forward


if __name__ == "__main__":
    main()
