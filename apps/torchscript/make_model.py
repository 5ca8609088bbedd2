#!/usr/bin/env python3
"""Makes the model that torchscript.cpp trains, and looks at what it has become.

    make_model.py data/model.pt          # a network for Fashion-MNIST with fresh weights
    make_model.py --show trained.pt      # its layers, and what it makes of a grey picture
"""

import sys

import torch
from torch import nn


class Net(nn.Module):
    """Pictures [N, 1, 28, 28], of numbers about 0, to logits of ten classes."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, stride=2, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(16 * 7 * 7, 10)

    def forward(self, x):
        return self.classifier(self.dropout(self.features(x).flatten(1)))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "--show":
        net = torch.jit.load(sys.argv[2]).eval()
        print(net)
        print(net(torch.zeros(1, 1, 28, 28)).softmax(1))
    elif len(sys.argv) == 2:
        torch.manual_seed(0)
        torch.jit.script(Net()).save(sys.argv[1])
    else:
        sys.exit(__doc__)
