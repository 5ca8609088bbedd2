"""Models of the kinds that are trained with muster, small. Each builder returns the module, in training mode, and the
Case that says what it is called with."""

import dataclasses
import math
import typing

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim


@dataclasses.dataclass
class Case:
    runs: list  # of pairs: arguments and keyword arguments
    dynamic_shapes: typing.Any = None
    learning_rate: float = 0.01
    evaluates: bool = True
    differs: str = ""  # the operator that may give other bits, and why


BATCH = {0: Dim("batch", min=2, max=64)}


def batches(*makers, sizes=(4, 4, 7)):
    """Runs with these batch sizes; each maker makes one argument."""
    return [([maker(size) for maker in makers], {}) for size in sizes]


def numbers(*shape):
    return lambda size: torch.randn(size, *shape)


def mlp():
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3),
                        nn.Linear(16, 3))
    return net, Case(batches(numbers(3, 4), sizes=(4, 1, 7)), ({0: Dim("batch")},))


class BasicBlock(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)


class ResNet18(nn.Module):
    def __init__(self, width=8, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        blocks, inner = [], width
        for outer in (width, 2 * width, 4 * width, 8 * width):
            blocks += [BasicBlock(inner, outer, 1 if inner == outer else 2), BasicBlock(outer, outer, 1)]
            inner = outer
        self.blocks = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inner, classes)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.avgpool(self.blocks(x)).flatten(1))


def resnet18():
    return ResNet18(), Case(batches(numbers(1, 28, 28)), ({0: BATCH[0]},))


