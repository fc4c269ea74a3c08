"""The bar and metrics.jsonl: an update after the other, as it is shown and recorded."""

import json
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from common.errors import UserError
from common.files import disk_line
from common.parallel import liveness
from common.report import chance, curves
from common.report.tracking import describe_sources, memory_in_use_bytes, peak_memory_bytes, to_json_line


class Progress:
    """Shows and records one update after the other, on the main process; the other ranks only keep time.

    A `with` block; `batches(...)` times the wait for data, `update(...)` ends an update. `work`, on the main process:
    a `common.plan.flops.ModelFlops`, or None for a model that cannot be counted.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path, num_updates: int, state: Any, work: Any = None):
        self.accelerator, self.is_main, self.state = accelerator, accelerator.is_main_process, state
        self.output_dir, self.work, self.flops = output_dir, work, 0.0
        self.bar = tqdm(total=num_updates, initial=state.update, unit="update", disable=not self.is_main, smoothing=0.1)
        # Line buffered: a killed run leaves whole lines.
        self.file = open(output_dir / "metrics.jsonl", "a", buffering=1) if self.is_main else None
        self.memory_at_start = memory_in_use_bytes(accelerator.device)
        self.waited = 0.0
        self.started = self.last = time.perf_counter()
        self.ended: float | None = None
        self.num_tokens = self.num_processed = 0
        self.unit = "tokens"
        self.held_out = ""
        self.per_epoch: int | None = 1  # updates; None: mixed sources, each with epochs of its own
        self.rank_work: Any = 0
        self.drawing: subprocess.Popen | None = None
        self.chance: chance.ChanceCheck | None = None

    def batches(self, loader):
        """The loader's global batches, with the time that the loop waits for each."""
        self.unit = loader.dataset.samples.unit
        self.per_epoch = len(loader.dataset) if loader.dataset.mixing is None else None
        self.chance = self.chance or chance.ChanceCheck(loader.dataset.samples, self.bar.total)
        iterator = iter(loader)
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                self.ended = time.perf_counter()  # what comes now, a checkpoint, is no training
                return
            liveness.update = batch.update
            yield batch

    def update(self, batch, **record: Any) -> None:
        """Ends an update: one line of metrics.jsonl, the bar, the trackers. `record` is printed in its order."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        tokens_per_second = batch.num_tokens / seconds
        self.num_tokens += batch.num_tokens
        self.num_processed += batch.num_processed
        self.rank_work = self.rank_work + batch.rank_work
        if not self.is_main:
            return
        flops = self.work.of(batch) if self.work else 0.0
        self.flops += flops
        memory = peak_memory_bytes(self.accelerator.device)
        record |= {
            "target_tokens": batch.num_targets,
            "tokens_per_second": tokens_per_second,
            **(self.work.figures(flops, seconds) if self.work else {}),
            "peak_memory_bytes": memory,
            "waiting_for_data": self.waiting_share,
            "skipped_updates": self.state.skipped_updates,
            "sample_digest": batch.sample_digest,
        }
        try:
            self.file.write(to_json_line(record))
        except OSError as error:
            what, where = f"{self.file.name} could not be written after update {record['update']}", Path(self.file.name)
            raise UserError(disk_line(error, what, where.parent, 0, "start again with --resume")) from error
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        # The name of a source may be a pattern, whose * some trackers (MLflow) refuse.
        logged = {re.sub(r"[^\w./ -]", "_", name): value for name, value in numbers.items()}
        self.accelerator.log(logged, step=record["update"])
        if "validation_loss" in record:
            self._tell_evaluation(record)
            self.draw()
        if line := self.chance.note(self.state.update, record["loss"]):
            self.bar.write(line)
            sys.stdout.flush()
        self.bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {self.held_out}{tokens_per_second:,.0f} {self.unit}/s, "
            f"{memory / 2**30:.2f} GiB, waiting {self.waiting_share:.0%}"
            + (f", {self.state.skipped_updates} skipped" if self.state.skipped_updates else ""),
            refresh=False,
        )
        if self.per_epoch:
            done, in_all = (number / self.per_epoch for number in (self.state.update, self.bar.total))
            self.bar.set_description_str(f"epoch {done:.2f} of {in_all:.2f}", refresh=False)
        self.bar.update()

    def draw(self, now: bool = False) -> None:
        """Lets curves.png be drawn, while the training goes on, or `now`."""
        is_free = self.drawing is None or now or self.drawing.poll() is not None
        if self.is_main and is_free and self.state.update >= curves.FEWEST:
            if self.drawing is not None:
                self.drawing.communicate()
            self.drawing = curves.start_drawing(self.output_dir, self.unit)
            if now:
                curves.finish(self.drawing)

    def end_early(self, patience: int) -> None:
        """The updates end here, all `patience` evaluations after the best one."""
        self.ended = time.perf_counter()
        best = self.state.best_validation_loss
        lower = "a finite validation loss" if best is None else f"a lower validation loss than {best:.4f}"
        if self.is_main:  # a bar that is not shown writes all the same
            self.bar.write(
                f"update {self.state.update}: {patience} evaluation{'s' * (patience > 1)} in a row without {lower}: "
                "the training ends here (--patience)"
            )
            sys.stdout.flush()

    def _tell_evaluation(self, record: dict[str, Any]) -> None:
        """One line above the bar, which shows the loss too from here on."""
        loss = record["validation_loss"]
        self.held_out = f"held out {loss:.3f}, "
        line = f"update {self.state.update}: validation loss {loss:.4f}"
        line += f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
        self.bar.write(
            line + describe_sources(record) + (", the lowest so far" if loss == self.state.best_validation_loss else "")
        )
        sys.stdout.flush()

    @property
    def waiting_share(self) -> float:
        """Share of the time so far that the loop waited for data."""
        return self.waited / max(time.perf_counter() - self.started, 1e-9)

    def results(self) -> dict[str, Any]:
        """What the training took, for the summary."""
        seconds = (self.ended or time.perf_counter()) - self.started
        results = {
            "updates": self.state.update,
            "training_seconds": seconds,
            "unit": self.unit,
            "tokens_per_second": self.num_tokens / seconds,
            **(self.work.figures(self.flops, seconds) if self.work else {}),
            # Of the tokens that all ranks processed; and how much more work the busiest of them had than the idlest.
            "padding_share": 1 - self.num_tokens / self.num_processed if self.num_processed else 0.0,
            "work_difference": float(self.rank_work.max() / self.rank_work.min() - 1) if self.num_tokens else 0.0,
            "waiting_for_data": self.waiting_share,
            "skipped_updates": self.state.skipped_updates,
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            # Over what the loaded model held. (On a CPU an upper bound: a peak before the loop counts too.)
            "memory_growth_bytes": peak_memory_bytes(self.accelerator.device) - self.memory_at_start,
        }
        if self.is_main and not self.num_tokens:  # nothing was left to train: what it took is as it was told then
            before = json.loads((self.output_dir / "run.json").read_text()).get("results", {})
            results |= {name: before[name] for name in results if name in before}
        return results

    def __enter__(self) -> "Progress":
        liveness.in_loop = True
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        liveness.in_loop = False
        self.bar.close()
        if self.file:
            with suppress(OSError):  # of a full disk, which the last line has met already
                self.file.close()
        if kind is None:
            self.draw(now=True)
