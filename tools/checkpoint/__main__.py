"""Lists and exports checkpoints, and uploads models: `python -m tools.checkpoint list`, `export` and `push`."""

import sys
from pathlib import Path

from common.checkpoint.read import find_best, find_damage, list_checkpoints
from common.command_parser import CommandParser
from common.errors import UserError
from common.models.saved_model import EXPORT_DTYPES, loading_call
from common.report.killed_runs import describe_killed
from tools.checkpoint.export import export
from tools.checkpoint.push import push


def main() -> None:
    parser = CommandParser(prog="python -m tools.checkpoint", description="Looks at and exports checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("list", help="the checkpoints of a run, and whether they are sound: else status 1")
    one.add_argument("output_dir", type=Path)
    one = commands.add_parser("export", help="one checkpoint as a model that from_pretrained loads")
    one.add_argument("checkpoint", type=Path)
    one.add_argument("target", type=Path)
    about = "precision of its weights (default: the checkpoint's)"
    one.add_argument("--merge", action="store_true", help="of an adapter: the base with the adapter in its weights")
    one.add_argument("--dtype", choices=EXPORT_DTYPES, help=about)
    one = commands.add_parser("push", help="upload model/ of a run to the Hugging Face hub")
    one.add_argument("output_dir", type=Path)
    one.add_argument("name", help="of the model on the hub, such as me/my-model; made if it is not there")
    one.add_argument("--private", action="store_true", help="if it is made, only you see it")
    try:
        args = parser.parse_args()
        if args.command == "push":
            print(push(args.output_dir, args.name, args.private))
            return
        if args.command == "export":
            export(args.checkpoint, args.target, args.dtype, args.merge)
            print(f"{args.target} ({loading_call(args.target)} loads it)")
            return
        found, problems = list_checkpoints(args.output_dir)
        damages = {path: find_damage(path, manifest) for path, manifest in found}
        best = find_best([(path, manifest) for path, manifest in found if not damages[path]])
        for path, manifest in found:
            size = sum(facts["bytes"] for facts in manifest["files"].values())
            measured = manifest["position"]["validation_loss"]
            loss = f", validation loss {measured:.4f}" if measured is not None else ""
            state = f"{damages[path] or 'sound'}{', the best' if path == best else ''}"
            world = manifest["world_size"]
            print(f"{path}: {manifest['mode']}, {world} process{'es' * (world > 1)}, {size:,} bytes{loss}, {state}")
        for line in problems:
            print(line)
        if how := describe_killed(args.output_dir):
            print(f"{args.output_dir}: the run: {how}")
        if not found and not problems:
            raise UserError(f"{args.output_dir} has no checkpoint; name the --output_dir of a run that has saved one")
        sys.exit(1 if problems or any(damages.values()) else 0)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
