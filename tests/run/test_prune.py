"""The command that prunes, and runs whose student starts from what it wrote, from nothing, or elsewhere."""

import json

import jax
import numpy as np
import pytest
import yaml
from rich.console import Console
from safetensors import SafetensorError
from tiny import tiny_run, tiny_teacher, train_until_first_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from spmd_distill.build import set_up
from spmd_distill.cli import main
from spmd_distill.config import to_dict
from spmd_distill.errors import UserError
from spmd_distill.interop import TextTokenizer, export, save_huggingface, trim_tokenizer
from spmd_distill.loading import open_checkpoint
from spmd_distill.mappers import make_mapper
from spmd_distill.models import export_params
from spmd_distill.pretrained import load_pretrained, save_pretrained
from spmd_distill.prune import Keep, cut
from spmd_distill.prune.command import Wanted, prune
from spmd_distill.train import distil

QUIET = Console(quiet=True)
AS_IT_IS = ["--student.layers", "null", "--student.dropout", "0"]
"""The tiny run takes two layers of what its student starts from."""
SMALL = ["--mesh", "single", "--steps", "1", "--data.micro_batches", "1", "--eval.prompts", "[]"]
"""What compiles fastest."""


@pytest.fixture
def run(tmp_path):
    """A tiny run's settings; its teacher and text lie beside it."""
    return lambda *flags: tiny_run(tmp_path, *flags)


def arguments(tmp_path, *more: str) -> list[str]:
    text = ["--text", str(tmp_path / "text"), "--length", "16"]
    return ["prune", str(tmp_path / "teacher"), str(tmp_path / "small"), *text, *more]


def test_the_command_writes_a_folder_that_a_run_starts_from(run, tmp_path, capsys):
    run()
    flags = ["--depth", "2", "--mlp", "20", "--kv-heads", "2", "--width", "32", "--mesh", "dp2_tp4"]
    assert main(arguments(tmp_path, *flags)) == 0
    shown = capsys.readouterr().err
    assert "What was kept" in shown and "What it cost" in shown
    report = json.loads((tmp_path / "small" / "prune.json").read_text())
    assert report["kept"]["layers"] == [4, 2] and report["kept"]["query heads"] == [6, 4]
    assert report["kept"]["neurons of an MLP"] == [40, 20] and report["kept"]["width"] == [48, 32]
    assert report["heldout"]["KL to the teacher"][0] == pytest.approx(0, abs=1e-6)
    assert report["heldout"]["KL to the teacher"][1] > 0.01
    small = open_checkpoint(tmp_path / "small").model.config
    assert (small.layers, small.mlp, small.heads, small.kv_heads, small.width) == (2, 20, 4, 2, 32)
    config = run("--student.init", str(tmp_path / "small"), "--student.layers", "null", "--eval.prompts", "[]")
    setup = set_up(config)
    assert (setup.pair.student.config.width, setup.pair.layers) == (32, ())
    assert "small, 2 layers" in setup.introduction(1)
    summary = distil(config, console=QUIET)
    assert summary["kl_before"] > summary["kl_after"]
    assert load_pretrained(tmp_path / "run" / "student").model.config.width == 32


def test_a_trimmed_vocabulary(run, tmp_path):
    """Where only tokens are cut, teacher and student are the same model of the same tokens."""
    run()
    text = str(tmp_path / "text")
    report = prune(
        str(wordy_teacher(tmp_path / "wordy")),
        tmp_path / "small",
        Wanted(vocab_from=(text,), length=16),
        [text],
        console=QUIET,
    )
    old, new = report["kept"]["tokens"]
    small = open_checkpoint(tmp_path / "small")
    assert small.tokenizer.vocab_size == small.model.config.tokens == new < old
    assert report["heldout"]["KL to the teacher"] == [pytest.approx(0, abs=1e-6)] * 2
    assert report["heldout"]["cross entropy"][0] == pytest.approx(report["heldout"]["cross entropy"][1], rel=1e-5)


