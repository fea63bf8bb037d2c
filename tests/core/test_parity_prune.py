"""A model of every family, cut in every direction at once, computes in transformers what it computes here."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from families import CONFIGS
from prunable import ONE, batch_of, logits, model_of

from spmd_distill.errors import UserError
from spmd_distill.interop import save_huggingface
from spmd_distill.models import FAMILIES, export_params
from spmd_distill.prune import Keep, cut

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]  # their warnings are theirs


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cut_model_in_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with jax.enable_x64(True):
        model, params = model_of(name)
        if name == "phi3-long":
            with pytest.raises(UserError, match=r"phi3 model with long rotary factors.* heads of 6 channels"):
                Keep(channels=np.arange(30)).sizes(model.config)
            return
        c, group = model.config, model.config.heads // model.config.kv_heads
        pick = lambda n, count, seed: np.sort(np.random.default_rng(seed).permutation(n)[:count])  # noqa: E731
        neurons, groups = ([pick(n, k, s) for s in (1, 2)] for n, k in ((c.mlp, 20), (c.kv_heads, 2)))
        queries = [np.concatenate([g * group + pick(group, group - 1, g) for g in kept]) for kept in groups]
        keep = Keep(
            (0, 2), np.stack(neurons), np.stack(groups), np.stack(queries), pick(c.width, 28, 3), pick(131, 120, 4)
        )
        small, new = cut(params, model, keep, ONE)
        family, original = FAMILIES[CONFIGS[name]["architectures"][0]], CONFIGS[name]
        config = family.config_to_huggingface(new.config, original)
        assert replace(family.config_from_huggingface(config), param_dtype="float64") == new.config
        tokens = batch_of(120).tokens
        expected = logits(new, small).reshape(*tokens.shape, -1)
        folder = save_huggingface(tmp_path / "small", config, dict(export_params(small, family.rules(new.config))))
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    first = slice(0, 7)  # one document: they know of no segments
    with torch.no_grad():
        found = theirs(torch.tensor(tokens[:, first], dtype=torch.long)).logits.numpy()
    np.testing.assert_allclose(found, expected[:, first], rtol=1e-5, atol=1e-5)
