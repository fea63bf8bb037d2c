"""The exported student computes in transformers what it computes here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_run

from spmd_distill.collectives import axis_index
from spmd_distill.head.base import logits_of
from spmd_distill.loading import open_checkpoint
from spmd_distill.mappers import make_mapper
from spmd_distill.models import Shard
from spmd_distill.train import distil
from spmd_distill.types import Batch

pytestmark = pytest.mark.parity


def our_logits(folder, tokens: np.ndarray, mesh: str) -> np.ndarray:
    """Logits ``[B, L, V]`` of a Hugging Face folder on a layout."""
    checkpoint, mapper = open_checkpoint(str(folder)), make_mapper("shard_map", mesh)
    layout, model = mapper.layout, checkpoint.model
    params = checkpoint.load(mapper)

    def body(params, batch):
        out = model.apply(params, batch, Shard(layout, jnp.dtype("float32")))
        return logits_of(out, out.hidden, axis_index("model") * out.unembed.shape[0])[0]

    rows = layout.spec(("batch", None))
    run = mapper.map(body, (model.specs(layout), Batch(*(rows,) * 5)), layout.spec(("batch", "vocab")))
    ones = np.ones_like(tokens)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    logits = jax.jit(run)(params, Batch(tokens, tokens, ones > 0, positions, ones))
    return np.asarray(logits)[:, : model.config.vocab_size].reshape(*tokens.shape, -1)


def test_transformers_gives_the_students_logits(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    distil(tiny_run(tmp_path, "--steps", "2"), console=Console(quiet=True))
    folder = tmp_path / "run" / "student"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, 258, (4, 24)).astype(np.int32)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    for mesh in ("single", "dp2_tp4"):
        np.testing.assert_allclose(our_logits(folder, tokens, mesh), expected, atol=2e-4 * np.abs(expected).max())
    text = transformers.AutoTokenizer.from_pretrained(folder)
    assert text("to be or not")["input_ids"] == open_checkpoint(str(folder)).tokenizer.encode("to be or not").tolist()
