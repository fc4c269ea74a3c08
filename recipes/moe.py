"""Trains a mixture of experts as a language model: from scratch, up-cycled from a dense model, or a pretrained one.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/moe.py
its dense peer the same with --dense: as many parameters as a token meets there
up-cycling     accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/moe.py --upcycle \\
                   --model_name_or_path my_llama/ --num_experts 8 --experts_per_token 2 --train_file 'books/*.txt'
several GPUs   accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes 8 recipes/moe.py \\
                   --model_name_or_path my_moe/ --balance exact --train_file chats.jsonl --global_batch_size 128
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

Data are recipes/lm.py's. A model from scratch, or up-cycled, has the shape of ERNIE 4.5: Llama's attention, in each
layer the best of some experts by a softmax, with a bias on the choice for --balance bias. The experts of a layer are
computed in one batched product (transformers' grouped_mm).
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from transformers import Ernie4_5Config

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError
from common.files import complete_or_absent
from common.models import experts
from common.models.load import (
    build_model,
    check_model,
    describe_use,
    load_config,
    parameter_sizes,
    whole_weights,
    write_sample,
)
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

# Models to train from scratch. A token meets as many parameters as in the model of that name in recipes/lm.py.
MODEL_CONFIGS = {
    # layers, width, heads, key-value heads, experts, of them for a token, an expert's width, vocabulary, learning rate
    "tiny": (4, 128, 4, 2, 8, 2, 192, 4096, 6e-3),  # 3.1 M parameters, 1.3 M active
    "small": (6, 384, 6, 6, 16, 2, 512, 8192, 1e-3),
    "medium": (12, 768, 12, 12, 32, 4, 512, 32768, 6e-4),
    "large": (16, 2048, 32, 8, 64, 8, 1024, 32768, 3e-4),
}
FINE_TUNING_LEARNING_RATE = 2e-5


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="moe.py")
    arguments.add_shared_arguments(parser)
    arguments.add_language_arguments(parser, examples=True)
    parser.set_defaults(num_updates=500)
    group = parser.add_argument_group("mixture of experts")
    group.add_argument("--model_config", help="size, from scratch (default: tiny)", **arguments.one_of(MODEL_CONFIGS))
    group.add_argument("--shape", choices=("blocks", "examples"), help="of a sample (default: by the data's columns)")
    group.add_argument("--upcycle", action="store_true", help="each expert starts as the MLP of a dense model")
    group.add_argument("--num_experts", type=arguments.positive, help="of a layer (default: the size's; up-cycled: 8)")
    group.add_argument("--experts_per_token", type=arguments.positive, help="(default: the size's; up-cycled: 2)")
    group.add_argument(
        "--dense", action="store_true", help="from scratch: the dense model of as many active parameters"
    )
    balance = "\n".join(f"{name}: {text}" for name, text in experts.BALANCE.items())
    group.add_argument("--balance", help=f"(default: bias)\n{balance}", **arguments.one_of(experts.BALANCE))
    group.add_argument(
        "--balance_strength",
        type=arguments.positive_float,
        help="step of the bias, or factor of the loss (default: 0.01; the bias of a pretrained mixture: 0.001)",
    )
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, FINE_TUNING_LEARNING_RATE)
    if args.upcycle and not args.model_name_or_path:
        parser.error("--upcycle has no effect without --model_name_or_path; name a dense model")
    if args.dense and args.model_name_or_path:
        parser.error("--dense is for models from scratch; train a pretrained dense model with recipes/lm.py")
    if args.dense and (args.balance or args.balance_strength or args.num_experts):
        parser.error("--dense has no experts to balance or to count; take --balance and --num_experts out")
    args.balance = args.balance or "bias"
    if args.model_name_or_path and not args.upcycle and (args.num_experts or args.experts_per_token):
        parser.error("--num_experts and --experts_per_token cannot change a pretrained model; take them out")
    size = MODEL_CONFIGS[args.model_config] if args.model_config else (0, 0, 0, 0, 8, 2)
    if args.model_config or args.upcycle:
        args.num_experts = args.num_experts or size[4]
        args.experts_per_token = args.experts_per_token or min(size[5], args.num_experts)
        if args.num_experts == 1:
            parser.error("--num_experts 1 is a dense model, with nothing to route; use at least 2, or --dense")
        if args.experts_per_token > args.num_experts:
            parser.error(f"--experts_per_token {args.experts_per_token} is more than --num_experts {args.num_experts}")
    if args.balance_strength and args.balance == "none":
        parser.error("--balance_strength has no effect with --balance none; take it out")
    if args.balance_strength is None:
        is_trained = args.model_name_or_path and not args.upcycle  # its routers need small steps
        args.balance_strength = 1e-3 if is_trained and args.balance == "bias" else 1e-2
    return args


def load_data(args):
    """Tokenizer, the model's configuration, training samples, and held-out samples or None."""
    train_source, validation_source = arguments.text_sources(args)
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code)
        if args.upcycle:
            config = experts.upcycled_config(config, args.num_experts, args.experts_per_token)
        config.get_text_config().output_router_logits = False  # would add the usual balancing loss
    else:
        layers, width, heads, kv_heads, _, _, expert_width, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        tokenizer = train_tokenizer(train_source, vocabulary)
        shape = dict(
            vocab_size=vocabulary,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=width // heads,
            intermediate_size=args.experts_per_token * expert_width,
            max_position_embeddings=max(2048, args.sequence_length),
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        if args.dense:
            config = Ernie4_5Config(**shape)
        else:
            config = experts.moe_config(shape, args.num_experts, args.experts_per_token, expert_width)
    if problems := check_model(config, tokenizer, args.sequence_length):
        raise UserError("\n".join(problems))
    if not args.dense:
        with torch.device("meta"):
            experts.check_routers(build_model(config, None, args.trust_remote_code), args.balance)
    train = tokenize(train_source, tokenizer, args.sequence_length, args.shape)
    validation = validation_source and tokenize(
        validation_source, tokenizer, args.sequence_length, args.shape, measure_compression=True
    )
    arguments.check_samples(args, train, validation)
    return tokenizer, config, train, validation


def make_model(args, config):
    """The model in float32, on every process the same."""
    if args.model_name_or_path and not args.upcycle:
        return build_model(config, args.model_name_or_path, args.trust_remote_code)
    model = build_model(config)
    for layer in experts.find_layers(model):  # transformers before 5.18 leaves them 0: all experts tie
        torch.nn.init.normal_(layer.router.weight, std=config.initializer_range)
    if not args.upcycle:
        return model
    with whole_weights():
        dense = build_model(load_config(args.model_name_or_path), args.model_name_or_path)
    return experts.upcycle(dense, model)


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


def train(args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state, router):
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
            router.begin_update(accelerator, model, batch)  # `exact` counts where the global batch's tokens go
            loss_sums = []
            for step, micro_batch in enumerate(batch.micro_batches, start=1):
                with synchronize_gradients(accelerator, model, now=step == len(batch.micro_batches)):
                    loss_sum = sum_losses(model, send_to_device(micro_batch, accelerator.device, non_blocking=True))
                    accelerator.backward(loss_sum * scale)
                loss_sums.append(loss_sum.detach())
            grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
            news = checkpoints.news(stop)  # of this rank; from here on of all, by the one collective of an update
            news |= router.news()  # where the global batch's tokens went
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
            record |= router.end_update(finite, news)  # `bias` moves
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
    identity = identify(args, accelerator, config, tokenizer, train_samples.fingerprint, "balance", "balance_strength")
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    model = make_model(args, config)
    loss_name = sum_token_losses(model)  # from here on, model(...) is the sum of the losses of a micro-batch's targets
    router = experts.Routing(model, args.balance, args.balance_strength)  # and has the balancing loss's gradient
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
    lines = {"loss": loss_name, **router.describe(model)}
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal, **lines)
    experts.gather_whole_blocks(accelerator, router.layers)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    router.prepared()
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        batch = next(iter(loader))
        router.begin_update(accelerator, model, batch)
        micro_batch = send_to_device(batch.micro_batches[0], accelerator.device)
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
        args, accelerator, model, optimizer, loader, validation_loader, output_dir, checkpoints, state, router
    )
    if stopped:
        tracking.end_early(accelerator, output_dir, state)
        return end_run(accelerator, STOPPED)
    results = progress.results() | checkpoints.best_at_end(model, optimizer)
    if validation_loader:
        results |= evaluate(model, validation_loader, accelerator)
        results |= tracking.held_out_results(results["validation_loss"], validation_samples)
    results |= router.report(accelerator)
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained, lines = accelerator.unwrap_model(model), experts.describe_results(results)
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            tokenizer.save_pretrained(model_dir)
        if not is_sharded(accelerator):
            prompt = (validation_samples or train_samples)[0][0][:16]
            results["sample"] = write_sample(trained, tokenizer, prompt)
            lines += [f"\nthe model writes:\n{results['sample']}\n"]
        tracking.print_results(results, output_dir, "AutoModelForCausalLM", *lines)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
