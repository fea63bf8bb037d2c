"""transformers' own models of the families' configs, with random weights that all count."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from families import CONFIGS


@cache
def libraries() -> tuple[Any, Any]:
    """torch and transformers; the test is skipped where they are not installed."""
    return pytest.importorskip("torch"), pytest.importorskip("transformers")


def random_model(name: str, scale_of: Callable[[str], float]) -> Any:
    """A model of ``CONFIGS[name]``: parameters with the deviation their name gives, norms around what they are."""
    torch, transformers = libraries()
    torch.manual_seed(0)
    kept = {k: v for k, v in CONFIGS[name].items() if k not in ("architectures", "model_type")}
    config = transformers.AutoConfig.for_model(CONFIGS[name]["model_type"], **kept)
    config._attn_implementation = "eager"  # the one with soft caps
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            start = parameter.clone() if "norm" in key else torch.zeros_like(parameter)
            parameter.copy_(start + scale_of(key) * torch.randn_like(parameter))
    return model
