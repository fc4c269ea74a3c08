"""Trains a causal language model, from scratch or from a pretrained one, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/lm.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/lm.py --model_config small \\
                   --train_file 'books/*.txt' --validation_file held_out.txt --output_dir runs/books
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 recipes/lm.py \\
                   --model_name_or_path my_model/ --train_file chats.jsonl --global_batch_size 128
rehearsal      the same with --dry_run, on any machine
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

Text is cut into blocks of --sequence_length tokens; where rows have `prompt` and `completion`, or `messages`,
each is an example of its own length, of which the completion, or the assistant's turns, are learned.
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from transformers import LlamaConfig

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError
from common.files import complete_or_absent
from common.models.load import build_model, check_model, describe_use, load_config, parameter_sizes, write_sample
from common.parallel import loading
from common.parallel.connect import check_space, make_accelerator, seed_everything
from common.parallel.ending import end_run, user_mistakes_end_here
from common.parallel.launch import check_launch, find_launch, is_rehearsal, runs_on_cpu
from common.parallel.mode import is_sharded
from common.report import tracking
from common.report.settings import print_settings
from common.training.accumulation import loss_scale, reduce_update, skip_step, sum_over_ranks, synchronize_gradients
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import collate_tokens, make_loader
from common.training.losses import sum_token_losses
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate
from common.training.stopping import STOPPED, StopRequests

# Models to train from scratch, of Llama's shape. The learning rate is AdamW's at its peak.
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, MLP width, vocabulary, learning rate
    "tiny": (4, 128, 4, 2, 384, 4096, 6e-3),  # 1.3 M parameters
    "small": (6, 384, 6, 6, 1024, 8192, 1e-3),  # 13.8 M
    "medium": (12, 768, 12, 12, 2048, 32768, 6e-4),  # 110 M
    "large": (16, 2048, 32, 8, 8192, 32768, 3e-4),  # 1.04 B
}
FINE_TUNING_LEARNING_RATE = 2e-5


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="lm.py")
    arguments.add_shared_arguments(parser)
    arguments.add_language_arguments(parser, examples=True)
    group = parser.add_argument_group("language model")
    group.add_argument("--model_config", help="size, from scratch (default: tiny)", **arguments.one_of(MODEL_CONFIGS))
    group.add_argument("--shape", choices=("blocks", "examples"), help="of a sample (default: by the data's columns)")
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, FINE_TUNING_LEARNING_RATE)
    return args


def load_data(args):
    """Tokenizer, the model's configuration, training samples, and held-out samples or None."""
    train_source, validation_source = arguments.text_sources(args)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
    else:
        layers, width, heads, kv_heads, mlp_width, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        tokenizer = train_tokenizer(train_source, vocabulary)
        config = LlamaConfig(
            vocab_size=vocabulary,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=mlp_width,
            max_position_embeddings=max(2048, args.sequence_length),
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    if problems := check_model(config, tokenizer, args.sequence_length):
        raise UserError("\n".join(problems))
    train = tokenize(train_source, tokenizer, args.sequence_length, args.shape)
    validation = validation_source and tokenize(
        validation_source, tokenizer, args.sequence_length, args.shape, measure_compression=True
    )
    arguments.check_samples(args, train, validation)
    return tokenizer, config, train, validation


def sum_losses(model, micro_batch):
    """The sum of the losses of a micro-batch's targets."""
    return model(**micro_batch)


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
    check_space(asked, lambda: parameter_sizes(config, args.trust_remote_code))
    identity = identify(args, accelerator, config, tokenizer, train_samples.fingerprint)
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    model = build_model(config, args.model_name_or_path, args.trust_remote_code)
    loss_name = sum_token_losses(model)  # from here on, model(...) is the sum of the losses of a micro-batch's targets
    apply_activation_checkpointing(model, args.activation_checkpointing, accelerator.device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    first_update = resumed.manifest["update"] if resumed else 0
    collate = partial(collate_tokens, pad_token_id=tokenizer.pad_token_id)
    loader = make_loader(args, train_samples, accelerator, collate, range(first_update, args.num_updates))
    validation_loader = validation_samples and make_loader(args, validation_samples, accelerator, collate)
    held_out = validation_loader and validation_loader.dataset
    rehearsal = is_rehearsal(asked)
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal, loss=loss_name)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        micro_batch = send_to_device(next(iter(loader)).micro_batches[0], accelerator.device)
        accelerator.backward(sum_losses(model, micro_batch))
        print_settings(args, asked, accelerator)
        accelerator.print("dry run: one forward and one backward done, nothing written")
        return end_run(accelerator)
    output_dir = arguments.make_output_dir(args, accelerator)
    describe_use(accelerator.unwrap_model(model), config, tokenizer, train_samples.end_tokens)
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
    if validation_loader:
        results |= evaluate(model, validation_loader, accelerator)
        results |= tracking.held_out_results(results["validation_loss"], validation_samples)
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained, lines = accelerator.unwrap_model(model), []
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            tokenizer.save_pretrained(model_dir)
        if not is_sharded(accelerator):
            prompt = (validation_samples or train_samples)[0][0][:16]
            results["sample"] = write_sample(trained, tokenizer, prompt)
            lines = [f"\nthe model writes:\n{results['sample']}\n"]
        tracking.print_results(results, output_dir, "AutoModelForCausalLM", *lines)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
