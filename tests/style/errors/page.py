"""Makes docs/troubleshooting.md of the list of errors."""

import re

from texts import has_words, shown

BEGIN = """# Troubleshooting

<!-- Made by tests/style/errors/run write from the sources. Change the messages there. -->

An error of muster is one line on standard error:

```
muster: error: choosing the workers: 4 workers were asked for and the launch has 2 ranks. Start it with mpirun -n 4, or …
```

It says what was being done, what is wrong and what to do. If the error is of one rank alone, the line names that rank and
its host first. Errors of the command `muster` begin with `muster:` alone. Search this page for a few words of the message.
In the tables

- words in capitals (`PATH`, `NAME`, `N` for a number) and `…` stand for what a message names,
- `REASON` stands for the words of the system or of a library, such as "No such file or directory",
- _or_ separates the forms that a message can have.

The program ends with the code in the second column:

| code | meaning | does `muster run` try again? |
| --- | --- | --- |
| 0 | done | |
| 1 | an exception in your code, or a call of muster that your code makes wrongly | yes, while failures are left |
| 64 | wrong usage: flags, options, the run's name, its folder in use | no |
| 65 | wrong data: a dataset, a configuration file, a checkpoint, a model; a GPU that is wanted and missing | no |
| 69 | a package is missing | no |
| 75 | a rank was lost, a timeout has passed, a disk is full or cannot be written to | yes |
| 85 | stopped on request; the state is saved, or only validations are left | no; start it again to go on |
| 130 | interrupted by a second Ctrl-C | no |

More about a failed run is in its folder, `STORAGE/NAME`:

- `error.txt` has the cause of the last failure: rank, host, message and place.
- `logs/rank_00000.log` and so on have what each rank has logged. After a timeout they have its last calls, too.
- `muster inspect STORAGE/NAME` shows how far the run has come and whether its checkpoints are whole.

Exceptions of libtorch and of your own code are passed on with their own texts; they are not on this page.
[Faults and `muster run`](faults.md) explains lost and hung ranks. If a program does not start at all, [`muster
doctor`](installing.md#would-it-run-here) looks for the cause on one node or on all of them.
"""

# Headings in their order, each with the beginnings of the sources' paths. The longest beginning counts.
TOPICS = (
    ("Starting a program", ("src/launch/", "src/run/resolve.cpp", "src/run/device.cpp", "src/trainer/trainer.cpp", "src/base/log.cpp")),
    ("The run's folder", ("src/run/", "src/trainer/", "src/base/option_json.hpp")),
    ("Reading data", ("src/data/", "src/hdf5/", "src/zarr/", "src/base/zip.cpp", "src/run/same_data.cpp", "src/base/number.hpp")),
    ("Batches and passes over the data", ("src/data/passes/", "src/step/", "include/muster/detail/data_loader.hpp")),
    ("Preprocessors", ("src/data/preprocess/", "src/augmentation/", "src/session/session_data.cpp")),
    ("Models and gradients", ("src/gradients/", "src/parallel/", "src/recomputation/")),
    ("Optimizers, mixed precision and averages of weights", ("src/optim/", "src/session/bad_numbers.cpp")),
    ("The training function and its reports", ("src/session/",)),
    ("Metrics, callbacks and TensorBoard", ("src/observe/", "src/tensorboard/")),
    ("Saving and restoring the state", ("src/state/", "src/session/saver.cpp", "src/checkpoint/state_save.cpp", "src/checkpoint/files/state_file.cpp", "src/checkpoint/files/user_files.cpp")),
    ("Checkpoints and resuming", ("src/checkpoint/", "src/storage/", "src/session/resumer.cpp")),
    ("Validation beside training", ("src/session/validation",)),
    ("Files and folders", ("src/base/",)),
    ("Waiting for other ranks, and collective calls", ("src/comm/", "src/node/", "src/watch/")),
    ("torch's process group", ("src/group/",)),
    ("Predictions", ("src/predict/",)),
    ("Operators", ("src/operators/", "include/muster/detail/operator.hpp", "include/muster/operator.hpp")),
    ("Sweeps", ("src/sweep/",)),
    ("Weights of other programs", ("src/weights/", "apps/muster/export.cpp")),
    ("Live training", ("src/live/",)),
    ("muster run", ("src/supervise/",)),
    ("muster convert", ("src/convert/", "apps/muster/convert.cpp")),
    ("muster ls, inspect, checkpoint and init", ("apps/muster/",)),
    ("muster bench", ("apps/muster/bench/",)),
    ("The examples", ("apps/",)),
)  # fmt: skip

# What CLI11, which reads the command lines, says itself.
OF_COMMAND_LINES = (
    "OPTION is required",
    "OPTION: 1 required TEXT missing",
    "OPTION: VALUE not in {VALUE,VALUE}",
    "The following argument was not expected: WORD",
)


def topic_of(path):
    fitting = [(len(begin), heading) for heading, begins in TOPICS for begin in begins if path.startswith(begin)]
    if not fitting:
        raise ValueError(f"tests/style/errors/page.py does not know the topic of {path}; add it to TOPICS")
    return max(fitting)[1]


def cell(text):
    text = shown(text).strip()
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
    return text


def either(texts):
    return " _or_ ".join(dict.fromkeys(cell(text) for text in texts if text))


def rows_of(error):
    codes = "/".join(str(code) for code in error.codes)
    doing = either(error.doings)
    forms = [(error.facts, error.remedies)]
    if len(error.facts) == len(error.remedies) > 1:  # each fact has its remedy
        forms = [((fact,), (remedy,)) for fact, remedy in zip(error.facts, error.remedies)]
    for facts, remedies in forms:
        fact = either(facts)
        if has_words(fact) or "REASON" in fact:  # otherwise another error is passed on
            remedy = either(remedies)
            yield f"{doing}: {fact}" if doing else fact, codes, "the message says it" if remedy == "…" else remedy


def sort_key(row):
    """Alphabetical by letters, so that a message whose beginning is a placeholder stands at its first word."""
    return re.sub(r"[^a-z0-9 ]", "", re.sub(r"\b[A-Z]+\b|…", "", row[0]).lower()).strip(), row


def text_of(errors):
    rows = {heading: set() for heading, _ in TOPICS}
    for error in errors:
        rows[topic_of(error.path)].update(rows_of(error))
    for fact in OF_COMMAND_LINES:
        rows["Starting a program"].add(
            ("reading the command line: " + cell(fact), "64", "PROGRAM --help lists the flags")
        )
    parts = [BEGIN]
    parts.append("".join(f"- [{heading}](#{anchor(heading)})\n" for heading in rows if rows[heading]))
    for heading, own in rows.items():
        if not own:
            continue
        parts.append(f"## {heading}\n\n| message | code | what to do |\n| --- | --- | --- |\n" + "".join(
            f"| {message} | {code} | {remedy} |\n" for message, code, remedy in sorted(own, key=sort_key)
        ))  # fmt: skip
    return "\n".join(parts)


def anchor(heading):
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
