"""Trainings over muster and over gloo beside each other: mpirun -n 2 python training.py FOLDER. The ranks of gloo meet
by muster's rendezvous."""

import os
import sys
import time
import unittest

import muster_torch  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

FOLDER = sys.argv[1]
STEPS = 10
LIMIT_S = 60  # for what ends at once


def begin(backend):
    dist.init_process_group(backend, init_method="muster://")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def train(model, average):
    """The losses of the steps, the mean over the ranks. `average`: averages the gradients where the model does not."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(16, 20)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def losses_of(backend, wrap, average=lambda model: None):
    losses = train(wrap(begin(backend)), average)
    dist.destroy_process_group()
    return losses


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def shard(model):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


class Training(unittest.TestCase):
    def setUp(self):
        self.addCleanup(lambda: dist.destroy_process_group() if dist.is_initialized() else None)

    def assert_near(self, losses, others):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=0, atol=1e-5)
        self.assertLess(losses[-1], losses[0])

    def test_ddp(self):
        by_hand = losses_of("gloo", lambda model: model, average_gradients)
        self.assert_near(losses_of("gloo", DistributedDataParallel), by_hand)
        self.assert_near(losses_of("muster", DistributedDataParallel), by_hand)

    def test_fsdp2(self):
        # Not sharded: gloo's own average in reduce-scatter has been wrong in some releases of torch.
        by_hand = losses_of("gloo", lambda model: model, average_gradients)
        self.assert_near(losses_of("muster", shard), by_hand)

    def test_dtensor(self):
        begin("muster")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = torch.arange(24.0).view(4, 6)
        left, right = distribute_tensor(whole, mesh, [Shard(0)]), distribute_tensor(whole.t(), mesh, [Shard(0)])
        self.assertIsInstance(left, DTensor)
        torch.testing.assert_close((left @ right).full_tensor(), whole @ whole.t())
        torch.testing.assert_close(left.redistribute(mesh, [Shard(1)]).full_tensor(), whole)

    def test_checkpoint(self):
        model = shard(begin("muster"))
        path = os.path.join(FOLDER, "checkpoint")
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        before = [parameter.full_tensor().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        for parameter, value in zip(model.parameters(), before):
            self.assertTrue(parameter.full_tensor().equal(value))

    def test_objects_and_groups(self):
        begin("cpu:muster")
        rank, size = dist.get_rank(), dist.get_world_size()
        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        self.assertEqual(objects, [{"rank": other} for other in range(size)])
        mine = dist.new_group([rank], use_local_synchronization=True)  # only its members make it
        both = [dist.new_group(list(range(size))[::step]) for step in (1, -1)]
        values = torch.tensor([rank + 1.0])
        dist.all_reduce(values, group=mine)
        self.assertEqual(values.item(), rank + 1)
        for group in both:
            dist.all_reduce(values, group=group)
        self.assertEqual(values.item(), size * size * (size + 1) / 2)
        self.assertIn("muster", dist.get_backend())
        self.assertIn("muster", dist.distributed_c10d._get_default_group().name())

    def test_debug_level_detail(self):
        self.addCleanup(dist.set_debug_level, dist.DebugLevel.OFF)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        begin("muster")
        with self.assertRaisesRegex(RuntimeError, "[Mm]ismatch|shape"):
            dist.all_reduce(torch.ones(2 + dist.get_rank()))

    def test_events_have_names(self):
        begin("muster")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            dist.all_reduce(torch.ones(10))
        self.assertIn("muster:all_reduce", [event.name for event in profile.events()])

    def test_buckets_overlap_backward(self):
        """The first bucket's all-reduce ends by itself during backward(): the first layer's part of that waits for it."""
        begin("muster")
        model = DistributedDataParallel(nn.Sequential(*[nn.Linear(1000, 1000) for _ in range(8)]), bucket_cap_mb=4)
        reductions, ended = [], []

        def reduce(_, bucket):
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            reductions.append(work.get_future().then(lambda future: future.value()[0]))
            return reductions[-1]

        def wait(*_):
            if step == 0:
                return  # DDP's first backward() has one bucket
            end = time.monotonic() + LIMIT_S
            while time.monotonic() < end and not (reductions and reductions[0].done()):
                time.sleep(0.001)
            ended.append(bool(reductions) and reductions[0].done())

        model.register_comm_hook(None, reduce)
        model.module[0].register_full_backward_pre_hook(wait)
        x = torch.randn(8, 1000, requires_grad=True)
        for step in range(4):
            reductions.clear()
            model(x).sum().backward()
        self.assertGreater(len(reductions), 1)
        self.assertEqual(ended, [True] * 3)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], verbosity=2 if os.environ["RANK"] == "0" else 0)
