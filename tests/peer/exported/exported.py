"""exported.py PROGRAM [MODEL…]: models in Python and their programs in exported_peer compute the same bits: outputs,
gradients and buffers in training, outputs in evaluation, and the weights after ten steps of SGD and Adam. Ends with 77
where Python has no torch."""

import sys
import tempfile
import time
import warnings

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)

import compare
import models

SEED, STEPS = 7, 10
warnings.filterwarnings("ignore")


class Branches(torch.nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def refusals(program, folder):
    """What cannot run is refused, with its name."""
    net, case = torch.nn.Linear(3, 2), models.Case([([torch.randn(4, 3)], {})], ({0: models.BATCH[0]},))
    task = lambda name, case: compare.write_task(case, SEED, 0, f"{folder}/{name}.in")
    expected = {}

    compare.export(torch.nn.Sequential(net, torch.nn.Dropout()).eval(), case, f"{folder}/of_evaluation.pt2")
    task("of_evaluation", case)
    expected["of_evaluation"] = "model.train()"

    compare.export(net.train(), case, f"{folder}/shape.pt2")
    task("shape", models.Case([([torch.randn(4, 5)], {})]))
    expected["shape"] = "input"
    compare.export(net, case, f"{folder}/range.pt2")
    task("range", models.Case([([torch.randn(65, 3)], {})]))
    expected["range"] = "64"
    compare.export(net, case, f"{folder}/dtype.pt2")
    task("dtype", models.Case([([torch.ones(4, 3, dtype=torch.int64)], {})]))
    expected["dtype"] = "type"

    compare.export(Branches(), models.Case(case.runs), f"{folder}/branches.pt2")
    task("branches", case)
    expected["branches"] = "cond"

    for name, found in compare.run_peer(program, folder, list(expected)).items():
        assert expected[name] in found.get("refused", ""), (name, found)
    return len(expected)


def main():
    program, chosen = sys.argv[1], sys.argv[2:]
    broken, makers = [], [make for make in models.MODELS if not chosen or make.__name__ in chosen]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        wanted, cases = {}, {}
        for make in makers:
            name = make.__name__
            torch.manual_seed(SEED)
            model, cases[name] = make()
            compare.export(model.train(), cases[name], f"{folder}/{name}.pt2")
            compare.write_task(cases[name], SEED, STEPS, f"{folder}/{name}.in")
            wanted[name] = compare.computed(model, cases[name], SEED, STEPS)
        exported = time.monotonic()
        for name, answer in compare.run_peer(program, folder, list(wanted)).items():
            assert "found" in answer, (name, answer)
            found = answer["found"]
            print(f"{name}: inputs {', '.join(found.pop('inputs'))}")
            lines = list(compare.differences(found, wanted[name]))
            if cases[name].differs:
                print(f"  may differ: {cases[name].differs}; {len(lines)} do")
            elif lines:
                broken.append(name)
            for line in lines[:5]:
                print("  " + line)
        if not chosen:
            print(f"{refusals(program, folder)} programs are refused as they should be")
    print(f"{len(makers)} models, {exported - began:.0f} s in Python, {time.monotonic() - exported:.0f} s here")
    assert not broken, f"these differ from Python: {', '.join(broken)}"
    assert sum(bool(case.differs) for case in cases.values()) <= 2


if __name__ == "__main__":
    main()
