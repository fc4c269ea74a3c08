"""Lists and exports checkpoints, and uploads models: `python -m tools.checkpoint list`, `export` and `push`."""

import sys
from pathlib import Path

from common.checkpoint.read import find_best, find_damage, list_checkpoints
from common.command_parser import CommandParser
from common.errors import UserError
from common.models.saved_model import EXPORT_DTYPES, loading_call
from common.output import guard_output
from common.report.killed_runs import describe_killed
from tools.checkpoint.export import export
from tools.checkpoint.push import push


def main() -> None:
    guard_output()
    parser = CommandParser(prog="python -m tools.checkpoint", description="Lists, exports and uploads checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("list", help="the checkpoints of a run; exit status 1 if one is corrupted")
    command.add_argument("output_dir", type=Path)
    command = commands.add_parser("export", help="a checkpoint as a model that from_pretrained loads")
    command.add_argument("checkpoint", type=Path)
    command.add_argument("target", type=Path)
    command.add_argument("--merge", action="store_true", help="merge an adapter into the weights of its base")
    command.add_argument("--dtype", choices=EXPORT_DTYPES, help="dtype of the weights (default: the checkpoint's)")
    command = commands.add_parser("push", help="upload model/ of a run to the Hugging Face hub")
    command.add_argument("output_dir", type=Path)
    command.add_argument("name", help="name of the model on the hub, such as me/my-model; created if it does not exist")
    command.add_argument("--private", action="store_true", help="create a private model")
    try:
        args = parser.parse_args()
        if args.command == "push":
            print(push(args.output_dir, args.name, args.private))
            return
        if args.command == "export":
            export(args.checkpoint, args.target, args.dtype, args.merge)
            print(f"{args.target} (load with {loading_call(args.target)})")
            return
        sys.exit(_list(args.output_dir))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _list(output_dir: Path) -> int:
    """Prints the checkpoints of a run; returns the exit status: 1 if a checkpoint is corrupted, otherwise 0."""
    checkpoints, problems = list_checkpoints(output_dir)
    damages = {path: find_damage(path, manifest) for path, manifest in checkpoints}
    best = find_best([(path, manifest) for path, manifest in checkpoints if not damages[path]])
    for path, manifest in checkpoints:
        size = sum(file["bytes"] for file in manifest["files"].values())
        measured, world = manifest["position"]["validation_loss"], manifest["world_size"]
        loss = f", validation loss {measured:.4f}" if measured is not None else ""
        state = f"{damages[path] or 'valid'}{', the best' if path == best else ''}"
        print(f"{path}: {manifest['mode']}, {world} process{'es' * (world > 1)}, {size:,} bytes{loss}, {state}")
    for line in problems:
        print(line)
    if killed := describe_killed(output_dir):
        print(f"{output_dir}: the run: {killed}")
    if not checkpoints and not problems:
        raise UserError(f"{output_dir} has no checkpoint; name the --output_dir of a run that has saved one")
    return 1 if problems or any(damages.values()) else 0


if __name__ == "__main__":
    main()
