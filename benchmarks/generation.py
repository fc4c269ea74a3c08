"""Measures generation and evaluation of recipes/seq2seq.py and answers of recipes/lm.py, compared with transformers.

    .venv/bin/python benchmarks/generation.py --rounds 3

Generation: tokens/s of `--generate`, of transformers' `generate` for 1, 8 and 32 sources at a time in the order of the
file, and of the forwards of the recipe's batches alone, one per generated token, with the cache. The model is a
T5 from scratch that is not trained; each answer has the maximum length. Evaluation: tokens/s without padding of
`evaluate`'s micro-batches, and of the model's forwards on full micro-batches of equal length.

Answers: tokens/s of lm.py's `--generate` for 32 held-out documents, and of `generate` for 1 and 32 of them at a time,
in the order of the file. All answers have the maximum length, and no token beyond it is counted.

The arms alternate within one process of one thread. Each call writes results/generation-cpu.json: values of all rounds,
medians, machine, versions and date. Ratios are relative to the recipe, within a round.
"""

import argparse
import json
import math
import shlex
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT)]

from common import arguments  # noqa: E402, F401, I001  # before torch

import numpy as np  # noqa: E402
import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from flags import output_file, positive  # noqa: E402
from machine import describe_machine  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: E402

from common.data.prompts import choose_prompts  # noqa: E402
from common.report.answers import Answers  # noqa: E402
from common.report.tracking import versions  # noqa: E402
from common.tasks.seq2seq.encoder_decoder import prepare_encoder_decoder, write_targets  # noqa: E402
from common.tasks.seq2seq.pairs import collate_pairs  # noqa: E402
from common.training.batching import make_loader  # noqa: E402
from common.training.process_grid import ProcessGrid  # noqa: E402
from common.training.recipe_traits import Traits  # noqa: E402
from recipes import lm, seq2seq  # noqa: E402


def load(size):
    """Returns (the recipe's arguments, model, tokenizer, held-out pairs, collate function)."""
    sys.argv = ["seq2seq.py", "--model_config", size]
    args = seq2seq.parse_arguments()
    tokenizer, config, _, held_out = seq2seq.load_data(args)
    torch.manual_seed(0)
    model = prepare_encoder_decoder(AutoModelForSeq2SeqLM.from_config(config)).eval()
    ids = {"pad_token_id": tokenizer.pad_token_id, "decoder_start_token_id": config.decoder_start_token_id}
    return args, model, tokenizer, held_out, partial(collate_pairs, **ids)


def transformers_alone(args, model, tokenizer, held_out, batch_size):
    """Generates for evenly spaced sources in the order of the file, as a script would."""
    sources = [held_out[int(index)][0].tolist() for index in np.linspace(0, len(held_out) - 1, args.generate)]
    for first in range(0, len(sources), batch_size):
        batch = tokenizer.pad({"input_ids": sources[first : first + batch_size]}, return_tensors="pt")
        options = {"max_new_tokens": args.target_length, "do_sample": False}
        model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options)


class Forwards:
    """Records the inputs of the model's forwards, and repeats them."""

    def __init__(self, model):
        self.model, self.steps = model, []

    def record(self, generate):
        """Calls a function that generates; keeps encoder inputs, masks and decoder tokens of each step."""

        def keep(_, __, inputs):
            self.steps.append((inputs["encoder_outputs"], inputs["attention_mask"], inputs["decoder_input_ids"]))

        handle = self.model.register_forward_pre_hook(keep, with_kwargs=True)
        encoder = self.model.get_encoder().register_forward_pre_hook(
            lambda _, __, inputs: self.steps.append(inputs), with_kwargs=True
        )
        generate()
        handle.remove()
        encoder.remove()

    def repeat(self):
        cache = None
        for step in self.steps:
            if isinstance(step, dict):
                cache = None
                self.model.get_encoder()(**step)
                continue
            encoded, mask, ids = step
            outputs = self.model(
                encoder_outputs=encoded,
                attention_mask=mask,
                decoder_input_ids=ids,
                past_key_values=cache,
                use_cache=True,
            )
            cache = outputs.past_key_values


