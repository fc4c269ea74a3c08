"""Trains an encoder-decoder, from scratch or a pretrained one, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/seq2seq.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/seq2seq.py \\
                   --model_name_or_path my_t5/ --train_file 'news/*.jsonl' --validation_file held_out.jsonl \\
                   --source_column article --target_column summary --sequence_length 1024 --target_length 128
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/seq2seq.py --model_name_or_path my_marian/ --train_file de_en.parquet --global_batch_size 256
rehearsal      the same with --dry_run, on any machine
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

A row has a source (--source_column), which is read, and a target (--target_column), which is learned: a translation, a
summary, an answer. Without data: the first line of a function's docstring from the function, of the standard library.
The model is of T5's shape from scratch, or any that transformers has for sequence to sequence (T5, BART, Marian, ...).
"""

import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import gather_object, send_to_device
from tokenizers.processors import TemplateProcessing
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import AutoModelForSeq2SeqLM, T5Config

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data.pairs import collate_pairs, tokenize_pairs
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError
from common.files import complete_or_absent
from common.models.load import (
    build_model,
    check_model,
    describe_use,
    load_config,
    parameter_sizes,
    prepare_encoder_decoder,
)
from common.parallel import loading
from common.parallel.connect import check_space, make_accelerator, seed_everything
from common.parallel.ending import end_run, user_mistakes_end_here
from common.parallel.launch import check_launch, find_launch, is_rehearsal, runs_on_cpu
from common.parallel.mode import is_sharded
from common.report import tracking
from common.report.scores import score_targets
from common.report.settings import print_settings
from common.training.accumulation import loss_scale, reduce_update, skip_step, sum_over_ranks, synchronize_gradients
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import cut_global_batch, make_loader
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate
from common.training.stopping import STOPPED, StopRequests

# Models to train from scratch, of T5's shape (1.1: gated MLP). The learning rate is AdamW's at its peak.
MODEL_CONFIGS = {
    # layers of each stack, width, heads, MLP width, vocabulary, learning rate
    "tiny": (2, 128, 4, 384, 4096, 1e-3),  # 1.5 M parameters
    "small": (6, 384, 6, 1024, 8192, 1e-3),  # 28 M
    "medium": (12, 768, 12, 2048, 32128, 5e-4),  # 223 M
    "large": (24, 1024, 16, 2816, 32128, 3e-4),  # 750 M
}
FINE_TUNING_LEARNING_RATE = 3e-4
BYTES = 257  # the 256 and the end of a text
TOKENIZERS = {
    "bpe": "trained on your text, of the vocabulary that the size has",
    "bytes": "each byte is a token; for short texts, spelling and numbers",
}


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="seq2seq.py")
    arguments.add_shared_arguments(parser)
    arguments.add_language_arguments(parser, one_text=False)
    parser.set_defaults(global_batch_size=16, num_updates=600, sequence_length=128)
    group = parser.add_argument_group("encoder-decoder (--sequence_length is the most tokens of a source)")
    group.add_argument("--model_config", help="size, from scratch (default: tiny)", **arguments.one_of(MODEL_CONFIGS))
    group.add_argument(
        "--tokenizer",
        help="from scratch (default: bpe)\n" + "\n".join(f"{name}: {text}" for name, text in TOKENIZERS.items()),
        **arguments.one_of(TOKENIZERS),
    )
    group.add_argument("--source_column", default="source", help="of a row: what is read")
    group.add_argument("--target_column", default="target", help="of a row: what is learned")
    group.add_argument("--target_length", type=arguments.positive, default=64, help="most tokens of a target")
    group.add_argument(
        "--generate", type=arguments.not_negative, default=200, metavar="N", help="held-out targets written at the end"
    )
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, FINE_TUNING_LEARNING_RATE)
    if args.tokenizer and args.model_name_or_path:
        parser.error("--tokenizer is for models from scratch, a pretrained one has its own; take it out")
    if args.validation_file and not (args.train_file or args.dataset_name):
        parser.error("--validation_file needs --train_file or --dataset_name; name the training data")
    return args


