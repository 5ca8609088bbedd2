"""optim.py PROGRAM: compares the schedules and the averages of weights that PROGRAM (optim.cpp) writes with those of
torch's twins in Python: learning rates and momenta to 1e-12, averages bit for bit. Ends with 77 where Python has no
torch."""

import json
import os
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)

import warnings

from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

warnings.simplefilter("ignore")  # that steps of the schedule come without those of the optimizer
LR, TOLERANCE = 0.3, 1e-12


def one_cycle(optimizer, name):
    words = name.split()
    return lr_scheduler.OneCycleLR(optimizer, 0.7, total_steps=int(words[1]), pct_start=0.35, anneal_strategy=words[2],
                                   three_phase="three_phase" in words)


def cosine_with_warmup(optimizer, _):
    warmup = lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=23)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=211 - 23, eta_min=1e-3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[23])


SCHEDULES = {
    "linear": lambda o, _: lr_scheduler.LinearLR(o, start_factor=1 / 3, total_iters=17),
    "cosine": lambda o, _: lr_scheduler.CosineAnnealingLR(o, T_max=211, eta_min=1e-3),
    "cosine_with_warmup": cosine_with_warmup,
    "one_cycle": one_cycle,
}


def follow(name, steps):
    parameters = [torch.zeros(1, requires_grad=True)]
    adam = name.endswith("Adam") or name == "cosine_with_warmup"
    optimizer = torch.optim.Adam(parameters, LR) if adam else torch.optim.SGD(parameters, LR, momentum=0.5)
    scheduler = SCHEDULES[name.split()[0]](optimizer, name)
    group = optimizer.param_groups[0]
    for step in range(steps):
        yield group["lr"], group["betas"][0] if adam else group["momentum"]
        if step + 1 < steps:
            scheduler.step()


def averages():
    net = torch.nn.Linear(7, 5)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.93))
    for step in range(50):
        with torch.no_grad():
            net.weight.copy_(torch.sin(torch.arange(35, dtype=torch.float32) * 0.37 + step).view(5, 7))
        average.update_parameters(net)
    return average.module.weight.detach().flatten().tolist()


def main():
    with tempfile.TemporaryDirectory() as folder:
        written = os.path.join(folder, "out.json")
        subprocess.run([*sys.argv[1:], written], check=True)
        with open(written) as file:
            ours = json.load(file)
    worst = 0.0
    for name, pairs in ours["schedules"].items():
        for step, (have, want) in enumerate(zip(pairs, follow(name, len(pairs)), strict=True)):
            apart = max(abs(a - b) for a, b in zip(have, want))
            assert apart <= TOLERANCE, (name, step, have, want)
            worst = max(worst, apart)
    print(f"{len(ours['schedules'])} schedules, largest difference {worst:.1e}")
    assert ours["averages"] == averages(), "the averages differ"


if __name__ == "__main__":
    main()
