"""The steps of a run that all recipes share. A copied recipe can use them unchanged.

    run = Run(args)                                   validates flags and launch, connects the processes
    run.begin(config, tokenizer, train_set, held_out) checks data and disk; with --resume rejects changed settings
    model, optimizer = run.prepare(...)               creates loaders, prints the run summary, moves the model to device
    with run.training(config, tokenizer) as batches:  creates the output directory; with --resume loads the checkpoint
        for batch in batches:
            for micro_batch, is_last in run.micro_batches(batch): ...  on the device; --dry_run: only the first
            if run.all_finite(batch, loss_sums, grad_norm): ...        same result on all ranks: step, or skip
            metrics = run.evaluations.after_update(evaluate, model)    evaluates if due
            if run.end_update(batch, **metrics): break                 writes metrics; saves a checkpoint if due
    results = run.end_training()                      exits here after a request to stop
    run.write_model("AutoModelFor...", tokenizer)     model/ (all-gathered if sharded), model card, results so far
    with run.optional_steps(): ...                    final metrics and samples; an error there prints one line
    run.finish(results, ...)                          prints and saves the results, ends all ranks together

Forward, backward, clipping and step are in the recipe.
"""

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from common import argument_checks, versions
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints
from common.checkpoint.training_state import TrainingState
from common.errors import raise_errors
from common.evaluation import Evaluations
from common.models import adapters, model_setup
from common.models.load import attention_length
from common.parallel import connect, distributed_mode, launch, launch_checks, liveness, shutdown
from common.parallel.liveness import wait_for_all
from common.process import this_process
from common.report import flops, progress, tracking
from common.training import accumulation
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import Collate, GlobalBatch, Samples, make_loader
from common.training.precision import weights_cast_once
from common.training.recipe_traits import Arguments, Traits
from common.training.stop_signals import NOTHING_TRAINED


