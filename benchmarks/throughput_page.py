"""Writes the page and the picture of the measurements of benchmarks/throughput.py."""

import statistics
from pathlib import Path

ARMS = {
    "recipe": "the recipe",
    "plain": "padded Accelerate loop",
    "tuned": "tuned Accelerate loop",
    "trainer": "transformers Trainer",
    "grouped": "Trainer, group_by_length",
    "sft": "TRL SFTTrainer",
    "packed": "TRL SFTTrainer, packing",
    "compiled": "the recipe, --compile",
    "trainer_compiled": "Trainer, torch_compile",
}
COLORS = dict(zip(ARMS, "#1b6ca8 #9aa5b1 #5f6b76 #c9a15a #e0c48c #8d6a9f #bda3cb #4f97cf #a8853f".split(), strict=True))
COMPILED = ("compiled", "trainer_compiled")  # arms with their own targets: all others compile nothing
SPEED, MEMORY = "tokens_per_second", "memory_growth_bytes"
WHOLE_RUN = ("grouped", "packed")  # arms whose updates are others: their speed is that of a run with its first update
LEAST_SPEED = {  # the recipe over the fastest of these peers, by data and precision
    ("functions", "float32"): (("plain",), 3.0),
    ("functions", "bf16"): (("plain",), 4.0),
    ("blocks", "float32"): (("plain", "trainer"), 1.2),
    ("blocks", "bf16"): (("plain", "trainer"), 1.5),
}
MOST_MEMORY = (("plain", "trainer"), 0.35)  # the recipe over the thriftiest of these; for a language model
# Why a row is missed, and what was tried: written by hand, and put below the table of targets.
NOTES = Path(__file__).resolve().with_name("throughput_notes.md")


def figures(results, row, arm, measure):
    """{round: value} of one arm."""
    return {run["round"]: run[measure] for run in results["runs"] if (run["row"], run["arm"]) == (row, arm)}


def ratios(results, row, peer, measure, own="recipe"):
    """Returns our arm's value divided by the peer's, for each round with both; for WHOLE_RUN, that of full runs."""
    ours, theirs = (figures(results, row, arm, measure) for arm in (own, peer))
    if measure == SPEED and peer in WHOLE_RUN:  # over the same samples
        runs = (figures(results, row, arm, "seconds") for arm in (own, peer))
        ours, theirs = ({number: 1 / sum(seconds) for number, seconds in run.items()} for run in runs)
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def measured_arms(results, row):
    """The arms of a row, in the order of ARMS."""
    return [arm for arm in ARMS if ratios(results, row, arm, SPEED)]


