"""graphs.py PROGRAM COUNT [SEED]: random graphs of torch's operators compute the same bits in exported_peer as in
Python. Graph number n of a seed depends on nothing else. A graph that Python cannot run or export is drawn again. SEED
is random if it is "fresh", and printed. Ends with 77 where Python has no torch."""

import contextlib
import random
import sys
import tempfile
import warnings

try:
    import torch
except ImportError:
    print(f"skipped: {sys.executable} has no torch")
    sys.exit(77)

import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import compare
import models

BATCH = 32  # graphs in one process of exported_peer
warnings.filterwarnings("ignore")


def some_dim(x, dice):
    return dice.randrange(x.dim()) - (x.dim() if dice.random() < 0.3 else 0)


def order(x, dice):
    dims = list(range(x.dim()))
    dice.shuffle(dims)
    return dims


# name: (how many values it takes, a function of dice and example values that returns the step)
# A step is a function of values; what it needs of the dice is drawn before, so that it is the same at each call.
def fixed(function):
    return lambda dice, *x: function


def with_dim(function):
    def draw(dice, x, *rest):
        dim = some_dim(x, dice)
        return lambda *values: function(*values, dim)
    return draw


def with_number(function, *choices):
    def draw(dice, *x):
        number = dice.choice(choices)
        return lambda *values: function(*values, number)
    return draw


UNARY = {name: (1, fixed(getattr(torch, name))) for name in (
    "abs", "neg", "exp", "sin", "tanh", "sigmoid", "relu", "square", "sign", "floor", "round", "isfinite",
    "logical_not", "expm1", "atan", "erf", "real", "angle", "numel", "clone", "detach", "zeros_like", "ones_like", "rand_like",
    "randn_like", "mean", "sum", "amax", "std", "atleast_2d", "nan_to_num")}
ACTIVATIONS = {name: (1, fixed(getattr(F, name))) for name in (
    "gelu", "silu", "elu", "softplus", "hardswish", "leaky_relu", "mish", "selu", "logsigmoid", "rrelu")}
BINARY = {name: (2, fixed(getattr(torch, name))) for name in (
    "add", "sub", "mul", "div", "maximum", "minimum", "eq", "lt", "ge", "atan2", "hypot", "matmul", "logical_and",
    "floor_divide", "remainder", "kron", "outer", "bmm", "cdist", "dot")}
NUMBERS = {
    "power": (1, with_number(torch.pow, 2, 3, 0.5, 2.0)),
    "plus": (1, with_number(lambda x, n: x + n, 1, -2, 0.25, True)),
    "times": (1, with_number(lambda x, n: n * x, 3, -0.5, 1j)),
    "minus_from": (1, with_number(lambda x, n: n - x, 1, 0.5)),
    "above": (1, with_number(lambda x, n: x > n, 0, 0.1)),
    "clamp": (1, with_number(lambda x, n: x.clamp(-n, n), 1, 0.5)),
    "to": (1, with_number(lambda x, n: x.to(n), torch.float64, torch.float32, torch.int64, torch.bool, torch.bfloat16,
                          torch.complex64)),
    "dropout": (1, with_number(lambda x, n: F.dropout(x, n), 0.0, 0.3, 0.5)),
    "alpha_dropout": (1, with_number(lambda x, n: F.alpha_dropout(x, n, True), 0.2)),
    "bernoulli": (1, with_number(lambda x, n: torch.bernoulli(torch.full_like(x, n)), 0.3)),
    "tril": (1, with_number(torch.tril, 0, 1, -1)),
    "topk": (1, with_number(lambda x, n: torch.topk(x, n), 1, 2)),
    "chunk": (1, with_number(lambda x, n: torch.chunk(x, n), 2, 3)),
    "split": (1, with_number(lambda x, n: x.split(n, -1), 1, 2)),
    "norm": (1, with_number(lambda x, n: torch.linalg.vector_norm(x, n), 1, 2, float("inf"))),
    "addcmul": (3, with_number(lambda x, y, z, n: torch.addcmul(x, y, z, value=n), 0.5)),
    "lerp": (2, with_number(torch.lerp, 0.3)),
    "masked_fill": (1, with_number(lambda x, n: x.masked_fill(x > 0, n), 0.0, -1)),
}
DIMS = {
    "softmax": (1, with_dim(lambda x, d: x.softmax(d))),
    "log_softmax": (1, with_dim(lambda x, d: x.log_softmax(d))),
    "sum_over": (1, with_dim(lambda x, d: x.sum(d, keepdim=True))),
    "mean_over": (1, with_dim(lambda x, d: x.mean(d))),
    "max": (1, with_dim(torch.max)),
    "argmin": (1, with_dim(torch.argmin)),
    "sort": (1, with_dim(torch.sort)),
    "var_mean": (1, with_dim(lambda x, d: torch.var_mean(x, d))),
    "logsumexp": (1, with_dim(torch.logsumexp)),
    "cumsum": (1, with_dim(torch.cumsum)),
    "flip": (1, with_dim(lambda x, d: x.flip([d]))),
    "roll": (1, with_dim(lambda x, d: x.roll(1, d))),
    "unbind": (1, with_dim(torch.unbind)),
    "unsqueeze": (1, with_dim(torch.unsqueeze)),
    "squeeze": (1, with_dim(torch.squeeze)),
    "select": (1, with_dim(lambda x, d: x.select(d, -1))),
    "narrow": (1, with_dim(lambda x, d: x.narrow(d, 1, x.size(d) - 1))),
    "gather": (1, with_dim(lambda x, d: x.gather(d, x.argsort(d)))),
    "index_select": (1, with_dim(lambda x, d: x.index_select(d, torch.tensor([0, 1, 0])))),
    "cat": (2, with_dim(lambda x, y, d: torch.cat([x, y], d))),
    "stack": (2, with_dim(lambda x, y, d: torch.stack([x, y], d))),
    "repeat_interleave": (1, with_dim(lambda x, d: x.repeat_interleave(2, d))),
    "scatter_add": (2, with_dim(lambda x, y, d: x.scatter_add(d, y.argsort(d), y))),
    "fft": (1, with_dim(lambda x, d: torch.fft.fft(x, dim=d))),
    "glu": (1, with_dim(lambda x, d: F.glu(x, d))),
    "layer_norm": (1, fixed(lambda x: F.layer_norm(x, x.shape[-1:]))),
    "normalize": (1, with_dim(lambda x, d: F.normalize(x, dim=d))),
}


