"""Trains a text classifier, or a regression on texts, on any machine that accelerate_configs/ names.

smallest run   accelerate launch --config_file accelerate_configs/cpu.yaml recipes/classify.py
one GPU        accelerate launch --config_file accelerate_configs/single_gpu.yaml recipes/classify.py \\
                   --model_name_or_path my_encoder/ --train_file reviews.csv --validation_file held_out.csv
several GPUs   accelerate launch --config_file accelerate_configs/multi_gpu.yaml --num_processes 8 \\
                   recipes/classify.py --model_name_or_path my_encoder/ --train_file reviews.csv --global_batch_size 128
rehearsal      the same with --dry_run, on any machine
continue       the same with --resume, after a stop or a crash; also on more or fewer GPUs, or in another mode

A row has a text (--text_column), or two (--pair_column), and a label (--label_column): one of several classes, named or
numbered; where the labels are numbers that are not all whole, a number is learned. The model is any encoder or decoder
that transformers has a class for. Without data: which package of the standard library a function comes from.
"""

import math
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from sklearn.metrics import confusion_matrix
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, BertConfig

# The repository's root, behind this file's folder (index 0), so that a copy of common/ beside a copy of this file wins.
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from common import arguments
from common.checkpoint.identity import identify
from common.checkpoint.save import Checkpoints, TrainingState
from common.data.labels import (
    LabelledTexts,
    check_length,
    collate_texts,
    encode_labels,
    is_regression,
    label_names,
    read_examples,
    read_packages,
    set_pipeline_inputs,
)
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError, shorten
from common.files import complete_or_absent
from common.models.classifiers import (
    build_classifier,
    check_padding,
    choose_labels,
    describe_new_weights,
    find_inputs,
    set_labels,
)
from common.models.load import check_model, load_config, parameter_sizes
from common.parallel import loading
from common.parallel.connect import check_space, make_accelerator, seed_everything
from common.parallel.ending import end_run, user_mistakes_end_here
from common.parallel.launch import check_launch, find_launch, is_rehearsal, runs_on_cpu
from common.report import tracking
from common.report.plots import save_confusion_matrix
from common.report.scores import describe_scores, score
from common.report.settings import print_settings
from common.training.accumulation import loss_scale, reduce_update, skip_step, sum_over_ranks, synchronize_gradients
from common.training.activation_checkpointing import apply_activation_checkpointing
from common.training.batching import make_loader
from common.training.optimizers import learning_rate, make_optimizer, set_learning_rate
from common.training.stopping import STOPPED, StopRequests

# Models to train from scratch, of BERT's shape. The learning rate is AdamW's at its peak.
MODEL_CONFIGS = {
    # layers, width, heads, MLP width, vocabulary, learning rate
    "tiny": (2, 128, 2, 512, 4096, 2e-3),  # 1.0 M parameters
    "small": (6, 384, 6, 1536, 8192, 5e-4),  # 14 M
    "base": (12, 768, 12, 3072, 32768, 1e-4),  # 111 M
}
FINE_TUNING_LEARNING_RATE = 2e-5


def parse_arguments():
    parser = arguments.ArgumentParser(description=__doc__, prog="classify.py")
    arguments.add_shared_arguments(parser)
    arguments.add_language_arguments(parser)
    parser.set_defaults(global_batch_size=32, num_updates=400, sequence_length=128)
    group = parser.add_argument_group("classification")
    group.add_argument("--model_config", help="size, from scratch (default: tiny)", **arguments.one_of(MODEL_CONFIGS))
    group.add_argument("--pair_column", help="of a second text, such as a hypothesis or an answer")
    group.add_argument("--label_column", default="label", help="of a class, or of a number")
    group.add_argument("--task", choices=("classification", "regression"), help="(default: by the labels)")
    group.add_argument("--new_head", action="store_true", help="in the place of the model's own, for other labels")
    args = parser.parse_args()
    arguments.choose_model(parser, args, MODEL_CONFIGS, FINE_TUNING_LEARNING_RATE)
    if args.new_head and not args.model_name_or_path:
        parser.error("--new_head has no effect without --model_name_or_path; take it out, or name the model")
    if not (args.train_file or args.dataset_name) and (args.validation_file or args.pair_column):
        parser.error("--validation_file and --pair_column need --train_file or --dataset_name; name the training data")
    return args


