"""Kills, freezes, stops and returns hosts of elastic launches, and compares each run with one process left alone.

    python tests/elastic_runs.py --runs 50 --config multi_cpu --mixed_precision no

Each host is a network namespace of this machine with its own host name (needs root and iproute2). A run begins on three
hosts; each event comes at a random update: a host or only its launcher is killed, its cable is cut and it is killed, it
is frozen, or it is asked to leave; the hosts that are gone return. Every run must end by itself, with the samples and
learning rates of each update exactly as in the undisturbed run, and its losses to 1e-5 (relative); --tolerance changes
that.
Results are written to --results, a JSON file.
"""

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from conftest import BIN, ROOT, base_env, make_model_dir, stdlib_functions, write_jsonl
from running import children, program_of

sys.path.insert(0, str(ROOT))

from common.checkpoint.read import list_checkpoints  # noqa: E402
from common.report.tracking import versions  # noqa: E402

NUM_HOSTS = 3
KINDS = ("kill", "cut", "freeze", "leave", "launcher")


def ip(*words):
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Cluster:
    """Hosts 0 to N - 1: namespaces on one bridge. `command` is what runs a command on a host."""

    def __init__(self, name, num_hosts=NUM_HOSTS):
        self.name, self.num_hosts = name, num_hosts
        self.net = 1 + sum(name.encode()) % 250
        try:
            ip("netns", "add", f"{name}br")
            ip("-n", f"{name}br", "link", "add", "br0", "type", "bridge")
            ip("-n", f"{name}br", "link", "set", "br0", "up")
            for host in range(num_hosts):
                space, cable = f"{name}h{host}", f"{name}v{host}"
                ip("netns", "add", space)
                ip(
                    "link",
                    "add",
                    "name",
                    "eth0",
                    "netns",
                    space,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    cable,
                    "netns",
                    f"{name}br",
                )
                ip("-n", f"{name}br", "link", "set", cable, "master", "br0", "up")
                ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
                self.plug(host, "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def address(self, host):
        return f"10.77.{self.net}.{host + 1}"

    def plug(self, host, state):
        """The cable of a host: "up" or "down"."""
        ip("-n", f"{self.name}h{host}", "link", "set", "eth0", state)

    def command(self, host, *command):
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"', "-", f"host{host}"]
        return ["ip", "netns", "exec", f"{self.name}h{host}", *named, *map(str, command)]

    def close(self):
        for space in [f"{self.name}h{host}" for host in range(self.num_hosts)] + [f"{self.name}br"]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


class ElasticRun:
    """One run on the hosts of a cluster; `start` and the events act on a single host."""

    def __init__(self, cluster, directory, config, options, recipe, wait=2):
        self.cluster, self.directory, self.out = cluster, Path(directory), Path(directory) / "run"
        self.launch = ["launchers/elastic.py", "--hosts", f"1:{cluster.num_hosts}", "--wait", wait]
        self.launch += ["--processes_per_host", 1]
        self.recipe = ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}.yaml", *options, *recipe]
        self.recipe += ["--output_dir", self.out, "--resume", "auto"]
        self.processes, self.logs = {}, {}

    def start(self, host, cwd=ROOT):
        log = self.logs.setdefault(host, self.directory / f"host{host}.log")
        address = ["--address", self.cluster.address(host)]
        command = self.cluster.command(host, BIN / "python", *self.launch, *address, *self.recipe)
        env = base_env() | {"LAUNCH_TOKEN": f"{self.directory}-one-secret-of-all", "TQDM_DISABLE": "1"}
        with open(log, "a") as file:
            self.processes[host] = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=file, stderr=file, start_new_session=True
            )

    def all_of(self, host):
        """The processes of a host, of each client of tests/recipe_server.py also the process that it stands for."""
        with suppress(psutil.Error, FileNotFoundError):
            launcher = psutil.Process(self.processes[host].pid)
            return list(dict.fromkeys(two for one in [launcher, *children(launcher)] for two in (program_of(one), one)))
        return []

    def signal_all(self, host, number):
        for process in self.all_of(host):
            with suppress(psutil.Error):
                process.send_signal(number)

    def end(self, host):
        """SIGKILL to all processes of a host, which may be frozen."""
        self.signal_all(host, signal.SIGKILL)
        self.processes.pop(host).wait()

    def lose(self, host, kind):
        if kind == "freeze":
            return self.signal_all(host, signal.SIGSTOP)
        if kind == "launcher":  # alone: its processes save, and end
            program_of(self.processes[host]).kill()
            self.processes.pop(host).wait(timeout=120)
            return None
        if kind == "leave":
            program_of(self.processes[host]).send_signal(signal.SIGTERM)
            self.processes.pop(host).wait(timeout=120)
            return None
        if kind == "cut":  # no packet of its death leaves the host
            self.cluster.plug(host, "down")
        self.end(host)
        return None

    def bring_back(self, host):
        """Resumes a frozen host, or starts the command again on a host that is gone."""
        if host in self.processes:
            return self.signal_all(host, signal.SIGCONT)
        self.cluster.plug(host, "up")
        self.start(host)
        return None

    def lines(self):
        path = self.out / "metrics.jsonl"
        with suppress(OSError, ValueError):
            return [json.loads(line) for line in path.read_text().splitlines()]
        return []

    def wait_for(self, is_reached, seconds=180):
        """Waits until the last metrics fulfil the condition, or a host has ended; raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines = self.lines()
            if lines and is_reached(lines[-1]):
                return lines[-1]
            if any(process.poll() is not None for process in self.processes.values()):
                return lines[-1] if lines else None
            time.sleep(0.2)
        raise TimeoutError("no update within the time; the last lines: " + self.tails())

    def wait(self, seconds=300):
        """Waits for all hosts; returns their exit statuses."""
        deadline = time.monotonic() + seconds
        return {host: p.wait(max(1, deadline - time.monotonic())) for host, p in self.processes.items()}

    def tails(self):
        return "\n".join(f"{host}: {log.read_text()[-1500:]}" for host, log in self.logs.items())

    def close(self):
        for host in list(self.processes):
            self.signal_all(host, signal.SIGCONT)
            self.end(host)


def compare(expected, lines, tolerance):
    """Returns one line per difference between the metrics of the undisturbed run and those of an elastic run."""
    problems = []
    if [line["update"] for line in lines] != list(range(len(expected))):
        problems.append(f"updates {[line['update'] for line in lines]}")
    for one, other in zip(expected, lines, strict=False):
        for name in ("sample_digest", "learning_rate"):
            if one[name] != other[name]:
                problems.append(f"update {one['update']}: {name} {other[name]} instead of {one[name]}")
        if abs(one["loss"] - other["loss"]) > tolerance * abs(one["loss"]):
            problems.append(f"update {one['update']}: loss {other['loss']} instead of {one['loss']}")
    return problems


class Campaign:
    def __init__(self, args, directory):
        self.args, self.directory = args, Path(directory)
        self.random = random.Random(args.seed)
        functions = write_jsonl(self.directory / "functions.jsonl", [{"text": text} for text in stdlib_functions(60)])
        (self.directory / "model").mkdir()
        model = make_model_dir(self.directory / "model", functions)
        self.recipe = [
            "recipes/lm.py",
            "--model_name_or_path",
            model,
            "--train_file",
            functions,
            "--sequence_length",
            128,
        ]
        self.recipe += ["--num_updates", args.num_updates, "--global_batch_size", 12, "--micro_batch_tokens", 256]
        self.recipe += ["--learning_rate", 1e-3, "--max_grad_norm", 0.5, "--save_every", args.save_every]
        self.options = ["--mixed_precision", args.mixed_precision]

    def undisturbed(self):
        """The metrics of the run on one process."""
        out = self.directory / "undisturbed"
        config = ["--config_file", f"accelerate_configs/{self.args.config}.yaml", "--num_processes", 1]
        command = [BIN / "accelerate", "launch", *config, *self.options, *self.recipe, "--output_dir", out]
        subprocess.run(list(map(str, command)), cwd=ROOT, env=base_env(), check=True, capture_output=True)
        return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]

    def events(self):
        """Random events of one run: pairs of an action and a host. Afterwards all hosts are back."""
        there, gone, events = set(range(NUM_HOSTS)), [], []
        for _ in range(self.args.events):
            if gone and (len(there) == 1 or self.random.random() < 0.4):
                events.append(("return", gone.pop(self.random.randrange(len(gone)))))
                there.add(events[-1][1])
            else:
                host = self.random.choice(sorted(there))
                events.append((self.random.choice(KINDS), host))
                there.remove(host)
                gone.append(host)
        return events + [("return", host) for host in gone]

    def run(self, number, cluster, expected):
        """One run; returns its record."""
        events, directory = self.events(), self.directory / f"run{number}"
        directory.mkdir()
        run = ElasticRun(cluster, directory, self.args.config, self.options, self.recipe)
        record, began = {"events": [], "problems": []}, time.monotonic()
        try:
            for host in range(NUM_HOSTS):
                run.start(host)
            first = run.wait_for(lambda line: True)
            update = first["update"] if first else 0
            for kind, host in events:
                due = update + self.random.randint(3, 12)
                last = run.wait_for(lambda line, due=due: line["update"] >= due)
                newest = max((m["update"] for _, m in list_checkpoints(run.out)[0]), default=0)
                run.bring_back(host) if kind == "return" else run.lose(host, kind)
                update = min(last["update"], newest)
                record["events"].append({"kind": kind, "host": host, "update": last["update"], "checkpoint": newest})
            statuses = run.wait()
            record["problems"] += [f"host {host}: status {status}" for host, status in statuses.items() if status]
        except (TimeoutError, subprocess.TimeoutExpired, OSError, LookupError) as error:
            record["problems"].append(f"{type(error).__name__}: {error}")
        finally:
            run.close()
            for host in range(NUM_HOSTS):
                cluster.plug(host, "up")
        lines = run.lines()
        record["problems"] += compare(expected, lines, self.args.tolerance)
        record |= {"seconds": round(time.monotonic() - began), "world_sizes": [line["world_size"] for line in lines]}
        record["repeated_updates"] = self.repeated(run.out)
        record["largest_difference"] = max(
            (abs(a["loss"] - b["loss"]) / abs(a["loss"]) for a, b in zip(expected, lines, strict=False)), default=None
        )
        if record["problems"]:
            print(run.tails())
        else:
            shutil.rmtree(directory)
        return record

    @staticmethod
    def repeated(out):
        with suppress(OSError, ValueError):
            return json.loads((out / "run.json").read_text())["repeated"].get("repeated_updates", 0)
        return None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--events", type=int, default=4, help="per run, before the hosts that are gone return")
    parser.add_argument("--config", default="multi_cpu")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--num_updates", type=int, default=120)
    parser.add_argument("--save_every", type=int, default=5)
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path)
    return parser.parse_args()


def main():
    args = parse()
    records = []
    with tempfile.TemporaryDirectory(prefix="elastic") as directory:
        campaign = Campaign(args, directory)
        expected = campaign.undisturbed()
        cluster = Cluster(f"e{os.getpid() % 10000}")
        try:
            for number in range(args.runs):
                records.append(campaign.run(number, cluster, expected))
                print(number, json.dumps(records[-1]), flush=True)
                if args.results:
                    write_results(args, records)
        finally:
            cluster.close()
    failed = [record for record in records if record["problems"]]
    print(f"{len(records)} runs, {len(failed)} with problems")
    sys.exit(bool(failed))


def write_results(args, records):
    counts = {}
    for record in records:
        for event in record["events"]:
            counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    summary = {
        "command": " ".join(sys.argv),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "runs": len(records),
        "failed_runs": sum(bool(record["problems"]) for record in records),
        "events": counts,
        "most_repeated_updates": max(record["repeated_updates"] or 0 for record in records),
        "largest_loss_difference": max(record["largest_difference"] or 0 for record in records),
        "records": [record | {"world_sizes": sorted(set(record["world_sizes"]))} for record in records],
    }
    args.results.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
