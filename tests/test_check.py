"""The check before a long run: what it measures, and that each odd thing is marked, and nothing else."""

import copy
import json
import os
import re
import subprocess
from itertools import combinations

import pytest
from conftest import BIN, ROOT, assert_mistake, assert_refused, launch_command, run, told
from running import Run, free_port, give_up, need
from test_multi_node import Hosts

from tools.check.__main__ import rounds
from tools.check.report import report

MODULE = "tools.check"


def check_alone(*flags):
    return run([BIN / "python", "-m", MODULE, *flags], CUDA_VISIBLE_DEVICES="")


def check_together(*command, config="multi_cpu"):
    """By `accelerate launch` under its other name, with a shipped config; `command`: the module or a script."""
    return run([BIN / "accelerate-launch", *launch_command(config)[2:], *command], CUDA_VISIBLE_DEVICES="")


def outlier_rows(text):
    return [line for line in text.splitlines() if "<-" in line]


def test_alone_it_measures_this_machine(tmp_path):
    """And leaves nothing in the directory, the nearest one that is there."""
    result = check_alone("--directory", tmp_path / "runs/new", "--json", tmp_path / "figures.json")
    assert result.returncode == 0 and "no outliers" in result.stdout, told(result)
    assert "links within" not in result.stdout and "one process: no links" in result.stdout
    (mine,) = json.loads((tmp_path / "figures.json").read_text())["ranks"]
    (device,) = mine["devices"]
    assert device["rates"].keys() == {"no", "bf16"} and all(1e8 < rate < 1e14 for rate in device["rates"].values())
    assert 0 < mine["memory"]["free"] <= mine["memory"]["total"]
    assert mine["disk"]["directory"] == str(tmp_path) and mine["disk"]["write_rate"] > 1e5
    assert 0 < mine["disk"]["fsync_seconds"] < 5
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_two_processes_are_compared_and_nothing_is_odd(tmp_path):
    """By the shipped config. Control: the changes below, of which each is marked."""
    path = tmp_path / "figures.json"
    result = check_together("-m", MODULE, "--directory", tmp_path, "--json", path)
    rows = outlier_rows(result.stdout)
    assert result.returncode == (1 if rows else 0), told(result)
    assert all("of the median rate" in row for row in rows), rows  # another program may take one of two cores
    figures = json.loads(path.read_text())
    assert [rank["rank"] for rank in figures["ranks"]] == [0, 1] and figures["backend"] == "gloo"
    (link,) = figures["links"]
    assert link["ranks"] == [0, 1] and 0 < link["latency"] < 0.1 and link["bandwidth"] > 1e7
    assert abs(link["offset"]) < 0.1  # of one clock with itself


# What is done to rank 1, how its row is marked, and how many rows are.
SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from tools.check import __main__ as check
if os.environ["RANK"] == "1":
{change}
check.main()
"""
CHANGES = {
    "nothing": ("    pass", "", 0),  # the control
    "a fraction of a core": (
        """
    def share_core(*args, measure=check.sustained_rates):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        others, end = [], time.monotonic() + 60
        for _ in range(12):
            others.append(os.fork())
            if others[-1] == 0:
                while time.monotonic() < end:
                    pass
                os._exit(0)
        try:
            return measure(*args)
        finally:
            for one in others:
                os.kill(one, 9)
    check.sustained_rates = share_core
""",
        r"^ +1 .* cpu .*<- float32 \d+%, bf16 \d+% of the median rate of the others: every update waits",
        1,
    ),
    "another version": (
        """
    os.makedirs("{place}/numpy-0.1.dist-info")
    open("{place}/numpy-0.1.dist-info/METADATA", "w").write("Name: numpy\\nVersion: 0.1\\n")
    sys.path.insert(0, "{place}")
    from common.versions import versions
    versions.cache_clear()
""",
        r"^ +numpy .*<- 0\.1 at rank 1 on \S+; ranks may compute differently",
        1,
    ),
    "another clock": (
        """
    time_ns = time.time_ns
    time.time_ns = lambda: time_ns() + 3_000_000_000
""",
        r"^ +1 +\S+ +(2999|3000)\.\d+ +\S+  <- 3\.0 s off",
        1,
    ),
    "a slow answer": (
        """
    send = check.dist.send
    check.dist.send = lambda *args: (time.sleep(0.02), send(*args))
