"""Writes the page and the picture of the measurements of benchmarks/techniques.py."""

import statistics

from throughput_page import spread

SPEED, MEMORY = "samples_per_second", "memory_bytes"
FINAL = "all that pays"
BESIDE_FINAL = "plain, beside all that pays"  # the plain loop, in the rounds of what is left
HIDDEN = ("together: ", BESIDE_FINAL)  # names of runs that have no row in the table begin so
NEAR = 0.1  # arms whose speed and memory differ less from the plain loop's lie on its point in the picture
# Where a label may be: its offset from the point in points, and its side that is there.
PLACES = [((8, 0), ("left", "center")), ((-4, 8), ("left", "bottom")), ((-4, -8), ("left", "top"))]
PLACES += [((4, 8), ("right", "bottom")), ((4, -8), ("right", "top")), ((-8, 0), ("right", "center"))]
AIMS = {SPEED: (1.5, "speed at least 1.5 x the plain loop's"), MEMORY: (0.25, "memory at most 0.25 x the plain loop's")}
# Samples a second and MB, of the same arms: a V100 and Hugging Face's Trainer, from "Methods and tools for efficient
# training on a single GPU", the performance guide of transformers.
PUBLISHED = {
    "plain": (8.86, 14949),
    "accumulation": (7.75, 8681),
    "two": (5.99, 6775),
    "fp16": (18.64, 13939),
    "three": (10.09, 7275),
    "adafactor": (7.96, 12295),
    "adamw8bit": (9.15, 13085),
    "three_adafactor": (9.06, 4847),
    "three_adamw8bit": (10.35, 5363),
}


def runs_of(results, name):
    """The runs of an arm, those that failed too."""
    return [run for run in results["runs"] if run["arm"] == name]


def done_runs(results, name):
    """Those that were measured."""
    return [run for run in runs_of(results, name) if SPEED in run]


def medians(results, name):
    """Median speed and memory of an arm; None where it has no run."""
    runs = done_runs(results, name)
    return {measure: statistics.median(run[measure] for run in runs) for measure in (SPEED, MEMORY)} if runs else None


def gain(figures, base):
    """How much more speed for the memory; above 1 is better."""
    return (figures[SPEED] / base[SPEED]) / (figures[MEMORY] / base[MEMORY])


def ratios(results, name, measure):
    """Returns an arm's value divided by the plain loop's, for each round with both."""
    beside = BESIDE_FINAL if name == FINAL else "plain"
    plain = {run["round"]: run[measure] for run in done_runs(results, beside)}
    return [run[measure] / plain[run["round"]] for run in done_runs(results, name) if run["round"] in plain]


def names_of(results):
    """Returns the arms of the table, in the order of their first measurement; combinations are last."""
    names = dict.fromkeys(run["arm"] for run in results["runs"] if not run["arm"].startswith(HIDDEN))
    return [name for name in names if name != FINAL] + [name for name in names if name == FINAL]


def table_row(cells):
    return f"| {' | '.join(map(str, cells))} |"


def figure(runs, name, scale=1.0, digits=0):
    """Median and spread of what a run may not know."""
    values = [run[name] / scale for run in runs if run.get(name) is not None]
    return spread(values, digits) if values else "-"


def results_table(results):
    """Markdown: a row an arm; one that cannot run says why."""
    on_gpu = any(run.get("reserved_bytes") for run in results["runs"])
    titles = ["", "arm", "samples/s", "tokens/s", "speed / plain", "memory, MB", *["reserved, MB"] * on_gpu]
    titles += ["predicted, MB", "memory / plain", "state, bytes a parameter", "of the matrix rate", "loss", "rounds"]
    lines = [table_row(titles), "| ---: | --- |" + " ---: |" * (len(titles) - 2)]
    for number, name in enumerate(names_of(results), start=1):
        runs, label = done_runs(results, name), runs_of(results, name)[0]["label"]
        if not runs:
            failed = runs_of(results, name)[0]["failed"]
            lines.append(table_row([number, label, f"cannot run here: {failed}", *[""] * (len(titles) - 3)]))
            continue
        shares = [run["flops_per_second"] / results["matrix_rate"][run["precision"]] for run in runs]
        cells = [number, label, figure(runs, SPEED, digits=2), figure(runs, "tokens_per_second")]
        cells += [spread(ratios(results, name, SPEED), 2), figure(runs, MEMORY, 1e6)]
        cells += [figure(runs, "reserved_bytes", 1e6)] * on_gpu + [figure(runs, "predicted_bytes", 1e6)]
        cells += [spread(ratios(results, name, MEMORY), 2), state_bytes(results, runs[0])]
        cells += [f"{statistics.median(shares):.0%}", f"{statistics.median(run['losses'][-1] for run in runs):.3f}"]
        lines.append(table_row([*cells, len(runs)]))
    return lines


