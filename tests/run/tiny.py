"""A tiny teacher on disk, a little text, and a run file over both: a whole run in seconds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from spmd_distill.config import RunConfig, parse_config
from spmd_distill.interop import TextTokenizer, save_huggingface

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 258,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}


def tiny_tokenizer() -> TextTokenizer:
    """One token a byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return TextTokenizer(tokenizer, {"bos": "<s>", "eos": "</s>", "pad": "</s>"})


def tiny_teacher(folder: Path, rows: int = 258) -> Path:
    """Write a random model as a Hugging Face folder, its embedding with ``rows`` for the tokenizer's 258 tokens."""
    random = np.random.default_rng(0)
    d, f, h, k, c = 48, 40, 6, 3, 8
    weights = {"model.embed_tokens.weight": random.normal(size=(rows, d)) * 0.5, "model.norm.weight": np.ones(d)}
    for layer in range(SIZES["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (h * c, d), "self_attn.k_proj": (k * c, d), "self_attn.v_proj": (k * c, d),
            "self_attn.o_proj": (d, h * c), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
        }  # fmt: skip
        weights |= {f"{name}{n}.weight": random.normal(size=s) * 0.3 for n, s in shapes.items()}
        weights |= {f"{name}{n}.weight": np.ones(d) for n in ("input_layernorm", "post_attention_layernorm")}
    arrays = {n: w.astype(np.float32) for n, w in weights.items()}
    return save_huggingface(folder, SIZES | {"vocab_size": rows}, arrays, tiny_tokenizer())


def tiny_run(folder: Path, *flags: str) -> RunConfig:
    """A run file's settings: 2 of 4 layers, rows of 16 tokens, 6 steps, a checkpoint every 2."""
    if not (folder / "teacher").exists():
        tiny_teacher(folder / "teacher")
    if not (folder / "text").exists():
        (folder / "text").mkdir()
        for i in range(12):
            words = np.random.default_rng(i).choice(["to", "be", "or", "not", "that", "is", "question"], 60)
            (folder / "text" / f"{i:02}.txt").write_text(" ".join(words) + "\n")
    return parse_config(
        [
            "--run", str(folder / "run"), "--steps", "6", "--mesh", "dp2_tp4",
            "--teacher.path", str(folder / "teacher"), "--student.layers", "[0,3]", "--student.dropout", "0.1",
            "--data.train", f"[{folder / 'text'}]", "--data.length", "16", "--data.micro_batches", "2",
            "--data.cache", str(folder / "cache"),
            "--eval.rows", "8", "--eval.every", "3", "--eval.new_tokens", "4", "--eval.prompts", "[to be, or]",
            "--checkpoint.every", "2", "--optimizer.warmup_steps", "2",
            *flags,
        ]
    )  # fmt: skip


def lighten(patch: Any) -> None:
    """Let runs of this process whose settings differ in nothing but the folder share their programs, and draw nothing.

    Most of a tiny run's time is tracing, which is the same each time. Not for tests of what is compiled or said of it.
    ``patch`` is a `pytest.MonkeyPatch`.
    """
    from spmd_distill import fitting, train
    from spmd_distill.step import Distillation

    def once(make: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
        made: dict[Any, Any] = {}

        def call(*args: Any) -> Any:
            if (name := key(*args)) not in made:
                made[name] = make(*args)
            return made[name]

        return call

    set_up = once(train.set_up, lambda config, say, start: (repr(replace(config, run="")), start))
    patch.setattr(train, "set_up", lambda config, *rest: replace(set_up(config, *rest), config=config))
    # the set-ups above are kept, so that equal runs are those of the same models
    patch.setattr(train, "work_of", once(train.work_of, lambda setup, batch: (setup.run, batch.tokens.shape)))
    compiled = once(fitting.compile_train_step, lambda run, tx, batch, skip: (run, batch.tokens.shape, skip))
    patch.setattr(fitting, "compile_train_step", compiled)
    patch.setattr(Distillation, "eval_step", once(Distillation.eval_step, lambda run: run))
    patch.setattr(train, "plot_curves", lambda folder: None)


def train_until_first_checkpoint(config: RunConfig) -> None:
    """Begin a run and break it off once its first checkpoint lies on disk."""

    import pytest  # this module is read by a process of its own too, which sets its devices before jax starts
    from rich.console import Console

    from spmd_distill.checkpoint import Checkpoints
    from spmd_distill.train import distil

    class Cut(Exception):
        pass

    saves = Checkpoints.save

    def save_once(self, step, state, meta, mark=None):
        saves(self, step, state, meta, mark)
        self.wait()
        raise Cut

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(Checkpoints, "save", save_once)
        distil(config, console=Console(quiet=True))


def as_flags(objective: str) -> list[str]:
    """Flags for what stands under ``objective:`` in a run file."""
    settings = yaml.safe_load(objective)
    return [x for k, v in settings.items() for x in (f"--objective.{k}", v if isinstance(v, str) else json.dumps(v))]