class UNet(nn.Module):
    """The skipped features are cut to the size of those that come up again, as sizes may be odd."""

    def __init__(self):
        super().__init__()
        twice = lambda inner, outer: nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(2, outer), nn.LeakyReLU(0.1),
            nn.Conv2d(outer, outer, 3, padding=1), nn.InstanceNorm2d(outer, affine=True, track_running_stats=True),
            nn.SiLU())
        self.down1, self.down2, self.bottom = twice(2, 4), twice(4, 8), twice(8, 8)
        self.up2, self.up1 = nn.ConvTranspose2d(8, 8, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")
        self.join2, self.join1 = twice(16, 8), twice(12, 4)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = self.up2(self.bottom(F.avg_pool2d(second, 2)))
        y = self.join2(torch.cat([second, y], 1))
        y = self.up1(y)
        return self.head(self.join1(torch.cat([first, y], 1)))


def unet():
    return UNet(), Case(batches(numbers(2, 16, 16)), ({0: BATCH[0]},))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.layers = kind(6, 8, num_layers=2, dropout=0.2, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, words):
        features, _ = self.layers(self.embedding(words))
        return self.head(features[:, -1])


def words(length, count=20):
    return lambda size: torch.randint(0, count, (size, length))


def lstm():
    return Recurrent(nn.LSTM, bidirectional=True), Case(batches(words(5)), ({0: BATCH[0]},))


def gru():
    return Recurrent(nn.GRU), Case(batches(words(5)), ({0: BATCH[0]},))


class Places(nn.Module):
    """The sines of Vaswani et al. 2017, a buffer that is not in the state."""

    def __init__(self, width, length=32):
        super().__init__()
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angles = torch.arange(length).unsqueeze(1) * rates
        self.register_buffer("sines", torch.stack([angles.sin(), angles.cos()], 2).flatten(1), persistent=False)

    def forward(self, x):
        return x + self.sines[: x.size(1)]


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target, self.places = nn.Embedding(20, 8), nn.Embedding(20, 8), Places(8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, source, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        y = self.transformer(self.places(self.source(source)), self.places(self.target(target)), tgt_mask=causal,
                             tgt_is_causal=True, src_key_padding_mask=source == 0,
                             memory_key_padding_mask=source == 0)
        return F.log_softmax(self.head(y), -1)


def transformer():
    some = lambda length: lambda size: torch.randint(1, 20, (size, length))
    return Translator(), Case(batches(some(7), some(5)), ({0: BATCH[0]}, {0: BATCH[0]}))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 8, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.places = nn.Parameter(torch.randn(1, 17, 8) / 10)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.encoder(x)[:, 0])


def vit():
    return ViT(), Case(batches(numbers(1, 16, 16)), ({0: BATCH[0]},))


class GPT(nn.Module):
    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"),
                                            nn.Linear(4 * width, width), nn.Dropout(0.1))

        def forward(self, x):
            batch, length, width = x.shape
            parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(*parts.unbind(), is_causal=True,
                                               dropout_p=0.1 if self.training else 0.0)
            x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
            return x + self.perceptron(self.norm2(x))

    def __init__(self):
        super().__init__()
        self.letters, self.places = nn.Embedding(20, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(GPT.Block(8, 2) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, text):
        x = self.letters(text) + self.places(torch.arange(text.size(1)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt():
    runs = [([torch.randint(0, 20, (batch, length))], {}) for batch, length in ((3, 6), (5, 9), (2, 16))]
    return GPT(), Case(runs, ({0: BATCH[0], 1: Dim("length", min=2, max=16)},))


def generator():
    net = nn.Sequential(nn.ConvTranspose2d(6, 8, 4, 1, 0, bias=False), nn.BatchNorm2d(8), nn.ReLU(True),
                        nn.ConvTranspose2d(8, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
                        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh())
    return net, Case(batches(numbers(6, 1, 1)), ({0: BATCH[0]},))


def discriminator():
    net = nn.Sequential(nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True),
                        nn.Conv2d(4, 8, 4, 2, 1, bias=False), nn.BatchNorm2d(8), nn.RReLU(), nn.Dropout2d(0.2),
                        nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid())
    return net, Case(batches(numbers(1, 16, 16)), ({0: BATCH[0]},))


class Graph(nn.Module):
    """Messages along the edges of a graph, added and averaged at their targets; then one value for each of 3 graphs."""

    def __init__(self):
        super().__init__()
        self.message, self.update, self.head = nn.Linear(9, 8), nn.GRUCell(8, 4), nn.Linear(4, 2)

    def forward(self, nodes, edges, weights, graphs):
        for _ in range(2):
            source, target = edges
            messages = torch.tanh(self.message(torch.cat([nodes[source], nodes[target], weights], 1)))
            received = torch.zeros(nodes.size(0), 8).index_add(0, target, messages)
            degree = torch.zeros(nodes.size(0)).scatter_add(0, target, torch.ones(target.size(0))).clamp(min=1)
            nodes = self.update(received / degree.unsqueeze(1), nodes)
        pooled = torch.zeros(3, 4).scatter_reduce(0, graphs.unsqueeze(1).expand(-1, 4), nodes, "amax",
                                                  include_self=False)
        return self.head(pooled)


def graph():
    def run(nodes, edges):
        return [torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges)), torch.rand(edges, 1),
                torch.arange(nodes) % 3], {}

    nodes, edges = Dim("nodes", min=3, max=100), Dim("edges", min=2, max=1000)
    return Graph(), Case([run(9, 20), run(9, 20), run(12, 31)], ({0: nodes}, {1: edges}, {0: edges}, {0: nodes}))


class FNO(nn.Module):
    """Li et al. 2021, in one dimension: products with complex weights for the lowest frequencies."""

    def __init__(self, width=6, modes=4):
        super().__init__()
        self.lift, self.head = nn.Linear(2, width), nn.Linear(width, 1)
        self.spectral = nn.Parameter(torch.randn(2, width, width, modes, dtype=torch.complex64) / width)
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(2))
        self.modes = modes

    def forward(self, x):
        place = torch.linspace(0, 1, x.size(1)).expand(x.size(0), -1)
        y = self.lift(torch.stack([x, place], -1)).transpose(1, 2)
        for weight, local in zip(self.spectral, self.local):
            spectrum = torch.fft.rfft(y)
            low = torch.einsum("bim,iom->bom", spectrum[:, :, : self.modes], weight)
            full = F.pad(low, (0, spectrum.size(2) - self.modes))
            y = F.gelu(torch.fft.irfft(full, n=y.size(2)) + local(y))
        return self.head(y.transpose(1, 2)).squeeze(-1)


