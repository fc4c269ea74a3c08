"""The page and the picture that benchmarks/throughput.py writes from its measurements."""

import statistics

ARMS = {
    "recipe": "recipes/lm.py",
    "plain": "padded Accelerate loop",
    "trainer": "transformers Trainer",
    "sft": "TRL SFTTrainer",
}
MEASURES = {"tokens_per_second": "tokens/s", "memory_growth_bytes": "memory growth"}
# data set, peer, measure, the recipe's figure over the peer's: at least (speed) or at most (memory)
TARGETS = [
    ("functions", "plain", "tokens_per_second", 3.5),
    ("functions", "trainer", "tokens_per_second", 3.0),
    ("functions", "plain", "memory_growth_bytes", 0.4),
    ("functions", "trainer", "memory_growth_bytes", 0.4),
    ("blocks", "trainer", "tokens_per_second", 1.2),
    ("blocks", "trainer", "memory_growth_bytes", 0.6),
]


def figures(runs, name, arm, measure):
    """The values of one arm, a round each."""
    return [run[measure] for run in runs if (run["data"], run["arm"]) == (name, arm)]


def ratios(runs, name, peer, measure):
    """The recipe's value over the peer's, a round each."""
    both = zip(figures(runs, name, "recipe", measure), figures(runs, name, peer, measure), strict=True)
    return [ours / theirs for ours, theirs in both]


def spread(values, digits=0):
    """Median, and minimum to maximum, as text."""
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def results_table(results, name):
    """Markdown: one row an arm."""
    runs = results["runs"]
    lines = [
        "| arm | tokens/s | recipe / arm | memory growth, MB | recipe / arm | first loss | difference | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    recipe_loss = figures(runs, name, "recipe", "losses")[0][0]
    for arm in results["arms"]:
        megabytes = [value / 1e6 for value in figures(runs, name, arm, "memory_growth_bytes")]
        losses = figures(runs, name, arm, "losses")[0]
        lines.append(
            f"| {ARMS[arm]} | {spread(figures(runs, name, arm, 'tokens_per_second'))} "
            f"| {spread(ratios(runs, name, arm, 'tokens_per_second'), 2)} | {spread(megabytes)} "
            f"| {spread(ratios(runs, name, arm, 'memory_growth_bytes'), 2)} | {losses[0]:.6f} "
            f"| {losses[0] / recipe_loss - 1:.1e} | {losses[-1]:.4f} |"
        )
    return lines


def targets_table(results):
    """Markdown: one row a target, and whether the median holds it."""
    lines = ["| data | measure | recipe / peer | target | measured | |", "| --- | --- | --- | ---: | ---: | --- |"]
    for name, peer, measure, bound in TARGETS:
        faster = measure == "tokens_per_second"
        row = f"| {name} | {MEASURES[measure]} | recipe / {peer} | {'at least' if faster else 'at most'} {bound} "
        if name not in results["data"] or peer not in results["arms"]:
            lines.append(row + "| not measured | |")
            continue
        values = ratios(results["runs"], name, peer, measure)
        median = statistics.median(values)
        holds = median >= bound if faster else median <= bound
        verdict = "toy model" if results["quick"] else "holds" if holds else "**missed**"
        lines.append(row + f"| {spread(values, 2)} | {verdict} |")
    return lines


def write_page(results, path, picture):
    """The page that the README links to. `picture`: what `draw` drew, or None."""
    lines = ["# Speed and memory of the language-model recipe", ""]
    if results["quick"]:
        lines += ["**A smoke run with a toy model: its figures mean nothing.**", ""]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines += [
        f"{results['date']}. Machine: {results['machine']}. {results['threads']} threads, {results['precision']}. "
        f"{versions}.",
        "",
        f"Again with `{results['command']}`. What is the same in all arms, what differs, and how tokens and memory are "
        "counted: the first lines of `benchmarks/throughput.py`. Every figure of every run: the JSON file beside this "
        "page.",
        "",
        f"A Llama of {results['parameters'] / 1e6:.1f} M parameters, trained with AdamW. A figure is the median of "
        f'{results["rounds"]} rounds (least to most). "recipe / arm" is the ratio within a round: above 1 in speed and '
        "below 1 in memory, the recipe is better.",
        "",
        f"![tokens per second and memory growth of each arm]({picture.name})" if picture else "(no picture)",
        "",
        "## Targets",
        "",
        *targets_table(results),
    ]
    for name, settings in results["data"].items():
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"{settings['global_batch']} samples an update, of {settings['mean_length']:.0f} tokens on average and "
            f"{settings['max_length']} at most. Peers: micro-batches of {settings['micro_batch']} samples, "
            f"{settings['global_batch'] // settings['micro_batch']} accumulated; the recipe: as many samples as fit "
            f"{results['micro_batch_tokens']} tokens. Updates in a run: {settings['warmup']} of warm-up, "
            f"{settings['measured']} measured.",
            "",
            *results_table(results, name),
        ]
    lines += [
        "",
        "## The losses",
        "",
        'All arms start from the same weights and see the same samples in every update. "Difference" is the relative '
        "difference of an arm's first loss from the recipe's. Recipe, Trainer and SFTTrainer divide the sum of an "
        "update's losses by its number of targets: only rounding differs. The plain loop takes the mean of its "
        "micro-batches' means, as most loops do: where lengths vary that is another number, and another gradient. It "
        "also decays the weights of the norms, which the others do not.",
    ]
    path.write_text("\n".join(lines) + "\n")


def draw(results, path):
    """Two panels, tokens/s and memory growth: medians as bars, least to most as whiskers."""
    import matplotlib

    matplotlib.use("Agg")  # needs no screen
    import matplotlib.pyplot as plt

    panels = [
        ("tokens_per_second", 1, "tokens per second", "speed (more is better)"),
        ("memory_growth_bytes", 1e6, "MB", "memory growth over the loaded model (less is better)"),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    colors = dict(zip(ARMS, ("#1b6ca8", "#9aa5b1", "#c9a15a", "#8d6a9f"), strict=True))
    width = 0.8 / len(results["arms"])
    for axis, (measure, unit, label, title) in zip(axes, panels, strict=True):
        for place, arm in enumerate(results["arms"]):
            values = [[v / unit for v in figures(results["runs"], name, arm, measure)] for name in results["data"]]
            medians = [statistics.median(v) for v in values]
            least_and_most = [[abs(bound(v) - statistics.median(v)) for v in values] for bound in (min, max)]
            at = [group + (place - (len(results["arms"]) - 1) / 2) * width for group in range(len(values))]
            bars = axis.bar(at, medians, width * 0.92, yerr=least_and_most, capsize=3, color=colors[arm])
            axis.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=4, fontsize=8)
            bars.set_label(ARMS[arm])
        axis.set_xticks(range(len(results["data"])), results["data"])
        axis.set_ylabel(label)
        axis.set_title(title, fontsize=11)
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(f"{results['parameters'] / 1e6:.1f} M parameters; {results['machine']}", fontsize=10)
    figure.savefig(path, dpi=130)