class Run:
    """A run of a recipe. All ranks call its methods together, in the order of their definition."""

    def __init__(self, args: Arguments, problems: Iterable[str] = (), **traits: Any):
        """Validates the flags and the launch, and connects the processes. Raises UserError: one line per mistake.

        problems: mistakes in the recipe's own flags. traits: fields of `recipe_traits.Traits` that differ from lm.py.
        """
        versions.check_versions()
        self.args, self.launch_config, self.traits = args, launch.find_launch(), Traits(**traits)
        if args.plan is not None:
            from common import planner

            planner.hand_over(args)
        on_cpu = launch.runs_on_cpu(self.launch_config)
        flags = argument_checks.check_arguments(args, on_cpu, self.traits, self.launch_config.grid)
        raise_errors([*flags, *launch_checks.check_launch(self.launch_config, args, self.traits), *problems])
        self.accelerator = connect.make_accelerator(self.launch_config, args)
        self.device, self.is_sharded = self.accelerator.device, distributed_mode.is_sharded(self.accelerator)
        _resolve_auto(args)
        self.checkpoints, self.is_stopped = Checkpoints(args, self.accelerator), False
        self.evaluations = Evaluations(self)

    def begin(
        self,
        config: Any,
        tokenizer: Any,
        train_set: Samples,
        held_out: Samples | None,
        *own_flags: str,
        model_class: Any = AutoModelForCausalLM,
    ) -> None:
        """Checks the data before a model is built, and with --resume finds the newest valid checkpoint.

        Afterwards all ranks draw the same random numbers. own_flags: names of the recipe's own flags that affect an
        update. Raises UserError: no checkpoint to resume, a changed setting, or too little data or disk space.
        """
        assert not (unknown := set(own_flags) - vars(self.args).keys()), f"run.begin: no flags: {sorted(unknown)}"
        argument_checks.check_samples(self.args, self.traits, train_set, held_out, self.launch_config.grid)
        self.meta_model = cache(partial(adapters.build_meta_base, self.args, config, model_class))
        _check_model(self, config, model_class, tokenizer, held_out)
        identity = identify(self.args, self.accelerator, config, tokenizer, train_set, held_out, *own_flags)
        self.resumed, self.state = self.checkpoints.find(identity, self.traits.size_flags), TrainingState()
        if self.resumed is not None:
            from common.checkpoint.resume import begin_state

            self.state, line = begin_state(self.resumed, identity, self.args.allow_changed)
            self.accelerator.print(line, end="", flush=True)
        raise_errors(argument_checks.check_updates(self.args, self.state.update))
        connect.seed_everything(self.args.seed)
        self.meta_model()  # on all ranks here, because it may draw random numbers
        self.memory_before = tracking.memory_in_use_bytes(self.device)
        this_process().explain_error = partial(_explain, self)
        if self.args.dry_run and self.accelerator.is_main_process:
            from common.planner import Prediction

            self.prediction = Prediction(self)

    def prepare(
        self,
        model: PreTrainedModel,
        optimizer: Optimizer,
        collate: Collate,
        train_set: Samples,
        held_out: Samples | None,
        **lines: str,
    ) -> tuple[nn.Module, Optimizer]:
        """Applies --activation_checkpointing and --compile, creates loaders, prints the summary, prepares the model.

        The model is then on the device, and wrapped, sharded or offloaded as the mode requires. Afterwards each rank
        draws different random numbers, for dropout. lines: the recipe's own lines of the summary, by label.
        """
        args, accelerator, self.budget = self.args, self.accelerator, None
        apply_activation_checkpointing(model, args.activation_checkpointing, self.device)
        if args.shared("micro_batch_tokens") == "auto":
            from common.auto_micro_batch import start_budget

            self.budget = start_budget(self, train_set.max_length)
        if self.resumed is not None:
            from common.report.held_out import describe_patience

            lines |= describe_patience(self.state, args)
        options = self.traits, self.launch_config.grid, collate, attention_length(model.config)
        self.load = partial(make_loader, args, accelerator, *options, train_set)
        self.loader = self.load(range(self.state.update, self.state.end(args)))
        self.held_out = make_loader(args, accelerator, *options, held_out) if held_out else None
        train, evaluated = self.loader.dataset, self.held_out and self.held_out.dataset
        if args.compile or self.device.type == "cuda" or (args.compile is None and args.num_updates >= 100):
            from common.auto_compile import choose_kernels

            lines |= choose_kernels(self, model, train_set)
        tracking.print_run(args, accelerator, model, train, evaluated, launch.lacks_gpus(self.launch_config), **lines)
        self.model, self.optimizer = model_setup.prepare(accelerator, model, optimizer)
        connect.seed_everything(args.seed, accelerator)
        return self.model, self.optimizer

    @contextmanager
    def training(self, config: Any, *pretrained: Any) -> Iterator[Iterator[GlobalBatch]]:
        """Context around the loop: creates the output directory, resumes a checkpoint, yields global batches, saves.

        With --dry_run: one global batch, no checkpoint is loaded or saved, then exit. config, pretrained: objects with
        `save_pretrained` that an exported model needs besides its weights.
        """
        self.model.train()
        if self.args.dry_run:
            from common.run_endings import dry_run

            yield from dry_run(self)
        self.output_dir = argument_checks.make_output_dir(self.args, self.accelerator, self.checkpoints.ranks.share)
        self.checkpoints.ranks.output_dir = self.output_dir
        self.checkpoints.start(config, *pretrained, model=self.model, versions=tracking.versions())
        tracking.start_run(self, config)
        self.checkpoints.resume(self.resumed, self.model, self.optimizer)  # last, because it restores the RNG states
        work = flops.of_run(self, launch.lacks_gpus(self.launch_config))
        self.progress = progress.Progress(self.accelerator, self.output_dir, self.args.num_updates, self.state, work)
        with self.progress, self.evaluations.accept_requests() as self.requests:
            batches = _batches(self)
            yield batches
            batches.close()
            if not self.is_stopped:
                self.checkpoints.training_done(self.state, self.model, self.optimizer)

    def micro_batches(self, batch: GlobalBatch) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """Yields each micro-batch of this rank, on the device, and whether it is the last of the update."""
        micro_batches = batch.micro_batches[:1] if self.args.dry_run else batch.micro_batches
        tried = self.budget.until_out_of_memory(micro_batches) if self.budget else micro_batches
        with weights_cast_once(self.args.activation_checkpointing == "none"):
            for number, micro_batch in enumerate(tried, start=1):
                if not self.model.training:
                    self.evaluations.stop_if_requested()
                yield send_to_device(micro_batch, self.device, non_blocking=True), number == len(micro_batches)

    def all_finite(
        self, batch: GlobalBatch, loss_sums: list[Tensor], grad_norm: Tensor | float, **extra: Tensor | float
    ) -> bool:
        """Returns whether loss and gradient are finite on all ranks, so that the optimizer may step; counts the update.

        Also False in a budget trial and after an OOM, which are not counted. loss_sums: one scalar per micro-batch of
        this rank. grad_norm: before clipping. extra: more values to sum into `reduced`, same names and shapes per rank.
        """
        extra |= self.checkpoints.values_to_reduce(self.requests, self.state)
        extra |= self.budget.values_to_reduce() if self.budget else {}
        loss, grad_norm, self.reduced = accumulation.reduce_update(self.accelerator, loss_sums, grad_norm, batch, extra)
        if self.budget and self.budget.note_out_of_memory(self.reduced):
            return False
        is_finite, state = math.isfinite(loss) and math.isfinite(grad_norm), self.state
        state.skipped_in_a_row = 0 if is_finite else state.skipped_in_a_row + 1
        state.skipped_updates += not is_finite
        state.update, state.validation_loss = batch.update + 1, None
        state.samples += batch.num_samples
        self.record = {"update": batch.update, "loss": loss, "grad_norm": grad_norm}
        return is_finite

    def end_update(self, batch: GlobalBatch, **metrics: float) -> bool:
        """Records the update and `metrics`; saves a checkpoint if due. Returns whether the loop must end."""
        if self.budget and self.budget.drops_update:
            return False
        state = self.state
        if "validation_loss" in metrics:
            state.record_loss(metrics["validation_loss"])
        self.progress.update(batch, **self.record, **metrics)
        if state.skipped_in_a_row == self.args.max_skipped_updates:
            message = f"update {batch.update}: loss or gradient not finite {state.skipped_in_a_row} times in a row"
            raise RuntimeError(f"{message}; lower --learning_rate, or look at the data")
        self.is_stopped = self.checkpoints.update_done(state, self.model, self.optimizer, self.reduced)
        if is_over := state.end(self.args) < self.args.num_updates:
            from common.report.held_out import print_end_of_patience

            print_end_of_patience(self.progress, self.args.patience)
        return self.is_stopped or is_over

    def end_training(self) -> dict[str, Any]:
        """Returns the results of training. Applies --load_best_at_end. Exits with status 75 after a request to stop."""
        if self.is_stopped:
            from common.run_endings import end_stopped

            end_stopped(self)
        self.results = self.progress.results() | self.checkpoints.best_at_end(self.state, self.model, self.optimizer)
        return self.results

    def write_model(self, model_class: str, *pretrained: Any) -> PreTrainedModel | None:
        """Writes model/, its card, and the results so far; returns the bare model on the main process, or None."""
        self.model_class, directory = model_class, Path(self.output_dir) / "model"
        written = model_setup.write_model(self.accelerator, self.model, directory, self.args.export_dtype, *pretrained)
        if self.accelerator.is_main_process:
            self.is_again = tracking.record_results(self.results, self.output_dir, model_class)
        wait_for_all()  # because the collectives of a later evaluation would time out while rank 0 still writes
        return written

    def optional_steps(self) -> AbstractContextManager[None]:
        """Context for the final metrics and samples: an error inside prints one line, and the run still finishes."""
        return liveness.optional(partial(_report_missing, self))

    def finish(self, results: dict[str, Any], *extra_lines: str) -> None:
        """Prints and writes the results, and ends the run on all ranks together; status 1 if it trained nothing."""
        extra_lines += self.evaluations.close()
        self.results |= results
        if self.accelerator.is_main_process:
            tracking.print_results(self.results, self.output_dir, self.model_class, self.is_again, *extra_lines)
        shutdown.end_run(self.accelerator, NOTHING_TRAINED if tracking.describe_failure(self.results) else 0)