def fno():
    return FNO(), Case(batches(numbers(16)), ({0: BATCH[0]},))


class ConvNeXt(nn.Module):
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
            self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.scale = nn.Parameter(torch.full((width,), 0.1))

        def forward(self, x):
            y = self.depthwise(x).permute(0, 2, 3, 1)
            y = self.scale * self.narrow(F.gelu(self.wide(self.norm(y))))
            y = y.permute(0, 3, 1, 2)
            if self.training:  # stochastic depth
                y = y * torch.empty(x.size(0), 1, 1, 1).bernoulli_(0.8).div_(0.8)
            return x + y

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8), nn.Linear(8, 5)
        self.blocks = nn.Sequential(ConvNeXt.Block(8), ConvNeXt.Block(8))

    def forward(self, x):
        x = self.blocks(self.stem(x).contiguous(memory_format=torch.channels_last))
        return self.head(self.norm(x.mean((2, 3))))


def convnext():
    # Python itself leaves out the draws in evaluation; an operator of the graph cannot.
    return ConvNeXt(), Case(batches(numbers(3, 16, 16)), ({0: BATCH[0]},), evaluates=False)


class MobileNet(nn.Module):
    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            layers = lambda inner, outer, kernel, groups: [
                nn.Conv2d(inner, outer, kernel, padding=kernel // 2, groups=groups, bias=False),
                nn.BatchNorm2d(outer, momentum=0.01)]
            self.layers = nn.Sequential(*layers(width, 3 * width, 1, 1), nn.Hardswish(inplace=True),
                                        *layers(3 * width, 3 * width, 5, 3 * width), nn.ReLU6(inplace=True),
                                        *layers(3 * width, width, 1, 1))
            self.squeeze, self.excite = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

        def forward(self, x):
            y = self.layers(x)
            return x + y * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4),
                                      MobileNet.Block(4), MobileNet.Block(4))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 5))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


def mobilenet():
    return MobileNet(), Case(batches(numbers(3, 16, 16)), ({0: BATCH[0]},))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.sums = nn.EmbeddingBag(30, 6, mode="sum", include_last_offset=True)
        self.means = nn.EmbeddingBag(30, 6, mode="mean")
        self.head = nn.Linear(12, 1)

    def forward(self, items, offsets, ratings):
        both = [self.sums(items, offsets, per_sample_weights=ratings), self.means(items, offsets[:-1])]
        return self.head(torch.cat(both, 1)).squeeze(1)


def embedding_bag():
    def run(count):
        return [torch.randint(0, 30, (count,)), torch.tensor([0, 2, 5, 5, count]), torch.rand(count)], {}

    items = Dim("items", min=6, max=500)
    return Bags(), Case([run(11), run(11), run(17)], ({0: items}, None, {0: items}))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.randn(4))

    def forward(self, x):
        y = torch.matmul(x, self.weight) * torch.polar(torch.ones_like(self.phase), self.phase)
        y = torch.view_as_complex(torch.view_as_real(y.conj().resolve_conj()) * 0.5) + (1.5 + 0.5j)
        return {"value": y, "size": y.abs(), "angle": torch.angle(y), "turned": torch.fft.fft(y).real}


def complex_numbers():
    runs = [([torch.randn(size, 4, dtype=torch.complex64)], {}) for size in (4, 4, 7)]
    return Complex(), Case(runs, ({0: BATCH[0]},))


