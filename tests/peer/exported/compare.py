"""Runs programs of torch.export here and in exported_peer (exported.cpp), and compares what the two have computed."""

import copy
import pathlib
import subprocess

import torch
from torch.utils import _pytree as pytree

torch.set_num_threads(1)
torch.backends.mha.set_fastpath_enabled(False)


def export(model, case, file):
    arguments, named = copy.deepcopy(case.runs[0])
    program = torch.export.export(model, tuple(arguments), named, dynamic_shapes=case.dynamic_shapes)
    torch.export.save(program, file)
    return program


def call(model, run):
    arguments, named = copy.deepcopy(run)
    return model(*arguments, **named), arguments


def values(nested):
    """Copies, since later runs change buffers and inputs that were returned."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, nested)


def backward(outputs):
    """Half the squared sum of all outputs is the loss."""
    roots = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward(roots, [x.detach().clone() for x in roots])


def named_parameters(model):
    return model.named_parameters(remove_duplicate=False)


def trained(model, runs, seed):
    torch.manual_seed(seed)
    found = []
    for run in runs:
        model.zero_grad()
        outputs, arguments = call(model, run)
        record = {"outputs": values(outputs), "arguments": values(arguments)}
        backward(outputs)
        record["gradients"] = {name: x.grad.clone() for name, x in named_parameters(model) if x.grad is not None}
        state = model.state_dict()  # without buffers that are not persistent
        record["buffers"] = {name: x.clone() for name, x in model.named_buffers() if name in state}
        found.append(record)
    return found


def evaluated(model, runs, seed):
    model.eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        found = [values(call(model, run)[0]) for run in runs]
    model.train()
    return found


class Adam(torch.optim.Optimizer):
    """Adam in the order of operations of torch's C++ class. Python's class computes the first moment by lerp_(), and
    takes complex numbers for pairs of real ones, while that of C++ squares them."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is None:
                    continue
                state = self.state[x]
                if not state:
                    state.update(step=0, first=torch.zeros_like(x), second=torch.zeros_like(x))
                state["step"] += 1
                state["first"].mul_(0.9).add_(x.grad, alpha=1 - 0.9)
                state["second"].mul_(0.999).addcmul_(x.grad, x.grad, value=1 - 0.999)
                first, second = 1 - 0.9 ** state["step"], 1 - 0.999 ** state["step"]
                denominator = (state["second"].sqrt() / second ** 0.5).add_(1e-8)
                x.addcdiv_(state["first"], denominator, value=-group["lr"] / first)


def optimised(model, optimizer, runs, seed, steps):
    torch.manual_seed(seed)
    for step in range(steps):
        optimizer.zero_grad()
        backward(call(model, runs[step % len(runs)])[0])
        optimizer.step()
    return dict(model.state_dict())


def computed(model, case, seed, steps):
    """What exported_peer computes, by the model in Python."""
    original, found = copy.deepcopy(model), {}
    found["train"] = trained(model, case.runs, seed)
    if case.evaluates:
        found["eval"] = evaluated(model, case.runs, seed)
    found["state"] = dict(model.state_dict())
    if steps:
        for name, make in (
                ("SGD", lambda x: torch.optim.SGD(x, case.learning_rate, 0.9, weight_decay=0.01, foreach=False)),
                ("Adam", lambda x: Adam(x, case.learning_rate))):
            model = copy.deepcopy(original)
            found[name] = optimised(model, make(model.parameters()), case.runs, seed, steps)
    return found


def write_task(case, seed, steps, file):
    torch.save({"seed": seed, "steps": steps, "learning_rate": case.learning_rate, "evaluates": case.evaluates,
                "runs": [(list(arguments), dict(named)) for arguments, named in case.runs]}, file)


def run_peer(program, folder, names):
    """Returns for each name what exported_peer has computed, or {"refused": text} or {"thrown": text}."""
    subprocess.run([program, folder, *names], check=True)
    return {name: torch.load(pathlib.Path(folder, name + ".out"), weights_only=False) for name in names}


def same_bits(have, want):
    if have.dtype != want.dtype or have.shape != want.shape:
        return False
    if have.is_complex():
        have, want = torch.view_as_real(have.resolve_conj()), torch.view_as_real(want.resolve_conj())
    equal = (have == want) & (torch.signbit(have) == torch.signbit(want))
    return bool((equal | (have != have) & (want != want)).all())


def differences(have, want, at=""):
    """Yields a line for each place where two nested values differ."""
    if isinstance(want, torch.Tensor):
        if not isinstance(have, torch.Tensor) or not same_bits(have, want):
            fact = f"{type(have).__name__} {have}"
            if isinstance(have, torch.Tensor) and have.shape == want.shape and have.dtype == want.dtype:
                fact = f"differs by up to {(have.to(torch.complex128) - want.to(torch.complex128)).abs().max():.2e}"
            yield f"{at}: {fact}, in Python {want.dtype} {list(want.shape)}"
    elif isinstance(want, dict):
        if not isinstance(have, dict) or list(have) != list(want):
            if not isinstance(have, dict) or set(have) != set(want) or "outputs" in at:
                yield f"{at}: {list(have) if isinstance(have, dict) else have}, in Python {list(want)}"
                return
        for key in want:
            yield from differences(have[key], want[key], f"{at}/{key}")
    elif isinstance(want, (list, tuple)):
        if type(have) is not type(want) or len(have) != len(want):
            yield f"{at}: {type(have).__name__} {have}, in Python a {type(want).__name__} of {len(want)}"
            return
        for i, value in enumerate(want):
            yield from differences(have[i], value, f"{at}/{i}")
    elif type(have) is not type(want) or have != want:
        yield f"{at}: {have!r}, in Python {want!r}"
