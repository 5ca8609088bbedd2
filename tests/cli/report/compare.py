#!/usr/bin/env python3
"""Pages about random runs, compared with a plain reading of their rows: extremes, gaps, last values and places.
  compare.py MUSTER [CASES [SEED]]"""
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile


def random_row(dice, number, names):
    row = {"training_iteration": number, "global_step": number * 7, "time_total_s": number * 0.25, "world_size": 2}
    for name in names:
        if dice.random() < 0.1:
            continue  # not in every report
        kind = dice.random()
        row[name] = None if kind < 0.03 else dice.choice([True, 3, -2**40]) if kind < 0.1 else \
            dice.gauss(0, 1) * 10 ** dice.randint(-300, 300) if kind < 0.15 else dice.gauss(0, 1)
    return row


def write_run(dice, folder):
    count = dice.choice([1, 2, 50, 999, 2001, 5000, 20000])
    names = dice.sample(["loss", "acc", 'a "quoted" name', "naïve/läuft", "<b>", "x.y", "\\u0041", "lr"], dice.randint(1, 5))
    rows = [random_row(dice, number, names) for number in range(1, count + 1)]
    os.makedirs(folder)
    with open(os.path.join(folder, "result.json"), "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=dice.random() < 0.5) + "\n")
        if dice.random() < 0.5:
            file.write(json.dumps(rows[-1])[:-3])  # a torn line
    return rows, names


def page_data(file):
    with open(file, encoding="utf-8") as page:
        return json.loads(re.search(r'id="data">(.*?)</script>', page.read(), re.S).group(1))


def cumulative(differences):
    total = 0
    return [total := total + difference for difference in differences]


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def compare(run, rows, names):
    check(run["reports"] == len(rows) and run["damaged_lines"] == 0, "the number of rows")
    for name in names:
        values = [(row["training_iteration"], row[name]) for row in rows if name in row]
        if not values:
            check(name not in run["metrics"], f"{name} is shown")
            continue
        curve = run["metrics"][name]
        numbers = [float(value) for _, value in values if value is not None]
        check(curve["count"] == len(values) and curve["gaps"] == len(values) - len(numbers), f"the counts of {name}")
        check(curve["min"] == (min(numbers) if numbers else None), f"the lowest value of {name}")
        check(curve["max"] == (max(numbers) if numbers else None), f"the highest value of {name}")
        last = values[-1][1]
        check(curve["last"] == (None if last is None else float(last)), f"the last value of {name}")
        truth = dict(values)
        shown = list(zip(cumulative(curve["report"]), cumulative(curve["step"]), cumulative(curve["ms"]), curve["value"]))
        check([report for report, *_ in shown] == sorted({report for report, *_ in shown}), f"the order of {name}")
        for report, step, ms, value in shown:
            check(truth[report] == value and step == report * 7 and ms == report * 250, f"{name} at report {report}")
        kept = [value for *_, value in shown if value is not None]
        check(not numbers or (min(kept), max(kept)) == (min(numbers), max(numbers)), f"the peaks of {name}")
        check(len(shown) <= 3002 and (len(values) > 500 or len(shown) == len(values)), f"the points of {name}: {len(shown)}")
        compare_stretches(values, shown, name)


def compare_stretches(values, shown, name):
    """The peaks of any stretch of a tenth of the curve are shown, but for the buckets at its ends."""
    tenth = len(values) // 10
    if tenth < 100:
        return
    margin = tenth // 2
    for begin in range(0, len(values) - tenth, tenth):
        inside = [value for _, value in values[begin + margin // 2:begin + tenth - margin // 2] if value is not None]
        first, last = values[begin][0], values[begin + tenth - 1][0]
        kept = [value for report, _, _, value in shown if first <= report <= last and value is not None]
        check(max(kept) >= max(inside) and min(kept) <= min(inside), f"the peaks of {name} from report {first}")


def main():
    muster, cases = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 12
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    for seed in range(first, first + cases):
        with tempfile.TemporaryDirectory() as folder:
            dice = random.Random(seed)
            runs = [(name, *write_run(dice, os.path.join(folder, name))) for name in ("one", "two")[:dice.randint(1, 2)]]
            page = os.path.join(folder, "page.html")
            subprocess.run([muster, "report", *(os.path.join(folder, name) for name, *_ in runs), "-o", page], check=True,
                           stdout=subprocess.DEVNULL)
            check(os.path.getsize(page) < 250_000 + 750_000 * len(runs), "the size of the page")
            try:
                for run, (_, rows, names) in zip(page_data(page)["runs"], runs):
                    compare(run, rows, names)
            except AssertionError as wrong:
                sys.exit(f"seed {seed}: {wrong}")
    print(f"{cases} cases, from seed {first}")


if __name__ == "__main__":
    main()