class Choices(nn.Module):
    """A Python number, a mask and integers; what is masked decides the sizes."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, classes, mask, power: int, flags):
        x = self.table(classes)
        x = torch.where(flags.unsqueeze(-1), x, -x ** power)
        kept = self.head(x)[mask]
        return kept, mask.sum(), classes.remainder(3).bitwise_xor(1), kept.new_zeros(kept.shape[0]), power


def int_and_bool():
    def run(size):
        return [torch.randint(0, 10, (size, 5)), torch.rand(size, 5) > 0.4, 3, torch.rand(size, 5) > 0.5], {}

    return Choices(), Case([run(4), run(4), run(7)], ({0: BATCH[0]}, {0: BATCH[0]}, None, {0: BATCH[0]}))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Bilinear(3, 2, 4)

    def forward(self, pair, named, *, scale, shift=None):
        x, (y, z) = pair
        result = self.left(x) * scale + self.right(y, named["right"])
        return {"sum": result if shift is None else result + shift, "parts": [z * 2, (result.mean(), named["left"])]}, z


def signatures():
    def run(size):
        return ([(torch.randn(size, 3), [torch.randn(size, 3), torch.randn(size)]),
                 {"left": torch.randn(size, 2), "right": torch.randn(size, 2)}],
                {"scale": torch.rand(1), "shift": torch.randn(4)})

    return Nested(), Case([run(4), run(4), run(7)], {
        "pair": (BATCH, [BATCH, BATCH]), "named": {"left": BATCH, "right": BATCH}, "scale": None, "shift": None})


class Lengths(nn.Module):
    """Sizes are computed: pairs of neighbours, a window that depends on the length, and sizes as numbers."""

    def __init__(self):
        super().__init__()
        self.conv, self.bilinear = nn.Conv1d(3, 4, 3, padding=1), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.norm(self.conv(x)).transpose(1, 2)
        length = x.size(2)
        y = y.reshape(y.size(0) * (length // 2), 8)
        y = torch.tanh(self.bilinear(y)).view(x.size(0), -1, 4)
        return y.sum(1) / (length // 2) + y[:, length // 4 - 1], y.cumsum(1) * math.sqrt(2)


def dynamic_sizes():
    runs = [([torch.randn(batch, 3, length)], {}) for batch, length in ((4, 8), (3, 12), (6, 6))]
    return Lengths(), Case(runs, ({0: BATCH[0], 2: 2 * Dim("half", min=3, max=25)},))


class Memory(nn.Module):
    """Buffers that forward() changes in place, in parts, or replaces."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("queue", torch.zeros(6, 4))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.queue[1:] = self.queue[:-1].clone()
            self.queue[0].copy_(x[0])
        self.calls = self.calls + 1
        self.scratch.add_(x.detach()[0])
        return self.head(x - self.mean) @ self.queue.t() + self.scratch.sum() / self.calls


def buffers():
    # In Python too they change in evaluation.
    return Memory(), Case(batches(numbers(4)), ({0: BATCH[0]},))


class Blocks(nn.Module):
    """Parts without gradients and in bfloat16, one in the other. torch.export itself forgets a no_grad() inside of an
    autocast()."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scale = self.student(x).abs().mean() + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.student(x)
            with torch.autocast("cpu", enabled=False):
                z = self.student(x) * 0.5
            y = self.head(F.relu(y)) / scale
        return y.float() + z.sum(), F.cross_entropy(z, target)


def blocks():
    return Blocks(), Case(batches(numbers(6)), ({0: BATCH[0]},))


class Modes(nn.Module):
    """The other operators that training and evaluation differ in."""

    def __init__(self):
        super().__init__()
        self.rnn, self.norm = nn.RNN(4, 4, 2, dropout=0.3), nn.InstanceNorm1d(4, track_running_stats=True)
        self.layers = nn.Sequential(nn.AlphaDropout(0.2), nn.Linear(4, 4), nn.RReLU(0.1, 0.4),
                                    nn.FeatureAlphaDropout(0.2))
        self.free = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x):
        y = self.rnn(x.permute(2, 0, 1))[0].permute(1, 2, 0)
        y = F.dropout1d(self.norm(y), 0.2, self.training)
        return self.free(self.layers(y.transpose(1, 2))[:, 0])


def modes():
    return Modes(), Case(batches(numbers(4, 6)), ({0: BATCH[0]},))


MODELS = (mlp, resnet18, unet, lstm, gru, transformer, vit, gpt, generator, discriminator, graph, fno, convnext,
          mobilenet, embedding_bag, complex_numbers, int_and_bool, signatures, dynamic_sizes, buffers, blocks, modes)