def permuted(dice, x):
    dims = order(x, dice)
    return lambda x: x.permute(dims)


# Views, sizes, and operators that write into their argument.
SHAPES = {
    "permute": (1, permuted),
    "transpose": (1, fixed(lambda x: x.transpose(0, -1))),
    "flatten": (1, fixed(lambda x: x.flatten())),
    "reshape": (1, fixed(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]))),
    "view_halves": (1, fixed(lambda x: x.contiguous().view(x.shape[0], -1, x.shape[-1] // 2))),
    "expand": (1, fixed(lambda x: x.unsqueeze(0).expand(2, *x.shape))),
    "slice": (1, fixed(lambda x: x[..., ::2])),
    "slice_to_half": (1, fixed(lambda x: x[: x.shape[0] // 2 + 1])),
    "unfold": (1, fixed(lambda x: x.unfold(-1, 2, 1))),
    "diagonal": (1, fixed(lambda x: x.diagonal(0, -2, -1))),
    "pad": (1, fixed(lambda x: F.pad(x, (1, 2), value=0.5))),
    "times_size": (1, fixed(lambda x: x * x.shape[0] / (x.shape[-1] + 1))),
    "new_full": (1, fixed(lambda x: x.new_full((x.shape[0] + 1, 2), x.shape[0] % 3))),
    "arange": (1, fixed(lambda x: torch.arange(x.shape[0]) + x.shape[0] ** 2)),
    "eye": (1, fixed(lambda x: torch.eye(x.shape[0], x.shape[-1]))),
    "where": (2, fixed(lambda x, y: torch.where(x > y, x, y))),
    "masks": (2, fixed(lambda x, y: torch.where((x > y) & (x < 1) | ~(y > 0) ^ (x > 2), x, y))),
    "index_by_mask": (1, fixed(lambda x: x[x > 0])),
    "index": (1, fixed(lambda x: x[torch.tensor([0, -1])])),
    "nonzero": (1, fixed(lambda x: torch.nonzero(x > 0))),
    "index_put": (1, fixed(lambda x: x.clone().index_put_((torch.tensor([0, 0, 1]),), x[:1], accumulate=True))),
    "one_hot": (1, fixed(lambda x: F.one_hot((x > 0).long(), 2))),
    "einsum": (2, fixed(lambda x, y: torch.einsum("i...,i...->...", x, y))),
    "view_as_real": (1, fixed(lambda x: torch.view_as_real(x.resolve_conj()))),
    "conj": (1, fixed(lambda x: x.conj())),
    "attention": (2, fixed(lambda x, y: F.scaled_dot_product_attention(x, y, y, dropout_p=0.2))),
    "cross_entropy": (1, fixed(lambda x: F.cross_entropy(x, x.detach().argmax(1)))),
    "smooth_l1": (2, fixed(F.smooth_l1_loss)),
    "interpolate": (1, fixed(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"))),
    "max_pool": (1, fixed(lambda x: F.max_pool1d(x, 2))),
    "avg_pool": (1, fixed(lambda x: F.adaptive_avg_pool1d(x, 3))),
}
IN_PLACE = {
    "add_": (2, fixed(lambda x, y: x.add_(y))),
    "mul_": (1, fixed(lambda x: x.mul_(0.5))),
    "relu_": (1, fixed(lambda x: x.relu_())),
    "clamp_": (1, fixed(lambda x: x.clamp_(max=0.7))),
    "copy_": (2, fixed(lambda x, y: x.copy_(y))),
    "zero_first": (1, fixed(lambda x: x[0].zero_())),
    "fill_column": (1, fixed(lambda x: x[..., -1:].fill_(0.5))),
    "set_slice": (2, fixed(lambda x, y: x[:1].add_(y[:1]))),
    "masked_fill_": (1, fixed(lambda x: x.masked_fill_(x > 0.5, 0.25))),
    "uniform_": (1, fixed(lambda x: x.uniform_(-1, 1))),
    "bernoulli_": (1, fixed(lambda x: x.bernoulli_(0.4))),
    "exponential_": (1, fixed(lambda x: x.exponential_())),
    "dropout_": (1, fixed(lambda x: F.dropout(x, 0.2, inplace=True))),
    "squeeze_": (1, fixed(lambda x: x.squeeze_())),
}
# Operators with parameters: the module is made for the example value.
LAYERS = {
    "linear": lambda x: nn.Linear(x.shape[-1], 3),
    "conv1d": lambda x: nn.Conv1d(x.shape[1], 2, 3, padding=1),
    "conv_transpose": lambda x: nn.ConvTranspose1d(x.shape[1], 2, 2, stride=2),
    "batch_norm": lambda x: nn.BatchNorm1d(x.shape[1]),
    "instance_norm": lambda x: nn.InstanceNorm1d(x.shape[1], track_running_stats=True),
    "layer": lambda x: nn.LayerNorm(x.shape[-1]),
    "group": lambda x: nn.GroupNorm(1, x.shape[1]),
    "prelu": lambda x: nn.PReLU(),
    "embedding": lambda x: nn.Sequential(Index(), nn.Embedding(5, 3)),
    "gru": lambda x: First(nn.GRU(x.shape[-1], 3)),
    "lstm": lambda x: First(nn.LSTM(x.shape[-1], 2, batch_first=True, bidirectional=True)),
    "attention_layer": lambda x: nn.TransformerEncoderLayer(x.shape[-1], 1, 4, 0.1, batch_first=True),
}
OPERATORS = {**UNARY, **ACTIVATIONS, **BINARY, **NUMBERS, **DIMS, **SHAPES, **IN_PLACE}
GROUPS = [list(group) for group in (UNARY, ACTIVATIONS, BINARY, NUMBERS, DIMS, SHAPES, SHAPES, IN_PLACE)]
BLOCKS = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no_autocast": lambda: torch.autocast("cpu", enabled=False),
}


class Index(nn.Module):
    def forward(self, x):
        return x.abs().long().clamp(0, 4)


class First(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


class Graph(nn.Module):
    """Steps over a list of values, which begins with the inputs and a parameter. Each step appends its results."""

    def __init__(self, dice):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))
        self.register_buffer("sums", torch.zeros(2, 4))
        self.layers = nn.ModuleList()
        self.blocks, self.shape = [], dice.randrange(4)

    def start(self, inputs):
        return [*inputs["first"], inputs["second"], self.weight * 1, self.sums]

    def finish(self, values):
        last = [x for x in values[5:] if isinstance(x, torch.Tensor)][-4:]
        shapes = tuple(last), {"last": last[-1], "others": last[:-1]}, [last[0], (last, len(last))], last[-1]
        return shapes[self.shape]

    def forward(self, inputs):
        values = self.start(inputs)
        for kind, steps in self.blocks:
            with BLOCKS[kind]():
                for step, places in steps:
                    append(values, step(*[values[i] for i in places]))
        return self.finish(values)


def append(values, result):
    values.extend(result if isinstance(result, (tuple, list)) else [result])


class Rejected(Exception):
    pass


def draw_step(graph, values, dice):
    """Draws an operator that runs with some of the values, and runs it."""
    tensors = [i for i, x in enumerate(values) if isinstance(x, torch.Tensor)]
    for _ in range(200):
        if dice.random() < 0.15:
            name, count = dice.choice(list(LAYERS)), 1
        else:
            name = dice.choice(dice.choice(GROUPS))
            count = OPERATORS[name][0]
        places = [dice.choice(tensors[-8:] if dice.random() < 0.8 else tensors) for _ in range(count)]
        if count == 2 and dice.random() < 0.1:
            places[1] = dice.randrange(len(values))  # a number perhaps
        if name in IN_PLACE and places[0] < 3 and dice.random() < 0.7:
            continue  # mostly not into the inputs
        state = torch.random.get_rng_state()
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in values]
        try:
            if name in LAYERS:
                layer = LAYERS[name](values[places[0]])
                index = len(graph.layers)
                step = lambda x, index=index: graph.layers[index](x)
                graph.layers.append(layer)
                try:
                    layer(copies[places[0]])
                except Exception:
                    del graph.layers[index]
                    raise
            else:
                step = OPERATORS[name][1](dice, *[values[i] for i in places])
                step(*[copies[i] for i in places])
            result = step(*[values[i] for i in places])
        except Exception:
            torch.random.set_rng_state(state)
            continue
        results = result if isinstance(result, (tuple, list)) else [result]
        if sum(x.numel() for x in results if isinstance(x, torch.Tensor)) > 2000:
            raise Rejected
        append(values, result)
        return name, (step, places)
    raise Rejected


def draw_graph(dice):
    """Returns a graph, its Case, and the names of its steps."""
    torch.manual_seed(dice.randrange(1 << 30))
    choices = [torch.float32] * 6 + [torch.float64, torch.int64, torch.complex64, torch.bool]
    dtypes = [dice.choice(choices) for _ in range(3)]
    length, dynamic = dice.choice([2, 3, 4]), dice.random() < 0.7

    def make(x, dtype):
        return x if not dtype.is_floating_point and not dtype.is_complex and x.dtype == dtype else (x * 2).to(dtype)

    def run(batch):
        shapes = [(batch, length, 4), (batch, 4), (batch, length, 4)]
        first, other, second = (make(torch.randn(shape), dtype) for shape, dtype in zip(shapes, dtypes))
        return [{"first": (first, other), "second": second}], {}

    runs = [run(batch) for batch in ((5, 5, 3) if dynamic else (5, 5))]
    graph = Graph(dice).train()
    names, values = [], graph.start(compare.copy.deepcopy(runs[0][0][0]))
    for _ in range(dice.randint(1, 4)):
        kind, steps = dice.choice(["plain", "plain", "plain", *BLOCKS]), []
        with BLOCKS[kind]():
            for _ in range(dice.randint(2, 6)):
                name, step = draw_step(graph, values, dice)
                names.append(name)
                steps.append(step)
        names[-len(steps)] = f"{kind}: {names[-len(steps)]}"
        graph.blocks.append((kind, steps))
    batch = Dim.DYNAMIC if dynamic else None
    shapes = ({"first": ({0: batch}, {0: batch}), "second": {0: batch}},) if dynamic else None
    return graph, models.Case(runs, shapes), names


def make(seed, number, folder):
    """Exports graph `number`, and returns what Python computes, and the names of its steps."""
    for attempt in range(100):
        dice = random.Random(f"{seed} {number} {attempt}")
        try:
            graph, case, names = draw_graph(dice)
            for layer in graph.modules():
                if hasattr(layer, "reset_running_stats"):
                    layer.reset_running_stats()
            with torch.no_grad():
                graph.sums.zero_()
            stem = f"{folder}/{number}"
            program = compare.export(graph, case, stem + ".pt2")
            exported = compare.trained(program.module(), case.runs, number)
            wanted = compare.trained(graph, case.runs, number)
            if any(compare.differences(exported, wanted)):  # torch.export itself has changed what the graph computes
                raise Rejected("torch.export changes it")
            case.evaluates = False
            compare.write_task(case, number, 0, stem + ".in")
            return {"train": wanted}, names
        except Exception as error:  # of many kinds: what autograd or torch.export does not take
            REJECTED.append(str(error))
    raise AssertionError(f"no graph {number} of seed {seed} can be exported: {REJECTED[-1]}")


REJECTED = []


def main():
    program, count = sys.argv[1], int(sys.argv[2])
    seed = sys.argv[3] if len(sys.argv) > 3 else "1"
    if seed == "fresh":
        seed = str(random.SystemRandom().randrange(1 << 30))
    print(f"seed {seed}", flush=True)
    used, broken = {}, 0
    for first in range(0, count, BATCH):
        with tempfile.TemporaryDirectory() as folder:
            wanted = {str(number): make(seed, number, folder) for number in range(first, min(first + BATCH, count))}
            for number, answer in compare.run_peer(program, folder, list(wanted)).items():
                want, names = wanted[number]
                for name in names:
                    used[name.split(": ")[-1]] = used.get(name.split(": ")[-1], 0) + 1
                found = answer.get("found", {})
                found = {"train": found["train"]} if found else {}
                lines = list(compare.differences(found, want)) if found else [str(answer)]
                if lines:
                    broken += 1
                    print(f"graph {number} of seed {seed} ({', '.join(names)}) differs:")
                    for line in lines[:3]:
                        print("  " + line[:600], flush=True)
    print(f"{count} graphs of {len(used)} operators, {len(REJECTED)} others were not exported")
    assert broken == 0, f"{broken} graphs differ from Python"


if __name__ == "__main__":
    main()
