"""Kills runs of the recipe with SIGKILL, continues each with --resume, and compares the end with a run left alone.

    python tests/kill_runs.py --kills 200 --config multi_cpu --processes 2

Half of the kills come at a random moment (of a new run: after its first save has begun), to one rank, the whole group
or the launcher; the others within a save, at each of its steps in a random order (before, in the middle of and after
every write, flush, rename and removal). Counts complete checkpoints that were lost, runs that hung, and updates that
had to be made again; status 0 if all is as it must be, and each step was hit where there were kills enough for all.
SIGTERM ends it after the next kill, with a report of what was done. Flags that are not its own go to the recipe;
without any, it trains a model of 2 layers on 60 functions of the standard library.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from conftest import ROOT, base_env, make_model_dir, quickly, specs_command, stdlib_functions, write_jsonl
from running import children as children_of
from running import program_of

sys.path.insert(0, str(ROOT))

from common.checkpoint.read import find_damage, list_checkpoints  # noqa: E402
from common.report.tracking import versions  # noqa: E402

KINDS = ["rank", "group", "launcher"]


def sound_updates(out):
    """Updates of the checkpoints that are complete on the disk."""
    found, _ = list_checkpoints(out)
    return [manifest["update"] for path, manifest in found if find_damage(path, manifest) is None]


def num_lines(out):
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.is_file() else 0


def descendants(process):
    """All that a launcher started; of each client of tests/recipe_server.py also the process that it stands for."""
    try:
        started = children_of(process)
        return [*dict.fromkeys([*started, *map(program_of, started)])]
    except (psutil.Error, FileNotFoundError):
        return []


def is_child(one, process):
    """Whether a process is there, and a child of `process`."""
    with suppress(psutil.NoSuchProcess):
        return one.ppid() == process.pid
    return False


class Campaign:
    def __init__(self, args, directory):
        self.args, self.directory = args, Path(directory)
        self.random = random.Random(args.seed)
        self.killed = {"rank": 0, "group": 0, "launcher": 0, "in a save": 0}
        self.lost_checkpoints = self.hangs = 0
        self.lost_updates, self.steps, self.hit = [], [], set()

    def start(self, out, resume, kill_in_save=None, to_words=quickly):
        self.sound_at_start = sound_updates(out)
        flags = [*self.args.flags, "--output_dir", out, "--save_every", self.args.save_every]
        flags += ["--num_updates", self.args.num_updates, *(["--resume"] if resume else [])]
        changes = {"kill_in_save": kill_in_save} if kill_in_save else {}
        if self.args.delay and not (kill_in_save and kill_in_save[1] is None):
            changes["slow_updates"] = self.args.delay
        mode = (self.args.config, "--num_processes", self.args.processes, "--mixed_precision", "no")
        command = specs_command(self.args.recipe, [(flags, changes)], self.directory, *mode)
        env = base_env(TQDM_DISABLE=1, CUDA_VISIBLE_DEVICES="")
        self.log = open(self.directory / "log", "w")
        return subprocess.Popen(to_words(command), cwd=ROOT, env=env, stdout=self.log, stderr=self.log)

    def list_steps(self, out):
        """Rank and name of each step of a save, in a random order, from a run that is left alone."""
        names = self.directory / "steps"
        self.run_to_the_end(out, resume=False, kill_in_save=[None, None, str(names)])
        for rank in range(self.args.processes):
            found = json.loads(Path(f"{names}-{rank}").read_text())
            self.steps += [(rank, name) for name in found]
        self.random.shuffle(self.steps)

    def wait(self, process):
        """Until it has ended, or is ended because it hangs."""
        try:
            process.wait(self.args.timeout)
        except subprocess.TimeoutExpired:
            self.hangs += 1
            for one in [*descendants(process), process]:
                one.kill()
            process.wait()

    def run_to_the_end(self, out, resume, kill_in_save=None):
        process = self.start(out, resume, kill_in_save)
        self.wait(process)
        assert process.returncode == 0, (self.directory / "log").read_text()

    def kill(self, out, resume, step=None):
        """One run, of which a rank kills itself at a step of a save, or which is killed some time after it has begun.

        False if it came to its end before.
        """
        begun, seen = num_lines(out) if resume else 0, self.directory / "seen"
        before = () if resume else range(self.args.save_every + 1)  # nothing is lost there
        seen.unlink(missing_ok=True)
        kind = "in a save" if step else self.random.choice(self.args.kinds)
        # Workers of tests/recipe_server.py do not know their launcher, and would outlive it.
        words = (lambda command: [str(part) for part in command]) if kind == "launcher" else quickly
        process, children = self.start(out, resume, step and [*step, str(seen)], words), []
        deadline = time.monotonic() + self.args.timeout
        first, wait = None, self.random.uniform(0, self.args.window)
        while process.poll() is None and time.monotonic() < deadline and not seen.is_file():
            children = descendants(process) or children
            # A resumed run cuts the file first: another size of it is the first sign of life.
            if first is None and (lines := num_lines(out)) != begun and lines not in before:
                first = time.monotonic()
            if step is None and first is not None and time.monotonic() > first + wait:
                break
            time.sleep(0.1)
        if not (seen.is_file() if step else process.poll() is None):
            return False
        self.before = sound_updates(out), num_lines(out)
        targets = {"in a save": [], "group": children, "launcher": [process]}.get(kind)
        if kind == "rank":
            launcher = program_of(process)
            ranks = [child for child in children if is_child(child, launcher)]
            targets = [program_of(one) for one in self.random.sample(ranks, min(1, len(ranks)))]
        for target in targets:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                target.kill()
        self.killed[kind] += 1
        self.wait(process)  # ranks that lost a peer or the launcher must end by themselves
        for alive in psutil.wait_procs(children, timeout=self.args.timeout)[1]:
            self.hangs += 1
            alive.kill()
        return True

    def check(self, out):
        """After a kill: what was complete is complete, unless newer ones took its place."""
        sound_before, lines = self.before
        sound_before += self.sound_at_start  # the kill itself may have left nothing
        sound = sound_updates(out)
        newest = max(sound, default=0)
        if sound_before and newest < max(sound_before):
            self.lost_checkpoints += 1
        self.lost_updates.append(max(0, num_lines(out) - newest))

    def kill_one(self, out, left):
        """One run that is killed, unless it ends before; `left` are the steps of a save that are still to be hit."""
        resume = bool(sound_updates(out))
        if not resume and out.exists():
            shutil.rmtree(out)  # killed before its first checkpoint
        if not resume or 2 * self.killed["in a save"] >= sum(self.killed.values()):
            return self.kill(out, resume)
        left.extend([] if left else [step for step in self.steps for _ in range(3)])  # it may end before it comes there
        step = left.pop(0)
        if was_killed := self.kill(out, resume, step):
            self.hit.add(step)
            left[:] = [one for one in left if one != step]
        return was_killed

    def go(self):
        left_alone, out = self.directory / "alone", self.directory / "run"
        self.list_steps(left_alone)
        left, hashes, kills = [], set(), 0
        while kills < self.args.kills:
            if (out / "run.json").is_file() and (out / "model").is_dir():  # finished: a new one
                hashes.add(outcome(out))
                out = self.directory / f"run-from-kill-{kills}"
            if self.kill_one(out, left):
                kills += 1
                self.check(out)
                told = f"sound: {sound_updates(out)}, lost {self.lost_updates[-1]}"
                print(f"kill {kills}: {self.killed}, {told}", flush=True)
        if not (out / "model").is_dir():
            resume = bool(sound_updates(out))
            if not resume:
                shutil.rmtree(out, ignore_errors=True)
            self.run_to_the_end(out, resume)
        hashes.add(outcome(out))
        result = {
            "command": " ".join(["python", *sys.argv]),
            "machine": f"{os.cpu_count()} cores, {platform.system()}, CPU, {self.args.config}",
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions(),
            "kills": kills,
            "killed": self.killed,
            "steps of a save": len(self.steps),
            "steps hit": len(self.hit),
            "complete checkpoints lost": self.lost_checkpoints,
            "hangs": self.hangs,
            "most updates made again": max(self.lost_updates, default=0),
            "mean updates made again": round(statistics.mean(self.lost_updates or [0]), 2),
            "save_every": self.args.save_every,
            "same end": hashes == {outcome(left_alone)},
        }
        never_hit = [f"rank {rank}: {name}" for rank, name in self.steps if (rank, name) not in self.hit]
        if self.killed["in a save"] >= len(self.steps) and never_hit:
            result["never hit"] = never_hit
        print(json.dumps(result))
        # While a checkpoint is written, updates go on: those come on top of the interval, and never as many again.
        good = result["same end"] and not self.lost_checkpoints and not self.hangs and "never hit" not in result
        return good and result["most updates made again"] < 2 * self.args.save_every


def outcome(out):
    """Hash of the final weights and of all that the metrics say but the clock's figures."""
    exact = ("update", "loss", "grad_norm", "learning_rate", "sample_digest")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    digest = hashlib.sha256(json.dumps([[line[key] for key in exact] for line in lines]).encode())
    (weights,) = (out / "model").glob("*.safetensors")  # a model's or an adapter's
    digest.update(weights.read_bytes())
    return digest.hexdigest()


def small_run(directory):
    data = write_jsonl(directory / "functions.jsonl", [{"text": text} for text in stdlib_functions(60)])
    flags = ["--train_file", data, "--model_name_or_path", make_model_dir(directory / "model", data)]
    return [*flags, "--shape", "examples", "--sequence_length", 64, "--global_batch_size", 8, "--micro_batch_size", 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--recipe", default="lm")
    parser.add_argument("--config", default="multi_cpu")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--num_updates", type=int, default=60)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.03, help="seconds more an update")
    parser.add_argument("--window", type=float, default=1.5, help="seconds after the first update in which to kill")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a run hangs")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what a random kill may kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", help="(default: a temporary one)")
    args, args.flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        args.flags = args.flags or small_run(Path(directory))
        signal.signal(signal.SIGTERM, lambda *_: setattr(args, "kills", 0))
        sys.exit(0 if Campaign(args, directory).go() else 1)


if __name__ == "__main__":
    main()