def state_bytes(results, run):
    """Counted in the run; of a recipe, in the loop's run with the same optimizer, for the share that it trains."""
    if run.get("optimizer_bytes") is not None:
        return f"{run['optimizer_bytes']:.2f}"
    asked = next((name for name in ("adamw8bit", "adafactor") if f"--optimizer {name}" in run["flags"]), "fused")
    counted = [one["optimizer_bytes"] for one in done_runs(results, asked)]
    return f"{statistics.median(counted) * run.get('share_trained', 1):.2f}" if counted else "-"


def steps_table(results):
    """Markdown: what was tried with the recipe, in turn."""
    lines = ["| tried | gain alone | samples/s | memory, MB | gain over what was kept | |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | --- |")
    runs = done_runs(results, "recipe")
    lines.append(
        f"| the recipe as shipped | | {figure(runs, SPEED, digits=2)} | {figure(runs, MEMORY, 1e6)} | | kept |"
    )
    for step in results["steps"]:
        runs, verdict = done_runs(results, step["arm"]), "kept" if step["kept"] else "left out"
        if not runs:
            verdict = f"cannot run here: {runs_of(results, step['arm'])[0]['failed']}"
        over = f"{step['gain']:.2f}" if runs else ""
        cells = [step["tried"], f"{step['alone']:.2f}", figure(runs, SPEED, digits=2), figure(runs, MEMORY, 1e6)]
        lines.append(table_row([*cells, over, verdict]))
    return lines


def published_table(results):
    """Markdown: the published figures beside ours, and the ratios to plain of both."""
    lines = ["| arm | samples/s, published | ours | / plain, published | ours | MB, published | ours | / plain, "]
    lines[0] += "published | ours |"
    lines.append("| --- |" + " ---: |" * 8)
    for name, published in PUBLISHED.items():
        ours, plain = medians(results, name), medians(results, "plain")
        cells = [next((run["label"] for run in runs_of(results, name)), name)]
        for place, (measure, unit, digits) in enumerate(((SPEED, 1, 2), (MEMORY, 1e6, 0))):
            theirs = published[place]
            cells += [f"{theirs:,}", f"{ours[measure] / unit:,.{digits}f}" if ours else "-"]
            cells += [f"{theirs / PUBLISHED['plain'][place]:.2f}"]
            cells += [f"{ours[measure] / plain[measure]:.2f}" if ours else "-"]
        lines.append(table_row(cells))
    return lines


def describe(results):
    """The setting, in a paragraph."""
    setting, samples = results["setting"], results["samples"]
    number = f"{samples['number']} samples of {samples['mean']:.0f} tokens on average, {samples['longest']} at most"
    text = f"`recipes/{setting['recipe']}.py`, model `{setting['model']}` of {results['parameters'] / 1e6:.1f} M "
    text += f"parameters with random weights. A run: {number}, {setting['global_batch']} an update; updates: "
    text += (
        f"{setting['warmup']} of warm-up, {setting['measured']} measured. The plain loop computes the samples of an "
    )
    text += f"update at once, accumulation in {setting['parts']} parts."
    if setting["preset"] == "bert-small":
        text += " (A scale model of the preset `bert-large`, whose 512 samples have 512 tokens each.)"
    return text


def load(results):
    """Returns the load average at the start of the runs; a higher load than their own shows other programs."""
    loads = [run["load"] for run in results["runs"] if SPEED in run]
    text = f"Load average as the runs began: {spread(loads, 1)}"
    shared = statistics.median(loads) > results["threads"] + 1
    return text + (": other programs shared the machine, so that times are rough." if shared else ".")