def test_a_teacher_is_cut_to_the_tokens_of_its_student(run, tmp_path):
    """A student whose tokenizer knows some of the teacher's tokens, in another order of ids."""
    run()
    words = wordy_teacher(tmp_path / "wordy")
    loaded = load_pretrained(words)
    trimmed, rows = trim_tokenizer(loaded.tokenizer, loaded.tokenizer.encode("to be or not").tolist())
    assert len(rows) < loaded.tokenizer.vocab_size
    params, model = cut(loaded.params, loaded.model, Keep(layers=(0, 1, 2, 3), tokens=rows), loaded.mapper)
    save_pretrained(tmp_path / "trimmed", model, params, like=loaded, tokenizer=trimmed)
    flags = ["--teacher.path", str(words), "--student.init", str(tmp_path / "trimmed"), *AS_IT_IS]
    setup = set_up(run(*flags))
    assert setup.pair.teacher.config.tokens == setup.pair.student.config.tokens == len(rows)
    np.testing.assert_array_equal(setup.pair.teacher_rows, rows)
    summary = distil(run(*flags, *SMALL), console=QUIET)
    assert summary["kl_before"] == pytest.approx(0, abs=1e-6)  # the same model, seen through the same tokens


def wordy_teacher(folder):
    """The tiny teacher with a tokenizer that has merges."""
    base = load_pretrained(tiny_teacher(folder.with_name("plain"), rows=300))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        ["to be or not to be that is the question whether tis nobler in the mind"] * 9, trainer
    )
    text = TextTokenizer(tokenizer, {"bos": "<s>", "eos": "</s>", "pad": "</s>"})
    rules = base.family.rules(base.model.config)
    config = {k: v for k, v in base.huggingface_config.items() if not k.endswith("_token_id")}
    return save_huggingface(folder, config, dict(export_params(base.params, rules)), text)


def test_a_random_student(run):
    config = run("--student.init", "random", *SMALL)
    setup = set_up(config)
    assert setup.pair.layers == () and setup.pair.student.config.layers == 2
    assert "2 random layers" in setup.introduction(1)
    assert distil(config, console=QUIET)["kl_before"] > 0.1


CUTS = ["--student.layers", "null", "--student.mlp", "20", "--student.heads", "2", "--student.kv_heads", "2"]


def test_a_run_prunes_its_student_once(run, tmp_path):
    config = run(*CUTS, "--student.depth", "3", "--student.order", "importance", "--eval.prompts", "[]")
    train_until_first_checkpoint(config)
    start = tmp_path / "run" / "start"
    kept = json.loads((start / "prune.json").read_text())
    assert kept["order"] == "importance" and kept["kept"]["layers"] == [4, 3] and len(kept["layers"]) == 3
    written = {path: path.stat().st_mtime_ns for path in start.iterdir()}
    distil(config, resume=True, console=QUIET)
    assert {path: path.stat().st_mtime_ns for path in start.iterdir()} == written
    student = open_checkpoint(tmp_path / "run" / "student").model.config
    assert (student.layers, student.mlp, student.heads, student.kv_heads) == (3, 20, 2, 2)
    card = (tmp_path / "run" / "student" / "README.md").read_text()
    assert "started from: start, 3 layers, pruned to 3 of 4 layers, 20 of 40 neurons of an MLP, 2 of 6 query" in card
    assert str(tmp_path) not in card
    proved = set_up(config).pair  # what verify proves: the sizes, with random parameters
    assert proved.student.config.mlp == 20 and proved.start is None


def test_a_random_student_of_other_sizes(run):
    pair = set_up(run(*CUTS, "--student.init", "random", "--student.width", "32")).pair
    sizes = pair.student.config
    assert (sizes.layers, sizes.mlp, sizes.heads, sizes.kv_heads, sizes.width) == (4, 20, 2, 2, 32)
    params = pair.start_student(None, make_mapper("shard_map", "single"), seed=0)
    assert params["layers"]["mlp"]["up"].shape == (4, 32, 20)


def test_tables_of_other_heights_line_up(run, tmp_path):
    """Models of one tokenizer pad their vocabularies differently."""
    tall = tiny_teacher(tmp_path / "tall", rows=400)
    run()
    for teacher, student in ((tall, tmp_path / "teacher"), (tmp_path / "teacher", tall)):
        flags = ["--teacher.path", str(teacher), "--student.init", str(student), *AS_IT_IS]
        pair = set_up(run(*flags)).pair
        assert pair.teacher.config.padded_vocab == pair.student.config.padded_vocab == 384
        assert pair.teacher.config.tokens == pair.student.config.tokens == 258
    summary = distil(run(*flags, *SMALL), console=QUIET)
    assert np.isfinite(summary["kl_before"])
    assert load_pretrained(tmp_path / "run" / "student").model.config.vocab_size == 258


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--student.mlp", "0"], "student.mlp is 0; it must be at least 1"),
        (["--student.order", "importance"], "student.layers are listed: student.order importance has nothing"),
        (["--student.layers", "null", "--student.order", "importance"], "expected student.depth beside it"),
        (["--student.init", "random", "--student.vocab_from", "[x]"], "student.vocab_from needs a model to choose"),
    ],
)
def test_settings_that_contradict_each_other(run, flags, message):
    with pytest.raises(UserError, match=message):
        run(*flags)