""",
        r"^ +0 .* 1 of 1 links slow, to rank 1: far",
        2,  # a row at each end
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_odd_with_a_rank_is_marked_and_nothing_else(name, tmp_path):
    change, pattern, num_rows = CHANGES[name]
    script, packages = tmp_path / "check.py", tmp_path / "packages"
    script.write_text(SCRIPT.format(root=str(ROOT), change=change.replace("{place}", str(packages))))
    result = check_together(script, "--directory", tmp_path)
    rows = outlier_rows(result.stdout)
    assert result.returncode == (1 if rows else 0), told(result)
    if name != "a fraction of a core":  # another program may take one of two cores
        rows = [row for row in rows if "of the median rate" not in row]
    assert len(rows) == num_rows, told(result)
    assert all(re.search(pattern, row) for row in rows[:1]), rows
    assert ("no outliers" in result.stdout) == (not outlier_rows(result.stdout))


def test_two_ranks_between_which_nothing_gets_through_are_named(tmp_path):
    script = tmp_path / "check.py"
    change = "    check.measure_link = lambda *_: time.sleep(60)"
    script.write_text(SCRIPT.format(root=str(ROOT), change=change))
    result = check_together(script, "--directory", tmp_path, "--connect_timeout", 8)
    assert_refused(result, r"nothing gets through between rank 0 on host \S+ and rank 1 on host \S+ within 8 s")


MISTAKES = {
    "--no_such": "unrecognized arguments: --no_such",
    "--connect_timeout 0": "--connect_timeout 0 is not above 0",
    "--directory README.md": "--directory README.md: README.md on host .* is not writable: Not a directory",
    "--directory /proc/runs": "/proc on host .* is not writable",
    "--json no/such/file": "--json no/such/file: name a file in an existing directory",
    "--json /proc/figures.json": "--json /proc/figures.json cannot be written: .*; name a file in a different",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(flags):
    assert_mistake(check_alone(*flags.split()), MISTAKES[flags])


def test_a_mistake_of_one_host_is_one_line_of_two_processes():
    assert_refused(
        check_together("-m", MODULE, "--directory", "README.md"), "--directory README.md: .* Not a directory"
    )


# --- several hosts


class ThreeHosts(Hosts):
    """Three hosts on one switch, a bridge on host 0."""

    def __init__(self):
        self.id = f"c{os.getpid() % 100000}"
        self.names = [f"{self.id}n{host}" for host in range(3)]
        self.ips = [f"10.84.0.{host + 1}" for host in range(3)]
        try:
            for name in self.names:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", self.names[0], "link", "add", "switch", "type", "bridge")
            for host in (1, 2):
                ends = ["name", f"port{host}", "netns", self.names[0], "type", "veth"]
                self._ip("link", "add", *ends, "peer", "name", "cable", "netns", self.names[host])
                self._ip("-n", self.names[0], "link", "set", f"port{host}", "master", "switch", "up")
            for name, ip, device in zip(self.names, self.ips, ("switch", "cable", "cable"), strict=True):
                self._ip("-n", name, "addr", "add", f"{ip}/24", "dev", device)
                self._ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def limit(self, host, rate):
        """What a host's cable carries out of it."""
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        subprocess.run(["tc", "-n", self.names[host], "qdisc", "add", "dev", "cable", *limit], check=True)


def test_the_host_with_a_slow_cable_is_marked(tmp_path):
    """Control: the same hosts before the cable was slow.

    Three hosts on two cores may be slow to answer, and a link that is measured while another program works is slow; but
    only a cable slows all links of a host.
    """
    need("a network of three hosts", iproute2="ip")
    try:
        hosts = ThreeHosts()
    except subprocess.CalledProcessError as error:
        give_up(f"no network namespaces with a bridge here: {error.stderr}")
    try:
        for rate in (None, "200mbit"):
            if rate:
                hosts.limit(2, rate)
            place = tmp_path / str(rate)
            place.mkdir()
            port = free_port()
            with Run(place) as started:
                for host in range(3):
                    words = ["--num_machines", 3, "--num_processes", 3, "--mixed_precision", "no", "--machine_rank"]
                    words += [host, "--main_process_ip", hosts.ips[0], "--main_process_port", port]
                    command = launch_command("multi_node", *words, "-m", MODULE, "--directory", place)
                    started.start(hosts.command(host, *command))
                statuses, text = started.wait(100), started.output(0)
            of_links = re.search(r"links between machines.*?\n\n", text, re.S)[0]
            assert "links within" not in text and len(re.findall(r" host\d ", of_links)) == 3, text
            rows = [row for row in outlier_rows(of_links) if "of the usual bandwidth" in row]
            is_slow = any(re.search(r"^ +2 .*<- 2 of 2 links slow, to rank \d: ", row) for row in rows)
            assert is_slow == (rate is not None), text
            assert all(statuses) or not rate, text
    finally:
        hosts.close()


# --- how it is worked out


@pytest.mark.parametrize(
    "machines",
    [[[0]], [[0, 1]], [[0, 1, 2]], [[0], [1], [2]], [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 2], [3, 4], [5]]],
)
def test_every_pair_meets_once_and_no_rank_twice_in_a_round(machines):
    found = list(rounds(machines))
    for pairs in found:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))
    met = [tuple(sorted(pair)) for pairs in found for pair in pairs]
    assert sorted(met) == list(combinations(range(sum(map(len, machines))), 2))


def test_a_round_between_machines_keeps_all_their_ranks_busy():
    machines = [[8 * machine + place for place in range(8)] for machine in range(8)]
    found = list(rounds(machines))
    assert len(found) == 63 and all(len(pairs) == 32 for pairs in found)