def load_data(args):
    """Tokenizer, the model's configuration, training samples, held-out samples or None, and the labels or None."""
    train_source, validation_source = arguments.text_sources(args)
    if train_source.embedded:
        classes, train_name, validation_name = None, "functions of the standard library", "functions of other files"
        train, validation = read_packages()
    else:
        columns = (args.pair_column, args.label_column)
        train_name, train, classes = read_examples(train_source, *columns)
        validation_name, validation = None, None
        if validation_source:
            validation_name, validation, _ = read_examples(validation_source, *columns)
    has_numbers = not classes and is_regression(train)
    task = args.task or ("regression" if has_numbers else "classification")
    names = label_names(train) if task == "classification" else None
    if args.model_name_or_path:
        config = load_config(args.model_name_or_path, args.trust_remote_code, AutoModelForSequenceClassification)
        tokenizer = load_tokenizer(args.model_name_or_path, args.trust_remote_code, needs_end_of_text=False)
        names = choose_labels(config, names, args.new_head, classes)
    else:
        layers, width, heads, mlp_width, vocabulary, _ = MODEL_CONFIGS[args.model_config]
        tokenizer = train_tokenizer(train_source, vocabulary)
        tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", tokenizer.cls_token_id), ("[SEP]", tokenizer.sep_token_id)],
        )
        config = BertConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=mlp_width,
            max_position_embeddings=max(512, args.sequence_length),
        )
    set_labels(config, names, args.label_column, tokenizer.pad_token_id)
    problems = check_model(config, tokenizer, args.sequence_length)
    problems += check_length(config, tokenizer, args.sequence_length, args.pair_column is not None)
    if problems:
        raise UserError("\n".join(problems))

    def make_samples(name, examples):
        targets = encode_labels(examples, names)
        return LabelledTexts(name, examples, targets, tokenizer, args.sequence_length)

    train_samples = make_samples(train_name, train)
    validation_samples = make_samples(validation_name, validation) if validation else None
    arguments.check_samples(args, train_samples, validation_samples)
    return tokenizer, config, train_samples, validation_samples, names


def compute_logits(model, micro_batch):
    """(N, labels), or (N, 1) of a regression, for the texts that have a target; in float32 at least."""
    inputs = {name: tensor for name, tensor in micro_batch.items() if not name.startswith("target")}
    logits = model(**inputs).logits[micro_batch["target_rows"]]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def sum_logit_losses(logits, targets):
    """Cross-entropies in nats, or squared errors."""
    if targets.is_floating_point():
        return (logits.squeeze(1) - targets).square().sum()
    return F.cross_entropy(logits, targets, reduction="sum")


def sum_losses(model, micro_batch):
    """The sum of the losses of a micro-batch's targets."""
    return sum_logit_losses(compute_logits(model, micro_batch), micro_batch["targets"])


@torch.no_grad()
def predict(model, loader, accelerator):
    """Mean loss, predictions (N,) and targets (N,) of all held-out samples, each counted once, alike on all ranks."""
    model.eval()
    loss_sums, answers = [], []
    for batch in loader:
        for micro_batch in batch.micro_batches:
            micro_batch = send_to_device(micro_batch, accelerator.device, non_blocking=True)
            logits, targets = compute_logits(model, micro_batch), micro_batch["targets"]
            loss_sums.append(sum_logit_losses(logits, targets))
            predicted = logits.squeeze(1) if targets.is_floating_point() else logits.argmax(1)
            answers.append(torch.stack([predicted.float(), targets.float(), torch.ones_like(targets).float()], 1))
    model.train()
    answers = accelerator.gather(accelerator.pad_across_processes(torch.cat(answers)))
    answers = answers[answers[:, 2] == 1].cpu()  # the ranks had unequal shares: without what made them equal
    assert len(answers) == len(loader.dataset.samples), "each held-out sample is to be counted once"
    (loss_sum,) = sum_over_ranks(accelerator, torch.stack(loss_sums).sum())
    predictions, targets = answers[:, :2].to(targets.dtype).numpy().T
    return loss_sum / len(answers), predictions, targets


