#!/usr/bin/env python3
"""Makes the models that exported.cpp trains, and tries what they have become. NAME: cnn, resnet18 or transformer.

    make_model.py NAME net.pt2            # with fresh weights
    make_model.py --try NAME trained.pt   # the class of a grey picture, with trained weights
"""

import sys

import torch
from torch import nn


class Net(nn.Module):
    """Pictures [N, 28, 28] of bytes to logits [N, 10]. Scaling is part of the model, so that a file is all it needs."""

    def forward(self, x):
        return self.classify(((x.float() / 255 - 0.28604) / 0.32025).unsqueeze(1))


class CNN(Net):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(16 * 3 * 3, 10)

    def classify(self, x):
        return self.fc(self.dropout(self.features(x).flatten(1)))


class Block(nn.Module):
    """Two 3 × 3 convolutions with a residual connection."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity() if stride == 1 else nn.Sequential(
            nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet18(Net):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nn.Sequential(*(block for width_in, width, stride in sizes
                                      for block in (Block(width_in, width, stride), Block(width, width, 1))))
        self.fc = nn.Linear(512, 10)

    def classify(self, x):
        return self.fc(self.blocks(self.pool(self.bn1(self.conv1(x)).relu())).mean((2, 3)))


class Transformer(Net):
    """The rows of a picture are a sequence of 28 vectors."""

    def __init__(self, width=64):
        super().__init__()
        self.embedding = nn.Linear(28, width)
        self.position = nn.Parameter(torch.randn(28, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(width, 10)

    def classify(self, x):
        return self.fc(self.encoder(self.embedding(x.squeeze(1)) + self.position).mean(1))


MODELS = {"cnn": CNN, "resnet18": ResNet18, "transformer": Transformer}

if __name__ == "__main__":
    torch.manual_seed(0)
    if len(sys.argv) == 4 and sys.argv[1] == "--try" and sys.argv[2] in MODELS:
        model = MODELS[sys.argv[2]]()
        model.load_state_dict(torch.load(sys.argv[3], weights_only=True))
        print(model.eval()(torch.full((1, 28, 28), 127, dtype=torch.uint8)).softmax(1))
    elif len(sys.argv) == 3 and sys.argv[1] in MODELS:
        pictures = torch.zeros(2, 28, 28, dtype=torch.uint8)
        shapes = {"x": {0: torch.export.Dim("batch")}}
        program = torch.export.export(MODELS[sys.argv[1]]().train(), (pictures,), dynamic_shapes=shapes)
        torch.export.save(program, sys.argv[2])
    else:
        sys.exit(__doc__)