def evaluated(args, model, held_out, collate, accelerator):
    """Computes the loss of all held-out targets as `evaluate` does; returns the number of tokens."""
    options = (Traits(size_flags=("sequence_length", "target_length")), ProcessGrid(1), collate, math.inf)
    num_tokens = 0
    for batch in make_loader(args, accelerator, *options, held_out):
        num_tokens += batch.num_tokens
        for micro_batch in batch.micro_batches:
            seq2seq.sum_losses(model, micro_batch)
    return num_tokens


def full_forwards(model, collate, count):
    """Computes full micro-batches of 1,024 tokens in rows of 96 + 32; returns the number of tokens."""
    pair = (torch.arange(5, 101).numpy(), torch.arange(5, 37).numpy())
    for _ in range(count):
        seq2seq.sum_losses(model, collate([pair] * 8))
    return count * 8 * 128


def answer_arms(size):
    """Returns {arm: function that answers 32 documents}, and the number of tokens of these answers."""
    sys.argv = ["lm.py", "--model_config", size]
    args = lm.parse_arguments()
    args.micro_batch_tokens = 1024  # as a run on a CPU sets it
    tokenizer, config, _, held_out = lm.load_data(args)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    prompts = choose_prompts(held_out, 32, tokenizer)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), is_sharded=False)
    run.accelerator = SimpleNamespace(num_processes=1, process_index=0)
    run.evaluations = SimpleNamespace(stop_if_requested=lambda: None)
    answers = Answers(run, prompts, tokenizer)

    def alone(number):
        for first in range(0, len(prompts), number):
            answers._answer(model, [prompt.ids for prompt in prompts[first : first + number]])

    arms = {"recipe": partial(answers._generate, model)}
    arms |= {f"transformers, {number} at a time": partial(alone, number) for number in (1, 32)}
    return arms, sum(args.sequence_length - len(prompt.ids) for prompt in prompts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "small"])
    parser.add_argument("--output_file", type=output_file, default=ROOT / "benchmarks/results/generation-cpu.json")
    options, command = parser.parse_args(), shlex.join(["python", "benchmarks/generation.py", *sys.argv[1:]])
    torch.set_num_threads(1)
    rows = {}
    for size in options.sizes:
        rows[size] = measure(size, options.rounds)
    facts = {"command": command, "date": date.today().isoformat(), "machine": describe_machine(), "threads": 1}
    options.output_file.write_text(json.dumps(facts | {"versions": versions(), "rows": rows}, indent=1) + "\n")


@torch.no_grad()
def measure(size, rounds):
    """Returns {part: {arm: tokens/s of each round}} and prints the median ratios."""
    args, model, tokenizer, held_out, collate = load(size)
    args.generate, args.micro_batch_tokens, args.num_workers = 32, 1024, 0  # as a run on a CPU sets them
    accelerator = Accelerator(cpu=True)
    forwards = Forwards(model)
    write = partial(write_targets, args, model, held_out, collate, accelerator, tokenizer)
    model.generation_config.min_new_tokens = args.target_length
    forwards.record(write)
    num_written = args.generate * args.target_length
    arms = {
        "generation": {
            "recipe": write,
            "forwards alone": forwards.repeat,
            **{
                f"transformers, {number} at a time": partial(
                    transformers_alone, args, model, tokenizer, held_out, number
                )
                for number in (1, 8, 32)
            },
        },
        "evaluation": {
            "recipe": partial(evaluated, args, model, held_out, collate, accelerator),
            "full forwards": partial(full_forwards, model, collate, 24),
        },
    }
    arms["answers"], num_answered = answer_arms(size)
    rates = {part: {arm: [] for arm in arms[part]} for part in arms}
    for number in range(rounds):
        for part, functions in arms.items():
            for arm in list(functions) if number % 2 == 0 else list(functions)[::-1]:
                started = time.perf_counter()
                num_tokens = functions[arm]()
                num_tokens = {"generation": num_written, "answers": num_answered}.get(part, num_tokens)
                rates[part][arm].append(num_tokens / (time.perf_counter() - started))
    for part, values in rates.items():
        for arm, speeds in values.items():
            ratio = median(ours / theirs for ours, theirs in zip(values["recipe"], speeds, strict=True))
            print(f"{size}, {part}, {arm}: {median(speeds):,.0f} tokens/s, recipe / arm {ratio:.2f}", flush=True)
    return rates


if __name__ == "__main__":
    main()