def page(results, picture):
    """Returns the page as Markdown. picture: name of the file that `draw` writes."""
    lines = ["# What each technique brings, alone and together", ""]
    if results["setting"]["quick"]:
        lines += ["**A smoke run with a toy model: its figures mean nothing.**", ""]
    malloc = ", ".join(f"{name}={value}" for name, value in results["malloc"].items()) or "as the system's libc has it"
    about = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines += [
        f"Machine: {results['machine']}. Threads: {results['threads']}. malloc: {malloc}. {about}.",
        f"{load(results)} Measured by, in turn:",
        "",
        *[f"- {command.replace(': ', ': `', 1)}`" for command in results["commands"]],
        "",
        f"{describe(results)} The docstring of `benchmarks/techniques.py` describes the baseline of each arm, how "
        "memory is measured, and how techniques are combined. The JSON file next to this page has the values of "
        "every run. A value is the median over the rounds (minimum to maximum); ratios are computed within a round.",
        "",
        f"![memory and speed of each arm, one point an arm]({picture})",
        "",
        *results_table(results),
    ]
    rates = ", ".join(f"{name} {rate / 1e9:,.0f}" for name, rate in results["matrix_rate"].items())
    lines += ["", f"The machine's matrix rate in GFLOP/s: {rates}."]
    if results["steps"]:
        lines += ["", "## Together", "", *steps_table(results)]
    if done_runs(results, FINAL):
        final = runs_of(results, FINAL)[0]
        options = f"--mixed_precision {final['precision']} " * (final["precision"] != "float32")
        command = f"accelerate launch {options}recipes/{results['setting']['recipe']}.py {final['flags']}".strip()
        lines += ["", f"What is left: `{command}`. Measured again, beside the plain loop:", ""]
        for measure, (bound, what) in AIMS.items():
            values = ratios(results, FINAL, measure)
            reached = round(statistics.median(values), 2)
            holds = reached >= bound if measure == SPEED else reached <= bound
            verdict = "toy model" if results["setting"]["quick"] else "reached" if holds else "**missed**"
            lines.append(f"- aim, {what}: {spread(values, 2)}, {verdict}")
    if results["setting"]["preset"] == "bert-large":
        lines += ["", "## Beside what was published", "", *published_table(results), ""]
        lines.append("Published: a V100 and Hugging Face's Trainer; its MB are those of the whole GPU.")
    return "\n".join(lines) + "\n"


def labelled(results):
    """Names of the arms whose points get a label, the most important ones first.

    The plain loop, the recipe and what pays together; then each arm whose speed or memory differs from the plain loop's
    by more than `NEAR`.
    """
    plain, ends = medians(results, "plain"), ["plain", "recipe", FINAL]
    found = {name: medians(results, name) for name in names_of(results)}
    far = [
        name
        for name, arm in found.items()
        if arm and plain and max(abs(arm[measure] / plain[measure] - 1) for measure in (SPEED, MEMORY)) > NEAR
    ]
    return [name for name in ends if found.get(name)] + [name for name in far if name not in ends]


def annotate(axis, texts):
    """Writes a text beside each point, inside the axes, where it covers no other text and no point. Returns the texts.

    texts: {(x, y): text}, the most important ones first; a text without a free place is left out.
    """
    from matplotlib.transforms import Bbox

    axis.figure.canvas.draw()  # settles the axes
    inside = axis.get_window_extent()
    centres = axis.transData.transform(list(texts))
    points = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in centres]
    written = []
    for number, (point, text) in enumerate(texts.items()):
        taken = [*points[:number], *points[number + 1 :], *(one.get_window_extent() for one in written)]
        for offset, sides in PLACES:
            options = {"xytext": offset, "textcoords": "offset points", "fontsize": 8}
            label = axis.annotate(text, point, ha=sides[0], va=sides[1], **options)
            label.set_in_layout(False)
            box = label.get_window_extent()
            if all(map(inside.contains, *zip(box.min, box.max, strict=True))) and not any(map(box.overlaps, taken)):
                written.append(label)
                break
            label.remove()
    return written


def draw(results, path):
    """Memory against speed: a point an arm; those that `labelled` names have a label. Returns the labels."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(11, 6), layout="constrained")
    places = {}
    for number, name in enumerate(names_of(results), start=1):
        if (found := medians(results, name)) is None:
            continue
        run, is_end = done_runs(results, name)[0], name in ("plain", "recipe", FINAL)
        color = "#1b6ca8" if run["precision"] == "float32" else "#c06c5b"
        x, y = found[MEMORY] / 1e6, found[SPEED]
        label = f"{number}  {run['label'].partition(':')[0]}"
        axis.scatter(x, y, s=90 if is_end else 36, color=color, marker="D" if is_end else "o", label=label, zorder=3)
        places[name] = (x, y), f"{number}  {run['label'].partition(':')[0].partition(' (')[0]}"
    axis.set_xlabel("memory in MB (less is better)")
    axis.set_ylabel("samples per second (more is better)")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(color="#eeeeee")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    axis.set_title(f"{results['machine']}\nblue: float32, red: 16 bit", fontsize=9)
    labels = annotate(axis, dict(places[name] for name in labelled(results)))
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return labels
