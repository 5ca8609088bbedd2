# RaySGD, of Ray 1.
#
#   python before.py CHECKPOINT
import sys

import ray
import torch
from ray.util.sgd import TorchTrainer
from ray.util.sgd.torch import TrainingOperator
from torch.utils.data import DataLoader, TensorDataset


class Sine(TrainingOperator):
    def setup(self, config):
        net = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
        self.register(models=net, optimizers=optimizer, criterion=torch.nn.MSELoss())
        x = torch.linspace(-3, 3, 1001).unsqueeze(1)
        self.register_data(
            train_loader=DataLoader(TensorDataset(x, torch.sin(x)), batch_size=config["batch_size"], shuffle=True)
        )


ray.init()
trainer = TorchTrainer(training_operator_cls=Sine, config={"lr": 0.01, "batch_size": 32}, num_workers=2)
for epoch in range(20):
    stats = trainer.train()
print("loss", stats["train_loss"])
trainer.save(sys.argv[1])
trainer.shutdown()