def load_data(args):
    """Tokenizer, the model's configuration, training samples, and held-out samples or None."""
    train_source, validation_source = arguments.text_sources(args)
    columns = (args.source_column, args.target_column)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForSeq2SeqLM)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        layers, width, heads, mlp_width, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        vocabulary = BYTES if args.tokenizer == "bytes" else vocabulary
        tokenizer = train_tokenizer(train_source, vocabulary, columns=None if train_source.embedded else columns)
        eos = (tokenizer.eos_token, tokenizer.eos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {eos[0]}", special_tokens=[eos])
        config = T5Config(
            vocab_size=vocabulary,
            num_layers=layers,
            d_model=width,
            num_heads=heads,
            d_kv=width // heads,
            d_ff=mlp_width,
            feed_forward_proj="gated-gelu",
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    problems = check_model(config, tokenizer, args.sequence_length)
    positions = getattr(config, "max_position_embeddings", None)
    if positions and 0 < positions < args.target_length:
        problems.append(f"--target_length {args.target_length} is beyond the model's {positions} positions; lower it")
    num_special = tokenizer.num_special_tokens_to_add()
    for flag, least in (("sequence_length", num_special + 1), ("target_length", max(1, num_special) + 1)):
        if vars(args)[flag] < least:  # nothing but, say, the end token
            problems.append(f"--{flag} {vars(args)[flag]} holds no text beside special tokens; use at least {least}")
    if getattr(config, "decoder_start_token_id", None) is None:
        problems.append("the model's config.json has no decoder_start_token_id, with which targets begin; put it in")
    if problems:
        raise UserError("\n".join(problems))
    lengths = (args.sequence_length, args.target_length)
    train = tokenize_pairs(train_source, columns, tokenizer, *lengths)
    validation = validation_source and tokenize_pairs(validation_source, columns, tokenizer, *lengths)
    arguments.check_samples(args, train, validation)
    return tokenizer, config, train, validation


def sum_losses(model, micro_batch):
    """The sum of the losses of a micro-batch's targets, in float32 at least."""
    inputs = {name: tensor for name, tensor in micro_batch.items() if not name.startswith("target")}
    # The model's own logits, since models differ in what they do to them (T5 scales, Marian adds a bias). They are not
    # computed in chunks: those of a target are few beside the tokens of its source.
    logits = model(**inputs, use_cache=False).logits.flatten(0, 1).index_select(0, micro_batch["target_rows"])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, micro_batch["targets"], reduction="sum")


@torch.no_grad()
def evaluate(model, loader, accelerator):
    """Mean loss over all target tokens of the held-out samples, each counted once."""
    model.eval()
    loss_sums, num_targets = [], 0
    for batch in loader:
        for micro_batch in batch.micro_batches:
            loss_sums.append(sum_losses(model, send_to_device(micro_batch, accelerator.device, non_blocking=True)))
        num_targets += batch.num_targets
    model.train()
    (loss_sum,) = sum_over_ranks(accelerator, torch.stack(loss_sums).sum())
    return {"validation_loss": loss_sum / num_targets}


def train(args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state):
    """The loop: a global batch of micro-batches, then one update. Also returns whether it was asked to stop."""
    model.train()
    with tracking.Progress(accelerator, output_dir, args.num_updates, state) as progress, StopRequests() as stop:
        for batch in progress.batches(loader):
            rate = learning_rate(
                batch.update,
                schedule=args.lr_schedule,
                peak=args.learning_rate,
                num_updates=args.num_updates,
                warmup_updates=args.warmup_updates,
            )
            set_learning_rate(optimizer, rate)
            scale = loss_scale(accelerator, batch.num_targets)
            loss_sums = []
            for step, micro_batch in enumerate(batch.micro_batches, start=1):
                with synchronize_gradients(accelerator, model, now=step == len(batch.micro_batches)):
                    loss_sum = sum_losses(model, send_to_device(micro_batch, accelerator.device, non_blocking=True))
                    accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            news = checkpoints.news(stop)  # of this rank; from here on of all, by the one collective of an update
            loss, grad_norm, news = reduce_update(accelerator, loss_sums, grad_norm, batch, news)

            finite = math.isfinite(loss) and math.isfinite(grad_norm)  # the same on all ranks, as loss and norm are
            if finite:
                optimizer.step()
                optimizer.zero_grad()
            else:
                skip_step(accelerator, optimizer)
            state.skipped_in_a_row = 0 if finite else state.skipped_in_a_row + 1
            state.skipped_updates += not finite
            state.update, state.validation_loss = batch.update + 1, None
            state.samples += batch.num_samples
            record = {"update": batch.update, "loss": loss, "grad_norm": grad_norm, "learning_rate": rate}
            is_end = args.keep_best and state.update == args.num_updates  # it may be the best
            if validation_loader and args.eval_every and (state.update % args.eval_every == 0 or is_end):
                record |= evaluate(model, validation_loader, accelerator)
                state.measured(record["validation_loss"])
            progress.update(batch, **record)
            if state.skipped_in_a_row == args.max_skipped_updates:
                raise RuntimeError(
                    f"update {batch.update}: loss or gradient not finite {state.skipped_in_a_row} times in a row; "
                    "lower --learning_rate, or look at the data"
                )
            if checkpoints.update_done(state, model, optimizer, news):
                return progress, True
        checkpoints.training_done(state, model, optimizer)
    return progress, False


@torch.no_grad()
def write_targets(args, model, samples, collate, accelerator):
    """What the model writes, greedily, for --generate samples from all over `samples`: {sample: tokens}, on all ranks.

    The samples are cut and assigned to the ranks as a global batch is, by the longest that they could become.
    """
    ids = np.unique(np.linspace(0, len(samples) - 1, min(args.generate, len(samples))).astype(int))
    lengths = np.maximum(samples.lengths(ids), [0, args.target_length])
    budget = args.micro_batch_tokens and max(args.micro_batch_tokens, int(lengths.sum(1).max()))
    model.eval()
    model = accelerator.unwrap_model(model)
    register_fsdp_forward_method(model, "generate")  # gathers what FSDP2 has sharded; without FSDP2 does nothing
    written = []
    for positions in cut_global_batch(lengths, accelerator.num_processes, args.micro_batch_size, budget)[
        accelerator.process_index
    ]:
        # Where weights are sharded, every rank has to take part in every step: hence dummy samples, and synced_gpus.
        batch = send_to_device(
            collate([samples[i] for i in ids[positions]] or [samples.dummy_sample()]), accelerator.device
        )
        tokens = model.generate(
            batch["input_ids"],
            attention_mask=batch.get("attention_mask", torch.ones_like(batch["input_ids"])),
            max_new_tokens=args.target_length,
            do_sample=False,
            num_beams=1,
            synced_gpus=is_sharded(accelerator),
        )
        written += zip(ids[positions].tolist(), tokens.tolist(), strict=False)  # but for a dummy sample's
    return dict(sorted(gather_object(written)))


def main():
    args = parse_arguments()
    asked = find_launch()
    problems = arguments.check_arguments(args, on_cpu=runs_on_cpu(asked))
    problems += check_launch(asked, args)
    if problems:
        raise UserError("\n".join(problems))
    accelerator = make_accelerator(asked, args, log_with=args.report_to or None, project_dir=args.output_dir)
    checkpoints = Checkpoints(args, accelerator)
    tokenizer, config, train_samples, validation_samples = load_data(args)
    check_space(asked, lambda: parameter_sizes(config, args.trust_remote_code, AutoModelForSeq2SeqLM))
    identity = identify(args, accelerator, config, tokenizer, train_samples.fingerprint)
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    model = build_model(config, args.model_name_or_path, args.trust_remote_code, AutoModelForSeq2SeqLM)
    prepare_encoder_decoder(model)
    apply_activation_checkpointing(model, args.activation_checkpointing, accelerator.device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    first_update = resumed.manifest["update"] if resumed else 0
    collate = partial(
        collate_pairs,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    loader = make_loader(args, train_samples, accelerator, collate, range(first_update, args.num_updates))
    validation_loader = validation_samples and make_loader(args, validation_samples, accelerator, collate)
    held_out = validation_loader and validation_loader.dataset
    rehearsal = is_rehearsal(asked)
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        micro_batch = send_to_device(next(iter(loader)).micro_batches[0], accelerator.device)
        accelerator.backward(sum_losses(model, micro_batch))
        print_settings(args, asked, accelerator)
        accelerator.print("dry run: one forward and one backward done, nothing written")
        return end_run(accelerator)
    output_dir = arguments.make_output_dir(args, accelerator)
    describe_use(accelerator.unwrap_model(model), config, tokenizer, [tokenizer.eos_token_id])
    tokenizer.model_max_length = args.sequence_length  # where sources were cut, and are cut when it is used
    checkpoints.start(config, tokenizer, model=model, versions=tracking.versions())
    state = TrainingState(**resumed.manifest["position"]) if resumed else TrainingState()
    tracking.start_run(args, accelerator, output_dir, state, model=config.to_dict())
    checkpoints.resume(resumed, model, optimizer)  # last: the random streams go on from here
    progress, stopped = train(
        args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state
    )
    if stopped:
        tracking.end_early(accelerator, output_dir, state)
        return end_run(accelerator, STOPPED)
    results = progress.results() | checkpoints.best_at_end(model, optimizer)
    lines = []
    if validation_loader:
        results |= evaluate(model, validation_loader, accelerator)
        results["perplexity"] = math.exp(min(results["validation_loss"], 700))
        if args.generate:
            written = write_targets(args, model, validation_samples, collate, accelerator)
            figures, lines = score_targets(written, validation_samples, train_samples, tokenizer)
            results |= figures
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            tokenizer.save_pretrained(model_dir)
        tracking.print_results(results, output_dir, "AutoModelForSeq2SeqLM", *lines)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
