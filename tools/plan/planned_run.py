"""PlannedRun: replaces `common.run.Run` in a planner process; prints the plan or prediction once the data is read."""

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from common import argument_checks
from common.auto_micro_batch import default_tokens
from common.errors import raise_errors
from common.host_memory import available_per_process, available_total
from common.models import adapters
from common.parallel import connect
from common.parallel.launch import Launch, parse_launch
from common.training.batching import Samples
from common.training.recipe_traits import Arguments, Traits
from tools.plan import hardware
from tools.plan.memory_forecast import InTraceProcess, Tracer, predict_peak
from tools.plan.plan import plan


class PlannedRun:
    """A run whose `begin` prints the plan or prediction and exits; processes that trace continue as `TracedRun`.

    Args:
        question: for a plan, `machine` (as text) and, for this machine, `here` (fields of `Machine`); for a prediction,
            the launch, the kind of device and the available bytes (`common.planner.Prediction`). None: it is the next
            line of the standard input; a dry run that ends before its question closes the input.
        args, problems, traits: as in `common.run.Run`.
    """

    def __init__(self, question: dict[str, Any] | None, args: Arguments, problems: Iterable[str] = (), **traits: Any):
        if question is None:
            if not (line := sys.stdin.readline()):
                sys.exit()
            question = json.loads(line)
        self.question, self.args, self.traits = question, args, Traits(**traits)
        self.machine: hardware.Machine | None = None
        if "machine" in question:
            self.launch_config = Launch(use_cpu=True, mode="plain", num_processes=1, mixed_precision="no")
            here = question.get("here")
            self.machine = hardware.Machine(**here) if here else hardware.parse_machine(question["machine"])
            on_cpu = self.machine.kind == "cpu"
        else:
            self.launch_config, on_cpu = _asked_launch(question), question["device"] == "cpu"
            args.output_dir = tempfile.gettempdir()  # the dry run has checked its own
        args.resume = args.overwrite = args.dry_run = False
        raise_errors([*argument_checks.check_arguments(args, on_cpu, self.traits, self.launch_config.grid), *problems])
        self.accelerator = Accelerator(cpu=True)
        self.device, self.is_sharded, self.evaluations = self.accelerator.device, False, None

    def begin(
        self,
        config: Any,
        tokenizer: Any,
        train_set: Samples,
        held_out: Samples | None,
        *own_flags: str,
        model_class: Any = AutoModelForCausalLM,
    ) -> None:
        """Prints the plan or the prediction, and exits. It returns only in a process that traces an update."""
        argument_checks.check_samples(self.args, self.traits, train_set, held_out, self.launch_config.grid)
        meta_model = cache(partial(adapters.build_meta_base, self.args, config, model_class))
        tracer = Tracer(self, config, train_set, held_out)
        connect.seed_everything(self.args.seed)
        if self.args.shared("micro_batch_tokens") == "auto":
            self.args.micro_batch_tokens = default_tokens(self.question.get("device", "cuda"), train_set.max_length)
        try:
            if self.machine is not None:
                if "here" in self.question and self.machine.kind == "cpu":
                    # Measured again, because this process has imported as much as a run; the earlier one had not.
                    memory, host = float(available_per_process()), float(available_total())
                    self.machine = replace(self.machine, memory=memory, host=host)
                lines = plan(tracer, model_class, meta_model, self.machine)
            else:
                lines = predict_peak(tracer, meta_model(), self.question)
        except InTraceProcess:
            return
        print("\n".join(lines), flush=True)
        sys.exit()


def _asked_launch(question: dict[str, Any]) -> Launch:
    """Returns the launch of the predicted run."""
    if question["words"]:
        return parse_launch([*question["words"], "recipe.py"])
    names = ("mode", "num_processes", "mixed_precision")
    return Launch(**{name: question[name] for name in names}, use_cpu=question["device"] == "cpu")