def test_a_student_whose_tokens_the_teacher_does_not_know(run, tmp_path):
    words = wordy_teacher(tmp_path / "wordy")
    with pytest.raises(UserError, match=r"(?s)tokenizer of the student .*wordy is not that of the teacher.*Expected"):
        set_up(run("--student.init", str(words), *AS_IT_IS))
    with pytest.raises(UserError, match="is not that of the teacher"):
        distil(run("--student.init", str(words)), console=QUIET)  # some of its layers
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        set_up(run("--student.init", str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--depth", "9"], "depth is 9; the teacher has 4 layers"),
        (["--depth", "0"], "depth is 0; it must be at least 1"),
        (["--depth", "2", "--layers", "0,1"], "layers and depth were both given"),
        (["--layers", "0,x"], "--layers is '0,x'; expected numbers"),
        (["--layers", "0,7"], "Layers [0, 7] were to be kept; expected some of 0 to 3"),
        (["--mlp", "41"], "mlp is 41; the teacher has 40"),
        (
            ["--heads", "3"],
            "2 query heads share a key/value head; expected a multiple of 2, or kv_heads",
        ),
        (["--heads", "3", "--kv-heads", "2"], "expected as many for each, one of 2, 4"),
        (["--mesh", "nosuch"], "No mesh layout is called 'nosuch'"),
        (["--mlp", "8", "--text", "nosuch.txt"], "nosuch.txt"),
        ([], "Nothing to cut"),
    ],
)
def test_mistakes_are_sentences(run, tmp_path, capsys, flags, message):
    run()
    assert main(arguments(tmp_path, *flags)) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown and "Traceback" not in shown
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("command", ["prune", "train"])
def test_a_disk_that_gets_full_is_a_sentence(run, tmp_path, capsys, monkeypatch, command):
    config = run(*SMALL)

    def full(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(export, "save_file", full)
    if command == "prune":
        assert main(arguments(tmp_path, "--layers", "0,1")) == 2
        assert not (tmp_path / "small").exists()
    else:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)))
        assert main(["train", str(tmp_path / "run.yaml"), "--steps", "1"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in shown and "Traceback" not in shown
    if command == "train":
        assert "safe in the checkpoints" in shown
        monkeypatch.undo()
        assert main(["train", "--resume", str(tmp_path / "run")]) == 0
        assert (tmp_path / "run" / "student" / "model.safetensors").exists()


def test_nothing_is_written_over(run, tmp_path, capsys):
    run()
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "mine.txt").write_text("mine")
    assert (
        main([*arguments(tmp_path, "--depth", "2")[:2], str(tmp_path / "small" / "mine.txt" / "x"), "--mlp", "1"]) == 2
    )
    assert "cannot be written (Not a directory)" in " ".join(capsys.readouterr().err.split())
    assert main(arguments(tmp_path, "--depth", "2")) == 2
    assert "expected a new or empty folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("init", ["teacher", "random", "path"])
@pytest.mark.parametrize(("teacher", "student"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_teacher_and_student_are_held_in_their_own_types(run, tmp_path, init, teacher, student):
    flags = ["--precision.teacher", teacher, "--precision.student", student]
    if init != "teacher":
        flags += ["--student.init", str(tiny_teacher(tmp_path / "other")) if init == "path" else init]
    setup = set_up(run(*flags))
    held = setup.pair.load_teacher(setup.run.mapper)
    start = setup.pair.start_student(held, setup.run.mapper, 0)
    assert {x.dtype.name for x in jax.tree.leaves(held)} == {teacher}
    assert {x.dtype.name for x in jax.tree.leaves(start)} == {student}


def test_attention_is_computed_by_what_the_run_file_says(run):
    setup = set_up(run("--teacher.attention", "xla", "--student.attention", "xla"))
    assert (setup.pair.teacher.config.attention, setup.pair.student.config.attention) == ("xla", "xla")
    with pytest.raises(UserError, match="in bfloat16 or float16, found float32"):
        distil(run("--steps", "1", "--teacher.attention", "cudnn"), console=QUIET)