def test_many_ranks_are_paired_in_few_rounds():
    """Each with those of its machine, and with one on each of 63 others."""
    machines = [[8 * machine + place for place in range(8)] for machine in range(128)]
    found = list(rounds(machines))
    partners = [other for pairs in found for pair in pairs if 21 in pair for other in pair if other != 21]
    assert len(found) == 7 + 63 and len(partners) == len(set(partners)) == 7 + 63
    assert {other % 8 for other in partners[7:]} == {21 % 8}


def eight_gpus():
    """Figures of two machines with four GPUs each, as `measure` would have them, without outliers."""
    gpu = {"name": "GPU", "memory": {"free": 79e9, "total": 80e9}, "rates": {"no": 3e14, "bf16": 6e14, "fp16": 6e14}}
    ranks = []
    for rank in range(8):
        mine = {"rank": rank, "machine": rank // 4 * 4, "host": f"n{rank // 4}", "versions": {"torch": "2"}}
        mine |= {"memory": {"free": 9e11, "total": 1e12}, "devices": [{"device": f"cuda:{rank % 4}", **gpu}]}
        if rank % 4 == 0:
            disk = {"directory": "runs", "free": 1e12, "write_rate": 2e9, "fsync_seconds": 1e-3}
            mine["disk"] = disk
        ranks.append(copy.deepcopy(mine))
    links = {}
    for low, high in combinations(range(8), 2):
        near = low // 4 == high // 4
        links[low, high] = {"latency": 1e-5, "bandwidth": 3e11 if near else 2e10, "offset": 0.0}
    return {"ranks": ranks, "links": links, "backend": "nccl"}


FIGURES = {
    "nothing": (lambda ranks, links: None, []),
    "a hot GPU": (
        lambda ranks, links: ranks[3]["devices"][0]["rates"].update(bf16=5e14),
        [r"^ +3 +n0 .*bf16 83% of the median rate of the others"],
    ),
    "a GPU in use": (
        lambda ranks, links: ranks[5]["devices"][0]["memory"].update(free=30e9),
        [r"^ +5 +n1 .*50\.0 GB are taken by other processes"],
    ),
    "a smaller host": (
        lambda ranks, links: ranks[4]["memory"].update(total=5e11),
        [r"^ +4 +n1 +host .*50% of the memory of the others"],
    ),
    "a full host": (
        lambda ranks, links: ranks[0]["memory"].update(free=1e11),
        [r"^ +0 +n0 +host .*11% of what is free on the others"],
    ),
    "a slow disk": (
        lambda ranks, links: ranks[4]["disk"].update(write_rate=2e8, fsync_seconds=0.1, free=1e10),
        [r"^ +4 +n1 +runs .*1% of the others' free space.*10% of the others' rate.*fsync takes 100\.0 times"],
    ),
    "a disk that is slower but fast enough": (
        lambda ranks, links: ranks[4]["disk"].update(fsync_seconds=0.01),
        [],
    ),
    "one cable": (
        lambda ranks, links: links[1, 6].update(bandwidth=5e9),
        [r"^ +1 +n0 .*1 of 4 links slow, to rank 6: 25% of", r"^ +6 +n1 .*1 of 4 links slow, to rank 1: 25% of"],
    ),
    "all cables of a GPU": (
        lambda ranks, links: [link.update(latency=1e-4) for pair, link in links.items() if 7 in pair and pair[0] < 4],
        [r"^ +7 +n1 .*4 of 4 links slow, to rank 0: latency 10\.0 times the usual one"],
    ),
    "the clock of rank 0": (
        lambda ranks, links: [link.update(offset=9.0) for pair, link in links.items() if 0 in pair],
        [r"^ +0 +n0 .*9\.0 s off"],
    ),
}


@pytest.mark.parametrize("case", FIGURES)
def test_figures_that_stand_out_are_marked_where_they_are(case):
    """On GPUs and between machines, as this machine cannot have it. The first case is the control."""
    change, patterns = FIGURES[case]
    figures = eight_gpus()
    change(figures["ranks"], figures["links"])
    text, num_outliers = report(figures)
    rows = outlier_rows(text)
    assert len(rows) == num_outliers == len(patterns), text
    for row, pattern in zip(rows, patterns, strict=True):
        assert re.search(pattern, row), row


def test_of_many_rows_only_the_odd_ones_are_shown():
    figures = eight_gpus()
    first = figures["ranks"]
    figures["ranks"] = [copy.deepcopy(first[rank % 8]) | {"rank": rank} for rank in range(80)]
    figures["links"], figures["ranks"][70]["devices"][0]["rates"]["fp16"] = {}, 1e14
    text, num_outliers = report(figures)
    table = text.split("\n\n")[1]
    assert num_outliers == 1 and len(table.splitlines()) == 4 and "and 79 rows without outliers" in table, table