def spread(values, digits=0):
    """Median, and minimum to maximum, as text."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def targets(results):
    """Returns the targets of each row: (row, target, ratios to the closest peer, this peer, whether it is reached)."""
    for row, facts in results["rows"].items():
        arms = [arm for arm in measured_arms(results, row)[1:] if arm not in COMPILED]
        goals = [(SPEED, "above", arms, 1.0, "recipe"), (MEMORY, "below", arms, 1.0, "recipe")]
        if (facts["data"], facts["precision"]) in LEAST_SPEED:
            least = LEAST_SPEED[facts["data"], facts["precision"]]
            goals.append((SPEED, "at least", *least, "recipe"))
            goals.append((MEMORY, "at most", *MOST_MEMORY, "recipe"))
            if "compiled" in facts["arms"]:  # by default in long runs
                goals += [(SPEED, "at least", *least, "compiled"), (SPEED, "above", [COMPILED[1]], 1.0, "compiled")]
                goals.append((MEMORY, "below", [COMPILED[1]], 1.0, "compiled"))
        for measure, limit, peers, bound, own in goals:
            values = {peer: ratios(results, row, peer, measure, own) for peer in peers}
            values = {peer: found for peer, found in values.items() if found}
            if not values:
                continue
            nearest = (min if measure == SPEED else max)(values, key=lambda peer: statistics.median(values[peer]))
            median = round(statistics.median(values[nearest]), 2)  # as the page shows it: 1.00 is not ahead
            beyond = median > bound if measure == SPEED else median < bound
            holds = beyond or (limit.startswith("at ") and median == bound)
            who = "every peer" if bound == 1.0 and own == "recipe" else " and ".join(peers)
            what = f"{'speed' if measure == SPEED else 'memory'} / {who}: {limit} {bound:g}"
            what = what if own == "recipe" else f"{what}, with --compile"
            yield row, what, values[nearest], nearest, holds


def targets_table(results):
    """Markdown: one row a target, and whether the median holds it."""
    lines = ["| row | recipe's | measured | nearest peer | |", "| --- | --- | ---: | --- | --- |"]
    for row, what, values, nearest, holds in targets(results):
        verdict = "toy model" if results["quick"] else "holds" if holds else "**missed**"
        lines.append(f"| {row} | {what} | {spread(values, 2)} | {ARMS[nearest]} | {verdict} |")
    return lines


def results_table(results, row):
    """Markdown: one line an arm."""
    lines = [
        "| arm | tokens/s | recipe / arm | memory growth, MB | recipe / arm | rounds | first loss | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for arm in measured_arms(results, row):
        speed, growth = (list(figures(results, row, arm, measure).values()) for measure in (SPEED, MEMORY))
        losses = next(iter(figures(results, row, arm, "losses").values()))
        lines.append(
            f"| {ARMS[arm]} | {spread(speed)} | {spread(ratios(results, row, arm, SPEED), 2)} "
            f"| {spread([value / 1e6 for value in growth])} | {spread(ratios(results, row, arm, MEMORY), 2)} "
            f"| {len(speed)} | {losses[0]:.6f} | {losses[-1]:.4f} |"
        )
    return lines


def describe_row(row):
    """What the arms of a row train on, in a paragraph."""
    unit = "images" if row["recipe"] == "vision" else "tokens"
    text = f"`recipes/{row['recipe']}.py`, {row['parameters'] / 1e6:.1f} M parameters, {row['precision']}. "
    text += f"{row['global_batch']} samples an update"
    if unit == "tokens":
        text += f", of {row['mean_length']:.0f} tokens on average and {row['max_length']} at most"
    text += f". Updates in a run: {row['warmup']} of warm-up, {row['measured']} measured. Peers: micro-batches of "
    text += f"{row['micro_batch']} samples, {row['global_batch'] // row['micro_batch']} accumulated"
    text += f"; tuned: of {row['tuned_tokens']} tokens" if "tuned" in row["arms"] else ""
    return text + (f"; the recipe: of {row['micro_batch_tokens']}." if row["micro_batch_tokens"] else ".")


def write_page(results, path, picture):
    """Writes the page that the README links to. picture: the file that `draw` wrote, or None."""
    lines = ["# Speed and memory of the recipes and their peers", ""]
    if results["quick"]:
        lines += ["**A smoke run with toy models: its figures mean nothing.**", ""]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines += [
        f"Machine: {results['machine']}. {results['threads']} threads. {versions}. Measured by, in turn:",
        "",
        *[f"- {command.replace(': ', ': `', 1)}`" for command in results["commands"]],
        "",
        "The docstring of `benchmarks/throughput.py` describes what all arms have in common, how they differ, and how "
        "tokens and memory are counted. The JSON file next to this page has all values of every run.",
        "",
        "A value is the median over the rounds (minimum to maximum); with six rounds, this range contains the true "
        'median in 97 of 100 cases. "recipe / arm" is the ratio within a round: the recipe is better if it is above 1 '
        "in speed and below 1 in memory. All arms of a row compute in the same precision. The updates of the warm-up "
        "do not count, except with group_by_length and packing, for which the ratio is that of full runs. Calls that "
        "ended early are listed too; the rounds are those that an arm completed. With one or two of them, a ratio of "
        "speeds near 1 is no evidence, even where the target says that it holds.",
        "",
        f"![tokens per second and memory growth of each arm]({picture.name})" if picture else "(no picture)",
        "",
        "## Targets",
        "",
        *targets_table(results),
    ]
    is_published = path.resolve() == NOTES.parent / "results/throughput-cpu.md"
    if is_published and not results["quick"]:  # what the notes explain
        lines += ["", NOTES.read_text().strip()]
    for row, facts in results["rows"].items():
        if measured_arms(results, row):
            lines += ["", f"## {row.capitalize()}", "", describe_row(facts), "", *results_table(results, row)]
    lines += [
        "",
        "## The losses",
        "",
        "All arms start from the same weights. Recipe, tuned loop, Trainer and SFTTrainer see the same samples in "
        "every update, and divide the sum of its losses by its number of targets. So without dropout (language "
        "models), they differ only by rounding. The plain loop averages the means of its micro-batches, as most loops "
        "do. If lengths vary, this gives a different loss and gradient. Plain and tuned loop also decay the weights "
        "of norms. In classification and sequence to sequence, the Trainer logs the sum of the means of its "
        "micro-batches (four and two per update), not their mean. With group_by_length, the updates have different "
        "samples. With packing, they have concatenated documents, truncated at 512 tokens, and each position attends "
        "to everything before it in its block.",
    ]
    path.write_text("\n".join(lines) + "\n")


def headline(results):
    """The rows of the README's picture: those of lm.py with `medium`, or with any model where none is measured."""
    rows = [row for row, facts in results["rows"].items() if facts["recipe"] == "lm"]
    return [row for row in rows if results["rows"][row]["size"] == "medium"] or rows


def draw(results, path, rows):
    """Two panels, speed and memory growth of each arm over the same round of the plain loop; a group of bars a row."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    rows = [row for row in rows if measured_arms(results, row)]
    base = {row: "plain" if "plain" in measured_arms(results, row) else "recipe" for row in rows}
    drawn = {row: [arm for arm in ARMS if ratios(results, row, base[row], SPEED, arm)] for row in rows}
    height = 1.5 + 0.24 * sum(len(arms) + 1 for arms in drawn.values())
    figure, axes = plt.subplots(1, 2, figsize=(11, height), layout="constrained", sharey=True)
    panels = {SPEED: "speed: tokens per second (more is better)", MEMORY: "memory growth in MB (less is better)"}
    for axis, (measure, title) in zip(axes, panels.items(), strict=True):
        place, places = 0, []
        for row in rows:
            first = place
            for arm in drawn[row]:
                values = ratios(results, row, base[row], measure, arm)
                middle = statistics.median(values)
                whiskers = [[middle - min(values)], [max(values) - middle]]
                bar = axis.barh(place, middle, 0.85, xerr=whiskers, capsize=2, color=COLORS[arm])
                value = statistics.median(figures(results, row, arm, measure).values())
                axis.bar_label(bar, [f"{value / (1 if measure == SPEED else 1e6):,.0f}"], padding=4, fontsize=7)
                place += 1
            places.append((first + place - 1) / 2)
            place += 1
        axis.set_yticks(places, [row.replace(", ", "\n") for row in rows], fontsize=8)
        axis.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)
        axis.set_xlabel("padded Accelerate loop of the same round = 1")
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    used = [arm for arm in ARMS if any(arm in arms for arms in drawn.values())]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLORS[arm]) for arm in used]
    legend = {"loc": "outside lower center", "ncols": min(4, len(used)), "frameon": False, "fontsize": 8}
    figure.legend(handles, [ARMS[arm] for arm in used], **legend)
    figure.suptitle(results["machine"], fontsize=9)
    figure.savefig(path, dpi=130)