def evaluate(model, loader, accelerator):
    """Mean loss over all held-out samples, and the figures of the predictions."""
    loss, predictions, targets = predict(model, loader, accelerator)
    return {"validation_loss": loss} | score(predictions, targets)


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
    tokenizer, config, train_samples, validation_samples, names = load_data(args)
    model_class = AutoModelForSequenceClassification
    check_space(asked, lambda: parameter_sizes(config, args.trust_remote_code, model_class))
    identity = identify(args, accelerator, config, tokenizer, train_samples.fingerprint)
    resumed = checkpoints.find(identity)  # the newest sound checkpoint, with --resume

    seed_everything(args.seed)  # the same weights on all ranks
    model, new_weights = build_classifier(config, args.model_name_or_path, args.trust_remote_code, args.new_head)
    if new_weights:
        accelerator.print(describe_new_weights(new_weights))
    apply_activation_checkpointing(model, args.activation_checkpointing, accelerator.device)
    if args.compile:
        model.base_model.compile(dynamic=True)
    optimizer = make_optimizer(args.optimizer, model, args.learning_rate, args.weight_decay)
    first_update = resumed.manifest["update"] if resumed else 0
    inputs = find_inputs(model)
    collate = partial(
        collate_texts,
        pad_token_id=tokenizer.pad_token_id,
        inputs=inputs,
        target_dtype=torch.int64 if names else torch.float32,
    )
    loader = make_loader(args, train_samples, accelerator, collate, range(first_update, args.num_updates))
    validation_loader = validation_samples and make_loader(args, validation_samples, accelerator, collate)
    held_out = validation_loader and validation_loader.dataset
    rehearsal = is_rehearsal(asked)
    lines = {"loss": "cross-entropy", "labels": f"{len(names)}: {shorten(names)}"} if names else {}
    lines = lines or {"loss": "squared error", "labels": "numbers"}
    tracking.print_run(args, accelerator, model, loader.dataset, held_out, rehearsal, **lines)
    model, optimizer = loading.prepare(accelerator, model, optimizer)
    check_padding(model, collate, train_samples, accelerator)
    seed_everything(args.seed, accelerator)  # another dropout on each rank

    if args.dry_run:
        micro_batch = send_to_device(next(iter(loader)).micro_batches[0], accelerator.device)
        accelerator.backward(sum_losses(model, micro_batch))
        print_settings(args, asked, accelerator)
        accelerator.print("dry run: one forward and one backward done, nothing written")
        return end_run(accelerator)
    output_dir = arguments.make_output_dir(args, accelerator)
    set_pipeline_inputs(tokenizer, args.sequence_length, inputs)
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
    results, lines = progress.results() | checkpoints.best_at_end(model, optimizer), []
    if validation_loader:
        loss, predictions, targets = predict(model, validation_loader, accelerator)
        results |= {"validation_loss": loss} | score(predictions, targets)
        lines = [describe_scores(results)]
    weights = accelerator.get_state_dict(model)  # gathered on the main process, where they are sharded
    if accelerator.is_main_process:
        trained = accelerator.unwrap_model(model)
        with complete_or_absent(output_dir / "model") as model_dir:
            trained.save_pretrained(model_dir, state_dict=weights)
            tokenizer.save_pretrained(model_dir)
        if validation_loader and names:
            counts = confusion_matrix(targets, predictions, labels=range(len(names)))
            save_confusion_matrix(counts, names, output_dir / "confusion.png")
            lines.append(f"confusion  {output_dir / 'confusion.png'}")
        tracking.print_results(results, output_dir, model_class.__name__, *lines)
    end_run(accelerator)


if __name__ == "__main__":
    with user_mistakes_end_here():
        main()
