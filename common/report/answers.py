"""Answers of the model to held-out prompts, before and after training: `--generate N` of lm.py and dpo.py.

samples.md    for readers: each prompt with its reference answer and both answers, and the metrics of --metric
samples.json  the same texts; a resumed run reads the answers before training from it
"""

import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from common.data.prompts import Prompt, choose_prompts
from common.errors import UserError
from common.files import replace_text
from common.models.generation import rows_at_once
from common.models.load import max_positions
from common.models.model_setup import without_wrapper
from common.parallel.liveness import wait_for_all
from common.parallel.main_decisions import decided_by_main
from common.redaction import escape, redact
from common.report.metric_flag import load_metrics
from common.report.model_card import as_code
from common.training.precision import weights_cast_once

NAMES = {"before": "before training", "after": "after training"}
LARGEST_BATCH = 32  # prompts; a batch takes as many steps as its longest answer has tokens
ERROR = "error_after_training"  # the only result of a metric that is not one of its values


def start_answers(run: Any, tokenizer: Any, held_out: Any) -> "Answers":
    """Chooses the prompts and loads the modules of --metric. run: a `common.run.Run`.

    Raises UserError: no held-out prompts, a mode that cannot generate, or --metric without references.
    """
    args, grid = run.args, run.launch_config.grid
    if not args.generate:
        raise UserError("--metric compares the answers of --generate N with references; pass both, or remove it")
    for name, size in (("sp_size", grid.sequence), ("tp_size", grid.tensor)):
        if size > 1:
            raise UserError(f"--generate is not supported with parallelism_config_{name} {size}; set it to 1")
    if held_out is None:
        raise UserError("--generate needs held-out data; pass --validation_file, or remove --generate")
    prompts = choose_prompts(held_out, args.generate, tokenizer)
    if not prompts:
        raise UserError("--generate: no held-out document has two tokens; use longer documents, or remove --generate")
    if args.metric:
        if all(prompt.reference is None for prompt in prompts):
            raise UserError("--metric compares answers with references, but the held-out rows have none; remove it")
        load_metrics(run, held_out, str)
    return Answers(run, prompts, tokenizer)


class Answers:
    """The prompts of a run, and the model's answers. All ranks call `answer` together."""

    def __init__(self, run: Any, prompts: list[Prompt], tokenizer: Any):
        self.run, self.prompts, self.tokenizer = run, prompts, tokenizer
        self.ids = [hashlib.sha256(json.dumps(prompt.ids).encode()).hexdigest()[:16] for prompt in prompts]

    def answer(self, model: torch.nn.Module, when: str) -> None:
        """Answers the prompts with the current weights, "before" or "after" training, and writes the files.

        Before training, it has no effect if the answers are stored already, or the weights are trained already. After
        training, it adds the results of --metric to those of the run.
        """
        stored = decided_by_main("answers before training", lambda: _read(self.run.output_dir))
        before = [stored.get(name) for name in self.ids]
        if when == "before" and (self.run.state.update or None not in before):
            return
        texts = self._generate(model)
        if when == "before":
            self._write(texts, None, {})
            return
        results = self._measure(before, texts)
        self._write(before, texts, results)
        path = self.run.output_dir / "samples.md"
        self.run.evaluations.lines.append(f"samples    {path}: {len(texts)} held-out prompts with answers")
        self.run.results |= {"num_generated": len(texts)} | results

    @torch.no_grad()
    def _generate(self, model: torch.nn.Module) -> list[str]:
        """Returns the greedy answer to each prompt, on all ranks.

        Each rank answers a share of the batches. If the weights are sharded, all ranks compute each forward together,
        so all answer each batch.
        """
        run, bare = self.run, without_wrapper(model)
        answers: list[tuple[int, str]] = []
        batches = batch_prompts([len(prompt.ids) for prompt in self.prompts], run.args, bare)
        num_shares, rank = (1, 0) if run.is_sharded else (run.accelerator.num_processes, run.accelerator.process_index)
        model.eval()
        with weights_cast_once(run.args.activation_checkpointing == "none"):
            for first in range(0, len(batches), num_shares):
                run.evaluations.stop_if_requested()  # as often on each rank
                if first + rank < len(batches):
                    batch = batches[first + rank]
                    answers += zip(batch, self._answer(bare, [self.prompts[index].ids for index in batch]), strict=True)
        model.train()
        if num_shares > 1:
            wait_for_all()  # without a time limit
            answers = gather_object(answers)
        return [text for _, text in sorted(answers)]

    def _answer(self, model: Any, prompts: list[list[int]]) -> list[str]:
        longest, pad = max(map(len, prompts)), self.tokenizer.pad_token_id
        rows = [[pad] * (longest - len(ids)) + ids for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        most = [max(1, self.run.args.sequence_length - len(ids)) for ids in prompts]
        tokens = model.generate(
            torch.tensor(rows, device=self.run.device),
            attention_mask=torch.tensor(mask, device=self.run.device),
            max_new_tokens=max(most),
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
            use_cache=True,
            synced_gpus=self.run.is_sharded,
            pad_token_id=pad,
            tokenizer=self.tokenizer,  # the model's generation_config.json may request stop strings
        )
        written = tokens[:, longest:].tolist()
        return [self._decode(ids[:number]) for ids, number in zip(written, most, strict=True)]

    def _decode(self, ids: list[int]) -> str:
        """Returns the text of an answer, without special tokens and secrets.

        Secrets are removed here, not only in the files: --metric compares answers with others that are read from there.
        """
        return str(redact(str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()))

    def _references(self) -> list[str | None]:
        return [None if prompt.reference is None else self._decode(prompt.reference) for prompt in self.prompts]

    def _measure(self, before: list[str | None], after: list[str]) -> dict[str, Any]:
        """Returns the results of --metric by NAME/key, and those before training by NAME/key/before."""
        evaluations, references = self.run.evaluations, self._references()
        if evaluations.metrics is None:
            return {}
        rows = [index for index, reference in enumerate(references) if reference is not None]
        expected, results, lines = [references[index] for index in rows], {}, []
        if None not in before:
            earlier, lines = evaluations.metrics.compute([before[index] for index in rows], expected)
            results = {key if key == ERROR else f"{key}/before": value for key, value in earlier.items()}
            lines = [line.replace("metric", "before", 1) for line in lines]
        later, evaluations.lines = evaluations.metrics.compute([after[index] for index in rows], expected)
        evaluations.lines = lines + evaluations.lines
        return results | later

    def _write(self, before: list[Any], after: list[Any] | None, results: dict[str, Any]) -> None:
        """Writes samples.json and samples.md on the main process."""
        if not self.run.accelerator.is_main_process:
            return
        prompts = [str(self.tokenizer.decode(prompt.ids)) for prompt in self.prompts]
        columns: Any = (self.ids, prompts, self._references(), before, after or [None] * len(before))
        names = ("id", "prompt", "reference", "before", "after")
        rows = redact([dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)])
        replace_text(self.run.output_dir / "samples.json", json.dumps(rows, indent=1) + "\n")
        if after is not None:
            replace_text(self.run.output_dir / "samples.md", "\n".join(_markdown(rows, redact(results))))


