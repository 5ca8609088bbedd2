#!/usr/bin/env python3
"""Opens pages in a headless Chromium: nothing is fetched, nothing in the console is an error, and the values under the
cursor are those of the rows, on a wide screen and on a narrow one. Ends with 77 without Chromium.
  browse.py MUSTER"""
import json
import os
import random
import subprocess
import sys
import tempfile

import browser

hostile = "<img src=x onerror=window.hurt=1>"


def write_run(folder, seed, count):
    dice, rows = random.Random(seed), []
    os.makedirs(folder)
    for number in range(1, count + 1):
        rows.append({
            "training_iteration": number, "global_step": number * 5, "time_total_s": number * 1.5, "timestamp": 1000 + number,
            "samples_per_s": 100 + dice.random(), "world_size": 2, "loss": 1 / number + dice.random() / 10,
            "acc": None if number % 9 == 4 else dice.random(), hostile: dice.random(), "below": -dice.random(),
            "rank_times": {name: {"min": 0.1, "median": 0.2, "max": 0.4, "max_rank": 1}
                           for name in ("compute", "wait", "data", "save")},
            "memory_bytes": {"max": 10**9, "max_rank": 0}})
        if number % 10 == 0:
            rows[-1].update(checkpoint_dir_name="checkpoint_%06d" % (number // 10),
                            late_ranks=[{"rank": 1, "host": hostile, "cause": "shared cores", "behind": 0.25}])
    with open(os.path.join(folder, "result.json"), "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    with open(os.path.join(folder, "params.json"), "w") as file:
        json.dump({"train_loop_config": {"lr": seed, hostile: "</script><script>window.hurt=1</script>"}, "program": "fit"}, file)
    with open(os.path.join(folder, "status.json"), "w") as file:
        json.dump({"state": "finished", "updated": 2000, "time": {"training_s": 9, "repeated_s": 1, "idle_s": 1},
                   "starts": [{"started": 1000, "ended": 1020, "world_size": 3, "state": "died", "error": hostile},
                              {"started": 1030, "ended": 1060, "world_size": 2, "state": "finished"}]}, file)
    with open(os.path.join(folder, "trace_11_20.json"), "w") as file:
        spans = [{"name": name, "count": 20, "total_ms": total, "longest_ms": total / 10, "longest_rank": 1, "longest_at_ms": 3.5}
                 for name, total in ((hostile, 12.5), ("step", 150.25))]
        json.dump({"traceEvents": [], "otherData": {"ranks": 2, "spans": spans, "dropped_events": 0,
                                                    "waited_for": [{"rank": 1, "ms": 8.25}]}}, file)
    return rows


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def cells(page, metric):
    """[[x, value]] of each run at the cursor, as the table below the curve has them."""
    card = f"[...document.querySelectorAll('.card')].find(card => card.dataset.metric === {json.dumps(metric)})"
    return page.value(f"[...{card}.querySelectorAll('.value')].map(cell => [Number(cell.dataset.x), JSON.parse(cell.dataset.value)])")


def place(page, metric):
    """Scrolls to a curve; its rectangle on the screen."""
    return page.value(f"""(async () => {{
      const card = [...document.querySelectorAll('.card')].find(card => card.dataset.metric === {json.dumps(metric)});
      card.scrollIntoView({{block: 'center'}});
      for (let i = 0; i < 100 && !card.querySelector('canvas'); ++i) await new Promise(done => setTimeout(done, 50));
      await new Promise(done => setTimeout(done, 100));
      const chart = card.querySelector('canvas').getBoundingClientRect();
      return {{x: chart.x, y: chart.y, width: chart.width, height: chart.height}};
    }})()""")


def check_values(page, metric, runs):
    at = place(page, metric)
    seen = set()
    for part in (0.3, 0.5, 0.7, 0.9):
        page.move(at["x"] + at["width"] * part, at["y"] + at["height"] * 0.4)
        page.value("new Promise(done => setTimeout(done, 60))")
        values = cells(page, metric)
        check(len(values) == len(runs), f"{metric}: {len(values)} runs are shown")
        for (x, value), rows in zip(values, runs):
            row = next((row for row in rows if row["global_step"] == x), None)
            check(row is not None and row[metric] == value, f"{metric} at step {x} is {value}")
        seen.add(values[0][0])
    check(len(seen) == 4, f"{metric}: the cursor does not move: {seen}")


def check_zoom(page):
    at = place(page, "loss")
    page.drag(at["x"] + at["width"] * 0.4, at["y"] + 60, at["x"] + at["width"] * 0.6)
    labels = "[...document.querySelectorAll('[data-metric=loss] .dygraph-axis-label-x')].map(label => Number(label.textContent))"
    zoomed = page.value(labels)
    check(max(zoomed) - min(zoomed) < 150, f"the zoomed axis has {zoomed}")
    page.value("document.querySelector('[data-metric=loss] .chart').focus()")
    page.press("0")
    check(max(page.value(labels)) - min(page.value(labels)) >= 150, "0 does not show everything")
    before = cells(page, "loss")[0][0]
    page.press("ArrowLeft")
    check(cells(page, "loss")[0][0] < before, "the arrow does not move the cursor")


def use_controls(page):
    for act in ("smoothing.value = 0.9; smoothing.dispatchEvent(new Event('input'))", "log.click()", "log.click()",
                "axis.value = 'hours'; axis.dispatchEvent(new Event('change'))",
                "axis.value = 'step'; axis.dispatchEvent(new Event('change'))",
                "smoothing.value = 0; smoothing.dispatchEvent(new Event('input'))",
                "theme.click()", "theme.click()", "theme.click()"):
        page.value("{ const axis = document.querySelector('#axis'), log = document.querySelector('#log'), "
                   "smoothing = document.querySelector('#smoothing'), theme = document.querySelector('#theme'); " + act + " }")


def check_page(file, runs, width, dark):
    with browser.Page(browser.find(), file, width, dark=dark) as page:
        check(page.value("document.documentElement.dataset.theme") == ("dark" if dark else "light"), "the theme")
        for metric in ("loss", "acc", hostile):
            check_values(page, metric, runs)
        check_zoom(page)
        use_controls(page)
        check_values(page, "below", runs)
        height = page.value("document.documentElement.scrollHeight")
        for y in range(0, height, 500):
            page.value(f"window.scrollTo(0, {y}); new Promise(done => setTimeout(done, 30))")
        check(page.value("document.documentElement.scrollWidth") <= width, "the page is wider than the screen")
        check(page.value("window.hurt") is None and page.value("document.querySelectorAll('img').length") == 0, "text became HTML")
        check(page.value("document.querySelectorAll('#late tbody tr').length") == len(runs), "the late ranks")
        check(page.value("document.querySelectorAll('#traces tbody tr').length") == 2 * len(runs), "the spans of the traces")
        check(page.value("document.querySelectorAll('.starts tbody tr').length") == 2 * len(runs), "the starts")
        page.call("Page.printToPDF")
        check(page.errors == [], f"the console has {page.errors}")
        check(all(url.startswith(("file:", "data:")) for url in page.requests), f"the page fetches {page.requests}")


def main():
    if browser.find() is None:
        print("skipped: there is no Chromium")
        sys.exit(77)
    muster = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(os.path.join(folder, name), seed, count) for name, seed, count in (("one", 1, 60), ("two", 2, 40))]
        page = os.path.join(folder, "page.html")
        subprocess.run([muster, "report", os.path.join(folder, "one"), os.path.join(folder, "two"), "-o", page], check=True,
                       stdout=subprocess.DEVNULL)
        for width, dark in ((1280, False), (400, True)):
            try:
                check_page(page, runs, width, dark)
            except AssertionError as wrong:
                sys.exit(f"{width} pixels wide: {wrong}")


if __name__ == "__main__":
    main()
