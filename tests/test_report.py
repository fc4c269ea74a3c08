"""`python -m tools.compare`: opened in a browser without a network, the page shows what real runs measured."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from conftest import BIN, BROWSER, ROOT, assert_mistake, launch, need, read_metrics, run, write_rows
from running import wait_until

from common.errors import UserError
from tools.compare import page
from tools.compare.__main__ import MARK
from tools.compare.runs import read_runs

# Their last names are the same, and one ends a script where it is not escaped.
NAMES = ("</script><b>x", "other/script><b>x")
PANELS = ("loss", "learning rate", "gradient norm, before clipping", "tokens a second", "most memory of a process, GiB")
INK = "return document.getElementById('curves')._fullLayout.font.color.trim()"


def report(*arguments, cwd):
    return run([BIN / "python", "-m", "tools.compare", *arguments], cwd=cwd, PYTHONPATH=ROOT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of twelve updates; the first one is evaluated."""
    directory = tmp_path_factory.mktemp("report")
    rows = write_rows(directory / "rows.jsonl", 40)
    own = [("--validation_file", rows, "--eval_every", 4), ("--learning_rate", 0.002, "--micro_batch_size", 4)]
    for name, flags in zip(NAMES, own, strict=True):
        given = ["--train_file", rows, "--sequence_length", 32, "--num_updates", 12]
        launch(*given, *flags, "--output_dir", directory / name)
    return [directory / name for name in NAMES]


@contextlib.contextmanager
def browser(width=1200):
    """Chromium without a network, that keeps what it asks for and what it complains of."""
    need(*BROWSER)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield chromium
    finally:
        chromium.quit()


def open_page(chromium, path):
    """The addresses that the page asks for, and its complaints."""
    chromium.get(path.as_uri())
    wait_until(lambda: chromium.execute_script("return document.readyState") == "complete")
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    return asked, [entry["message"] for entry in chromium.get_log("browser")]