def batch_prompts(lengths: list[int], args: Any, model: Any) -> list[list[int]]:
    """Returns batches of the prompts with these lengths, by index: similar lengths together, padded at the start.

    They do not depend on the number of processes, so answers do not either.
    """
    size = min(LARGEST_BATCH, rows_at_once(args, args.sequence_length))
    # Shorter prompts have longer answers. Meanwhile the tokens after the longest answer must have positions, too.
    spare = max_positions(model.config) - args.sequence_length
    if not {"attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        spare = 0  # a recurrent network, whose state would depend on padding
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not batches or len(batches[-1]) == size or lengths[index] - lengths[batches[-1][0]] > spare:
            batches.append([])
        batches[-1].append(index)
    return batches


def _read(output_dir: Path) -> dict[str, str]:
    """Returns the stored answers before training, by id; {} if there is no valid file."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        rows = json.loads((output_dir / "samples.json").read_text())
        return {str(row["id"]): row["before"] for row in rows if isinstance(row["before"], str)}
    return {}


def _markdown(rows: list[dict[str, Any]], results: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of samples.md."""
    yield f"# {len(rows)} held-out prompts, answered before and after training\n"
    yield "Answers are greedy. `samples.json` has the same texts.\n"
    values = {key: value for key, value in results.items() if key != ERROR and not key.endswith("/before")}
    if values:
        yield "| metric | before training | after training |\n| --- | --- | --- |"
        for key, value in values.items():
            yield f"| {as_code(key)} | {_cell(results.get(f'{key}/before'))} | {_cell(value)} |"
        yield ""
    for number, row in enumerate(rows, start=1):
        yield f"## Prompt {number}\n"
        yield _block(row["prompt"])
        if row["reference"] is not None:
            yield f"Reference:\n\n{_block(row['reference'])}"
        for when, name in NAMES.items():
            yield f"Answer {name}:\n\n{_block(row[when])}"


def _cell(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4f}" if isinstance(value, float) else as_code(str(value))


def _block(text: str | None) -> str:
    """Returns a text as a fenced block, in which Markdown and HTML have no effect."""
    if text is None:
        return "(not generated, because the run began without --generate or with other prompts)\n"
    if not text:
        return "(empty)\n"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{escape(text)}\n{fence}\n"
