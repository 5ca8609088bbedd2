"""metrics.py PROGRAM: compares the metrics that PROGRAM (metrics.cpp) finds for random cases with scikit-learn's. Ends
with 77 where Python has none."""

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import warnings

try:
    import numpy as np
    from sklearn import metrics
except ImportError:
    print(f"skipped: {sys.executable} has no scikit-learn")
    sys.exit(77)

warnings.simplefilter("ignore")  # of classes that never occur
TOLERANCE = 1e-9


def case(generator):
    classes, samples = generator.randint(2, 7), generator.randint(2, 200)
    # Tenths, so that scores are equal now and then; and few classes that occur.
    logits = [generator.randint(-20, 20) / 10 + generator.random() / 1e6 * (classes > 3)
              for _ in range(samples * classes)]
    return {"classes": classes, "logits": logits, "weight": [generator.randint(0, 3) for _ in range(samples)],
            "target": [generator.randrange(generator.randint(1, classes)) for _ in range(samples)]}


def expected(one):
    labels = range(one["classes"])
    logits = np.array(one["logits"]).reshape(-1, one["classes"])
    weight, target = np.array(one["weight"]), np.array(one["target"])
    counts = weight > 0
    logits, weight, target = logits[counts], weight[counts], target[counts]
    given = {"sample_weight": weight}
    prediction = logits.argmax(1)

    def f1(average):
        return metrics.f1_score(target, prediction, labels=labels, average=average, zero_division=np.nan, **given)

    jaccard = metrics.jaccard_score(target, prediction, average="macro", **given)  # of the labels that there are
    log_likelihood = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(len(target)), target]
    return {
        "accuracy": metrics.accuracy_score(target, prediction, **given),
        "top2": np.average((np.argsort(-logits, axis=1, kind="stable")[:, :2] == target[:, None]).any(1), weights=weight),
        "f1_macro": f1("macro"), "f1_micro": f1("micro"), "f1_each": f1(None).tolist(),
        "matrix": metrics.confusion_matrix(target, prediction, labels=labels, **given).tolist(),
        "iou": jaccard,
        "auc": metrics.roc_auc_score(target == 1, logits[:, 1], **given) if 0 < (target == 1).mean() < 1 else math.nan,
        "perplexity": math.exp(-np.average(log_likelihood, weights=weight)),
    }


def same(have, want):
    if isinstance(want, list):
        return len(have) == len(want) and all(map(same, have, want))
    return math.isnan(want) if have is None else abs(have - want) <= TOLERANCE * max(1, abs(want))


def main():
    generator = random.Random(7)
    cases = [one for one in (case(generator) for _ in range(300)) if sum(one["weight"]) > 0]
    with tempfile.TemporaryDirectory() as folder:
        given, written = os.path.join(folder, "in.json"), os.path.join(folder, "out.json")
        with open(given, "w") as file:
            json.dump(cases, file)
        subprocess.run([*sys.argv[1:], given, written], check=True)
        with open(written) as file:
            found = json.load(file)
    for one, have in zip(cases, found, strict=True):
        for name, want in expected(one).items():
            assert same(have[name], want), (name, have[name], want, one)
    print(f"{len(cases)} cases as scikit-learn has them")


if __name__ == "__main__":
    main()