@pytest.fixture(scope="module")
def opened(runs, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    told = report(*runs, "--output", path, cwd=path.parent)
    assert told.returncode == 0 and f"{path} (" in told.stdout, told.stderr
    assert MARK in path.read_bytes()[:1000]
    with browser() as chromium:
        chromium.asked, chromium.complaints = open_page(chromium, path)
        wait_until(lambda: chromium.execute_script(INK) == "#1c2024")  # the page has been painted
        yield chromium


def curves(chromium):
    """Of each trace its run, panel, and points, and whether it is drawn."""
    found = chromium.execute_script("""
        const plot = document.getElementById("curves");
        const is_drawn = id => Boolean(plot.querySelector(`.cartesianlayer .trace${id}`));
        return plot._fullData.map(one => [one.meta, one.yaxis, one.x, one.y, is_drawn(one.uid)]);
    """)
    return [tuple(one) for one in found]


def test_the_page_draws_every_update_and_asks_for_nothing(opened, runs):
    assert opened.asked == [opened.current_url] and opened.complaints == []
    drawn = [(number, panel, xs, ys) for number, panel, xs, ys, is_drawn in curves(opened) if is_drawn]
    expected = []
    for number, metrics in enumerate(map(read_metrics, runs)):
        assert len(metrics) == 12
        for panel, name in (("y", "loss"), ("y", "validation_loss"), ("y2", "learning_rate"), ("y3", "grad_norm")):
            lines = [line for line in metrics if name in line]
            if lines:
                ys = pytest.approx([line[name] for line in lines], rel=1e-8)
                expected.append((number, panel, [line["update"] + 1 for line in lines], ys))
    assert sorted(one for one in drawn if one[1] < "y4") == sorted(expected, key=lambda one: one[:3])
    assert sorted(one[:2] for one in drawn if one[1] >= "y4") == [(0, "y4"), (0, "y5"), (1, "y4"), (1, "y5")]
    text = opened.find_element("css selector", "body").text
    assert all(title in text for title in PANELS) and all(name in text for name in NAMES)


def test_sources_that_were_measured_apart_have_a_panel(runs, tmp_path):
    """Control: a run without them has none."""
    shutil.copytree(runs[0], tmp_path / "mixed")
    lines = [line | {"validation_loss/a.txt": 5.5} for line in read_metrics(runs[0]) if "validation_loss" in line]
    (tmp_path / "mixed/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    titles = [
        [one.text for one in page.draw(read_runs([run])).layout.annotations] for run in (tmp_path / "mixed", runs[0])
    ]
    assert titles[0] == [*titles[1], "held-out loss of each source"]
    drawn = page.draw(read_runs([tmp_path / "mixed"])).data[-1]
    assert list(drawn.x) == [line["update"] + 1 for line in lines] and set(drawn.y) == {5.5}


def test_a_page_that_asks_for_something_is_noticed(opened, tmp_path):
    """The control of what is asked for, and of complaints."""
    path = tmp_path / "asking.html"
    path.write_text("<script src='https://example.com/plotly.js'></script>")
    with browser() as chromium:
        asked, complaints = open_page(chromium, path)
    assert "https://example.com/plotly.js" in asked and "ERR_NAME_NOT_RESOLVED" in complaints[0]


def test_a_point_tells_its_run_update_and_loss(opened, runs):
    from selenium.webdriver import ActionChains

    for update in (3, 9):
        at = opened.execute_script(
            """scrollTo(0, 0);
            const plot = document.getElementById("curves"), box = plot.getBoundingClientRect();
            const {xaxis, yaxis} = plot._fullLayout;
            return [box.left + xaxis._offset + xaxis.l2p(arguments[0]), box.top + yaxis._offset + 99];
            """,
            update,
        )
        actions = ActionChains(opened)
        actions.w3c_actions.pointer_action.move_to_location(*map(round, at))
        actions.perform()

        def told():
            return opened.execute_script("return document.querySelector('#curves .hoverlayer').textContent")

        for name, directory in zip(NAMES, runs, strict=True):
            loss = read_metrics(directory)[update - 1]["loss"]
            words = f"{name}, update {update}: training {loss:.5g}"
            wait_until(lambda words=words, told=told: words in told())


def rows_of(chromium, name):
    return chromium.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(row => "
        "[...row.children].map(cell => cell.textContent))",
        name,
    )


def test_the_tables_have_what_differs_and_the_figures(opened, runs):
    rows = {name: cells for name, *cells in rows_of(opened, "settings-that-differ")}
    rows_file, held_out = str(runs[0].parents[1] / "rows.jsonl"), rows.pop("held out")
    assert held_out[0].startswith(rows_file) and held_out[1] == "none"
    assert rows == {
        "--validation_file": [rows_file, "none"],
        "--eval_every": ["4", "0"],
        "--learning_rate": ["0.006", "0.002"],
        "--micro_batch_size": ["none", "4"],
        "--micro_batch_tokens": ["1024", "none"],
    }
    figures = {name: cells for name, *cells in rows_of(opened, "figures")}
    first, second = (json.loads((directory / "run.json").read_text())["results"] for directory in runs)
    assert figures["held-out loss"] == [f"{first['validation_loss']:.4f}", "–"]
    speeds = [f"{results['tokens_per_second']:,.0f}" for results in (first, second)]
    assert figures["tokens per second, without padding"] == speeds
    assert figures["status"] == ["finished"] * 2 and figures["updates"] == ["12 of 12"] * 2
    every = {name: cells for name, *cells in rows_of(opened, "all-settings")}
    assert every["--num_updates"] == ["12", "12"] and every["version of torch"][0].startswith("2.")


def test_a_run_is_hidden_in_all_panels_by_a_click_or_a_key(opened):
    buttons = opened.find_elements("css selector", "#bar button")
    assert [button.text for button in buttons] == list(NAMES)
    for hide in (buttons[1].click, lambda: buttons[0].send_keys("\n")):
        before = curves(opened)
        assert {one[:2] for one in before if one[4]} >= {(0, "y"), (1, "y")}
        hide()
        wait_until(lambda: len({one[0] for one in curves(opened) if one[4]}) == 1)
        hidden = {one[:2] for one in before if one[4]} - {one[:2] for one in curves(opened) if one[4]}
        (number,) = {number for number, _ in hidden}
        assert len(hidden) == 5 and buttons[number].get_attribute("aria-pressed") == "false"
        buttons[number].click()
        wait_until(lambda before=before: curves(opened) == before)


def test_curves_go_over_target_tokens(opened, runs):
    opened.find_element("css selector", "#bar option:last-child").click()
    seen = 0
    for line, x in zip(read_metrics(runs[1]), next(xs for number, _, xs, *_ in curves(opened) if number), strict=True):
        seen += line["target_tokens"]
        assert x == seen
    opened.find_element("css selector", "#bar option").click()
    assert next(xs for _, _, xs, *_ in curves(opened))[:3] == [1, 2, 3]


def test_the_page_is_as_narrow_as_the_smallest_telephone_and_as_dark(opened):
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    opened.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    size = {"width": 300, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait_until(lambda: opened.execute_script(INK) == "#e6e8ea")
    wait_until(lambda: opened.execute_script("return document.getElementById('curves')._fullLayout.width") < 300)
    assert opened.execute_script("return document.documentElement.scrollWidth <= innerWidth")


# --- without a browser


def copy(source, target):
    """A run's two files that the page is made of."""
    target.mkdir()
    return [shutil.copy(source / name, target) for name in ("run.json", "metrics.jsonl")]


def test_a_killed_run_is_read_up_to_its_last_whole_line(runs, tmp_path):
    """Control: a damaged line before the last one is none that a kill leaves."""
    record, metrics = copy(runs[0], tmp_path / "killed")
    facts = json.loads(Path(record).read_text()) | {"status": "running"}
    Path(record).write_text(json.dumps({name: value for name, value in facts.items() if name != "results"}))
    whole = Path(metrics).read_text().splitlines(keepends=True)
    Path(metrics).write_text("".join(whole[:7]) + whole[7][:50])
    (killed,) = read_runs([tmp_path / "killed"])
    figures = page.list_figures(killed)
    assert len(killed.lines) == 7 and figures["updates"] == "7 of 12" and "held-out loss" not in figures
    assert figures["status"].startswith("killed after update 7, peak memory ")
    assert figures["lowest held-out loss"].endswith("(update 4)")
    assert "killed after update 7" in page.write_page([killed])
    # Where the run ended there, its held-out loss is the last point.
    Path(record).write_text(json.dumps(facts | {"results": {"updates": 7, "validation_loss": 0.5}}))
    figures = page.list_figures(*read_runs([tmp_path / "killed"]))
    assert figures["lowest held-out loss"] == "0.5000 (update 7)"
    Path(metrics).write_text("".join(whole[:7]) + whole[7][:50] + "\n")
    with pytest.raises(UserError, match="metrics.jsonl: line 8 is corrupted; remove it"):
        read_runs([tmp_path / "killed"])


def test_a_long_run_keeps_its_spikes_and_becomes_no_large_page(runs, tmp_path):
    """Control: two thousand updates are drawn one by one."""
    assert page.thin([1.0] * 2000) == list(range(2000))
    values = [float(place % 7) for place in range(100_000)]
    values[54_321], values[77_777] = 1000.0, -1000.0
    kept = page.thin(values)
    assert len(kept) <= 2002 and {0, 54_321, 77_777, 99_999} <= set(kept) and kept == sorted(set(kept))
    _, metrics = copy(runs[0], tmp_path / "long")
    line, number = read_metrics(runs[0])[3], 20_000
    with open(metrics, "w") as file:
        file.writelines(json.dumps(line | {"update": update}) + "\n" for update in range(number))
    of_long, of_short = (len(page.write_page(read_runs([run]))) for run in (tmp_path / "long", runs[0]))
    assert 0 < of_long - of_short < 1_000_000 and of_short < 6_000_000


def test_runs_of_different_recipes_are_on_one_page(runs, tmp_path):
    flags = ["--num_updates", 2, "--global_batch_size", 16, "--eval_every", 1]
    launch(*flags, "--output_dir", tmp_path / "digits", script="recipes/vision.py")
    text = page.write_page(read_runs([runs[0], tmp_path / "digits"]))
    figure = page.draw(read_runs([runs[0], tmp_path / "digits"]))
    assert [note.text for note in figure.layout.annotations][3:] == ["images or tokens a second", PANELS[4], "accuracy"]
    assert '<tr><th scope="row">recipe</th><td>lm.py</td><td>vision.py</td></tr>' in text
    assert [trace.meta for trace in figure.data if trace.yaxis == "y6" and trace.y] == [1]


def test_mistakes_are_told_together_and_write_nothing(runs, tmp_path):
    _, metrics = copy(runs[0], tmp_path / "damaged")
    Path(metrics).write_text("{}\n" + Path(metrics).read_text())
    record, _ = copy(runs[0], tmp_path / "foreign")
    Path(record).write_text('["no", "run"]')
    (tmp_path / "empty").mkdir()
    given = ["missing", "empty", "damaged", "foreign", runs[0], f"{runs[0]}/."]
    result = report(*given, cwd=tmp_path)
    assert_mistake(
        result,
        r"missing: is not a directory; name the --output_dir",
        r"empty: has no run.json and no metrics.jsonl; name",
        r"damaged/metrics.jsonl: line 1 is corrupted; remove it",
        r"foreign/run.json: not as a run writes it",
        r"the same run is named twice; name it once",
        lines=5,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "empty", "foreign"]


def test_a_report_takes_the_place_of_a_report_and_of_nothing_else(runs, tmp_path):
    (tmp_path / "mine.html").write_text("<!doctype html>")
    for output, words in (
        ("mine.html", "mine.html: exists and is not a report; name a different file"),
        (".", "is a directory; name a file"),
        ("/proc/self/mem", "/proc/self/mem: .+; name a different file, or change its permissions"),
        ("none/report.html", "there is no directory none; create it first"),
    ):
        assert_mistake(report(runs[0], "--output", output, cwd=tmp_path), words)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.html"]
    assert (tmp_path / "mine.html").read_text() == "<!doctype html>"
    for _ in range(2):
        assert report(runs[0], cwd=tmp_path).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "report.html"]