def _resolve_auto(args: Arguments) -> None:
    if args.resume == "auto":
        from common.auto_resume import resolve

        resolve(args)


def _check_model(run: Run, config: Any, model_class: Any, tokenizer: Any, held_out: Samples | None) -> None:
    """Raises UserError: the launch, --document_mask or --generate does not support model or data; sets both up."""
    if run.launch_config.mode != "plain":
        from common.parallel import mode_checks

        raise_errors(mode_checks.check_model(run.launch_config, config, model_class, run.meta_model))
    if run.args.shared("document_mask") or run.args.shared("shape") == "packed":
        from common.models.document_masks import mask_documents

        mask_documents(run.meta_model(), run.launch_config.grid)
    if run.args.shared("generate") or run.args.shared("metric"):
        from common.report import answers

        run.evaluations.answers = answers.start_answers(run, tokenizer, held_out)


def _batches(run: Run) -> Generator[GlobalBatch, None, None]:
    """Returns the global batches of the run; with a token budget, also its trial batches and the batches to retry."""
    if run.args.num_workers:  # imported now, because after an error there may be no free file descriptor for it
        from common.parallel import failures as failures
    if run.budget:
        from common.auto_micro_batch import batches_with_oom_retry

        batches = batches_with_oom_retry(run)
    else:
        batches = run.progress.batches(run.loader)
    if run.args.profile:
        from common.report.profiling import profiled

        batches = profiled(run, batches)
    return batches


def _explain(run: Run, error: BaseException) -> None:
    """Adds peak memory and memory-saving flags, as a note, to an out-of-memory error."""
    from common import oom_message

    oom_message.explain(run, error)


def _report_missing(run: Run, error: Exception) -> None:
    from common.run_endings import report_missing

    report_missing(run, error)
