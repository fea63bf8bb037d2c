"""A whole run: from a run file to a folder with a trained student in it."""

import contextlib
import time
from dataclasses import replace
from typing import Any, Literal

import jax
from rich.console import Console
from rich.markup import escape

from spmd_distill.build import Setup, load_text, prepare, set_up
from spmd_distill.config import DistributedConfig, RunConfig, to_dict
from spmd_distill.distributed import all_or_none, check_alike, check_same, is_first, join
from spmd_distill.finish import compiled_facts, export_student, summarise, work_of
from spmd_distill.fitting import FittingStep
from spmd_distill.guards import Events, Watch, check_memory
from spmd_distill.loop import Loop, Result
from spmd_distill.metrics import Sink, Wandb, check_wandb, plot_curves, results_table
from spmd_distill.pairing import pair_layers
from spmd_distill.progress import TrainProgress
from spmd_distill.resuming import Session, changes_table, resumable
from spmd_distill.saving import Saver


def distil(
    config: RunConfig,
    *,
    resume: bool | Literal["auto"] = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Run a whole distillation; return what ``summary.json`` holds.

    ``resume`` goes on from the newest good checkpoint of ``config.run``, on the mesh and mapper of ``config``: bit for
    bit on the same mesh, to float32 rounding on another; ``"auto"`` does so where there is a run, and else starts one.
    Settings that would make it another training are refused unless ``allow_changes``.

    Raises `UserError` for whatever the user can mend, and `Interrupted` after SIGINT, SIGTERM or a preemption notice,
    with all of the run saved.
    """
    began = time.monotonic()
    console = console or Console(stderr=True)
    join(config.distributed)
    config = replace(config, distributed=DistributedConfig())  # where it runs is no setting of what is run
    check_alike(repr(config))
    all_or_none(lambda: check_wandb(config.logging.wandb), first_only=True)
    session = Session.begin(config, resume, allow_changes)
    folder, stop, asked, config = session.folder, session.stop, config, session.config
    if not is_first():
        console = Console(quiet=True)
    progress = TrainProgress(config.steps, console, enabled=is_first())
    with contextlib.ExitStack() as held:
        all_or_none(lambda: held.enter_context(folder.lock()), first_only=True)  # before anything is taken away again
        for part in (resumable(folder, fresh=not session.resume), stop, progress):
            held.enter_context(part)
        if session.changes:
            console.print(changes_table(session.changes))
        session.check()
        if config != asked:
            data = config.data
            progress.note(
                f"data.rows {data.rows}, data.micro_batches {data.micro_batches}: more did not fit in this run"
            )
        start = prepare(config, folder.path / "start", progress.stage, progress.note)
        with progress.stage("opening the teacher"):
            setup = all_or_none(lambda: set_up(config, progress.note, start))
        with progress.stage("tokenising the text"):
            corpus = all_or_none(lambda: load_text(setup, progress.note))
        same = "Give all hosts the same files, on a shared file system."
        check_same({"training text": corpus.train.fingerprint()}, same)
        if is_first():
            session.describe_machine()
        setup = pair_layers(setup, corpus.train, folder, session.has_checkpoints, progress.stage, progress.note)
        progress.note("\n".join([*corpus.notes, setup.introduction(corpus.train.valid_tokens)]))
        batch, mapper = corpus.loader(config.data, config.seed).batch(0), setup.run.mapper
        with progress.stage("compiling the training step"):
            step = FittingStep(setup, batch)
        setup, config = step.setup, step.setup.config
        loader = corpus.loader(config.data, config.seed)  # of the micro-batches that fit
        needed = None if step.compiled.memory is None else step.compiled.memory.total
        mine = [device for device in mapper.devices if device.process_index == jax.process_index()]
        all_or_none(lambda: check_memory(config, needed, mine, mapper.layout.batch_shards))
        work = work_of(setup, step.cut(batch))

        def begun(resume: bool) -> list[Sink]:
            if not is_first():
                return []
            folder.write_json("compiled.json", compiled_facts(step.setup, step.compiled, work))
            if config.logging.wandb.project is None:
                return []
            settings = to_dict(step.setup.config)
            return [Wandb(config.logging.wandb, folder.path, settings, resume, progress.note)]

        with progress.stage("placing the teacher's weights"):
            teacher = setup.pair.load_teacher(setup.run.mapper)
        stop.check()
        watch = Watch(config, Events(folder, progress.note, writes=is_first()))
        saver = Saver(setup, session, progress, loader, corpus.heldout, watch)
        loop = Loop(saver, step, teacher, corpus.heldout, work)
        result = loop.run(begun)
        stop.check()
        with progress.stage("continuing the prompts"):
            continued = loop.samples.at_end(result.step, result.params)
        stop.check()
        with progress.stage("exporting the student"):
            export_student(setup, result.params, folder, result.before, result.after)
        summary = summarise(
            setup,
            result.before,
            result.after,
            config.steps,
            result.tokens,
            time.monotonic() - began,
            result.tokens_per_second,
        )
        summary |= {"exported_step": result.step, "guards": watch.events.totals}

        def leave_results() -> None:
            folder.write_json("samples.json", continued)
            plot_curves(folder.path)
            folder.write_json("summary.json", summary)

        # The others wait here: where process 0 takes longer than five minutes to write, JAX would abort who has left.
        all_or_none(leave_results, first_only=True)
    _show(console, setup, session, result, continued, summary)
    return summary


def _show(
    console: Console, setup: Setup, session: Session, result: Result, continued: Any, summary: dict[str, Any]
) -> None:
    console.print(results_table(result.before, result.after, setup.run.objective.features))
    for sample in continued:
        console.print(f"\n[bold]{sample['prompt']}[/bold]", highlight=False)
        for who in ("teacher", "student"):
            console.print(f"  [cyan]{who}[/cyan]  {_one_line(sample[who])}", highlight=False)
    console.print(
        f"\n{summary['steps']} steps, {summary['tokens']:,} tokens, {summary['seconds']:.0f} s, "
        f"{summary['tokens_per_second']:.0f} tokens/s, peak memory {summary['peak_rss_gib']:.1f} GiB; "
        f"mesh {summary['mesh']}, mapper {summary['mapper']}, head {summary['head']}.\n"
        f"Student: {session.folder.student} ({_millions(setup.run.student)} of the teacher's "
        f"{_millions(setup.run.teacher.model)} parameters). Curves: {session.folder.curves}",
        highlight=False,
    )


def _millions(model: Any) -> str:
    return f"{model.parameter_count / 1e6:.3g}M"


def _one_line(text: str) -> str:
    return escape(" ".join(text.split()))
