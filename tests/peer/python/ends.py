"""How Python programs over muster begin and end: ends.py MUSTER MPIRUN [--all | Ends.TEST…]"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

MUSTER, MPIRUN = sys.argv[1:3]
BEGIN = """
import os, sys
import torch, torch.distributed as dist, muster_torch
dist.init_process_group("muster", init_method="muster://")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.full((1000,), rank + 1.0)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all()
"""
LIMIT_S = 250
# Without --all. Each starts ranks that load torch, which takes seconds.
QUICK = ("alone", "exception_on_one_rank", "exit_code_of_one_rank", "interrupt", "no_port", "one_rank_leaves_late",
         "other_torch", "processes_are_left_alone", "program_of_the_page", "started_again")


class Ends(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def script(self, text, begin=BEGIN):
        path = os.path.join(self.folder.name, "train.py")
        with open(path, "w") as file:
            file.write(begin + textwrap.dedent(text))
        return path

    def run_command(self, *command, **variables):
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S,
                              env={**os.environ, **variables}, cwd=self.folder.name)

    def launch(self, text, ranks=2, begin=BEGIN, code=0, **variables):
        end = self.run_command(MPIRUN, "-n", str(ranks), sys.executable, self.script(text, begin), **variables)
        self.assertEqual(end.returncode, code, end.stdout + end.stderr)
        return end

    def test_program_of_the_page(self):
        page = pathlib.Path(__file__).parents[3] / "docs" / "from-torchrun.md"
        program = re.search("^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)[1]
        end = self.launch(program, begin="")
        self.assertEqual(sorted(re.findall(r"rank (\d) of 2: loss 0\.0000", end.stdout)), ["0", "1"], end.stdout)

    def test_exit_with_destroy(self):
        self.launch("dist.destroy_process_group()")

    def test_exit_without_destroy(self):
        self.launch("model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")

    def test_group_again_after_destroy(self):
        self.launch("""
            for _ in range(3):
                dist.destroy_process_group()
                dist.init_process_group("muster", init_method="muster://")
                dist.all_reduce(x)
            """)

    def test_one_rank_leaves_late(self):
        self.launch("""
            import time
            time.sleep(2 * rank)  # rank 0 has ended its work long before
            group = dist.distributed_c10d._get_default_store()
            group.set(f"key {rank}", "value")
            """)

    def test_exception_on_one_rank(self):
        end = self.launch("""
            if rank == 1:
                raise ValueError("a bad sample")
            dist.all_reduce(x)
            """, code=1)
        self.assertEqual(end.stderr.count("Traceback"), 1, end.stderr)
        self.assertIn("ValueError: a bad sample", end.stderr)

    def test_exit_code_of_one_rank(self):
        self.launch("""
            if rank == 1:
                sys.exit(7)
            dist.all_reduce(x)
            """, code=7)

    def test_time_limit_names_the_late_rank(self):
        end = self.launch("""
            import datetime, time
            group = dist.new_group(timeout=datetime.timedelta(seconds=2))
            try:
                if rank == 0:
                    dist.all_reduce(x, group=group)
                else:
                    time.sleep(4)
            except dist.DistBackendError as error:
                print("caught", error, flush=True)
            """)
        self.assertIn("caught", end.stdout)
        self.assertIn("rank 1", end.stdout)
        self.assertIn("timeout", end.stdout)

    def test_alone(self):
        end = self.run_command(sys.executable, self.script("""
            print(rank, size, *(os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")))
            """))
        self.assertEqual((end.returncode, end.stdout), (0, "0 1 0 0 1\n"), end.stderr)

    def test_variables(self):
        end = self.launch("""
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), str(size))
            print(f"local rank {os.environ['LOCAL_RANK']}")
            """, ranks=3)
        self.assertEqual(sorted(re.findall(r"local rank (\d)", end.stdout)), ["0", "1", "2"], end.stdout)
        self.launch("""
            import os, muster_torch
            assert os.environ["LOCAL_RANK"] == "5"
            """, begin="", LOCAL_RANK="5")

    def test_import_alone_does_not_start_mpi(self):
        end = self.run_command(sys.executable, self.script("""
            import muster_torch
            print(muster_torch._C.is_mpi_initialised())
            """, ""))
        self.assertEqual(end.stdout, "False\n", end.stderr)

    def test_launched_by_torchrun(self):
        for method in "", ', init_method="muster://"':
            end = self.run_command(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                                   self.script(f"""
                                       import torch.distributed as dist, muster_torch
                                       dist.init_process_group("muster"{method})
                                       """, ""))
            self.assertNotEqual(end.returncode, 0)
            self.assertIn("mpirun -n 2", end.stderr)

    def test_processes_are_left_alone(self):
        self.launch("""
            assert state() == before, (state(), before)
            """, begin="""
import os, signal
ours = sum(1 << one - 1 for one in signal.valid_signals()
           if one not in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV))  # which Open MPI handles
def state():
    status = open("/proc/self/status").read()
    handlers = [int(status.split(name)[1].split()[0], 16) & ours for name in ("SigIgn:", "SigCgt:", "SigBlk:")]
    return handlers, os.sched_getaffinity(0), {name for name in os.environ if name.startswith("MALLOC")}
import torch
before = state()
""" + BEGIN)

    def test_no_port(self):
        self.launch("""
            dist.barrier()
            dist.new_group([0])
            assert ports() == before, (before, ports())
            """, begin="""
import os
def ports():
    mine = {os.path.basename(os.path.realpath(f"/proc/self/fd/{fd}")) for fd in os.listdir("/proc/self/fd")}
    return {line.split()[1] for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")
            if " 0A " in line and f"socket:[{line.split()[9]}]" in mine}
import torch, muster_torch
before = ports()  # those of MPI
""" + BEGIN)

    def test_data_loader_workers(self):
        self.launch("""
            import torch, torch.distributed as dist, muster_torch
            from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
            if __name__ == "__main__":
                dist.init_process_group("muster", init_method="muster://")
                data = TensorDataset(torch.arange(64.0))
                for context in "fork", "spawn":  # a spawned worker imports muster_torch again
                    loader = DataLoader(data, 4, sampler=DistributedSampler(data), num_workers=2,
                                        multiprocessing_context=context)
                    for epoch in range(2):
                        total = sum(batch[0].sum() for batch in loader)
                        dist.all_reduce(total)
                        assert total == 64 * 63 / 2
            """, begin="")

    def test_fork_that_exits(self):
        self.launch("""
            child = os.fork()
            if child == 0:
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
            dist.all_reduce(x)
            """)

    def test_operation_in_a_fork_is_refused(self):
        self.launch("""
            child = os.fork()
            if child == 0:
                try:
                    dist.all_reduce(x)
                except RuntimeError:
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            dist.all_reduce(x)
            """)

    def test_interrupt(self):
        path = self.script("""
            print(f"ready {os.getpid()};", flush=True)
            import time
            while True:
                dist.all_reduce(x)
                time.sleep(0.01)
            """)
        job = subprocess.Popen([MPIRUN, "-n", "2", sys.executable, path], stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True)
        said, ranks = "", []
        while len(ranks) < 2:
            line = job.stdout.readline()
            self.assertTrue(line, said)
            said += line  # two ranks may write into one line
            ranks = [int(rank) for rank in re.findall(r"ready (\d+);", said)]
        os.killpg(job.pid, signal.SIGINT)  # as the terminal does
        self.assertNotEqual(job.wait(timeout=LIMIT_S), 0)
        job.stdout.close()
        end = time.monotonic() + 10
        while time.monotonic() < end and any(os.path.exists(f"/proc/{rank}") for rank in ranks):
            time.sleep(0.01)
        self.assertFalse([rank for rank in ranks if os.path.exists(f"/proc/{rank}")])

    def supervise(self, text, *flags):
        return self.run_command(MUSTER, "run", "-n", "2", *flags, "--", sys.executable, self.script(text))

    def test_started_again(self):
        end = self.supervise("""
            lives = "lives" + str(rank)
            open(lives, "a").write("x")
            if rank == 1 and os.path.getsize(lives) == 1:
                os.kill(os.getpid(), 9)
            dist.all_reduce(x)
            """, "--max-failures", "1")
        self.assertEqual(end.returncode, 0, end.stderr)
        self.assertEqual(os.path.getsize(os.path.join(self.folder.name, "lives1")), 2)

    def test_exit_code_is_passed_on(self):
        for code in 64, 85:
            end = self.supervise(f"sys.exit({code})")
            self.assertEqual(end.returncode, code, end.stderr)
        self.assertEqual(self.supervise("raise ValueError()", "--max-failures", "0").returncode, 1)

    def needs_mpi4py(self):
        if subprocess.run([sys.executable, "-c", "import mpi4py"], capture_output=True).returncode:
            self.skipTest("there is no mpi4py")

    def test_mpi4py(self):
        self.needs_mpi4py()
        for first in ("from mpi4py import MPI", "import mpi4py; mpi4py.rc.threads = False; from mpi4py import MPI", ""):
            self.launch("""
                from mpi4py import MPI
                half = MPI.COMM_WORLD.Split(rank % 2, -rank)
                dist.destroy_process_group()
                if rank == 0:  # rank 2, in the same half, has begun fewer groups
                    dist.init_process_group("muster", init_method=muster_torch.from_mpi(MPI.COMM_SELF))
                    dist.destroy_process_group()
                dist.init_process_group("muster", init_method=muster_torch.from_mpi(half))
                assert (dist.get_rank(), dist.get_world_size()) == (half.rank, half.size)
                y = torch.tensor([float(rank)])
                dist.all_reduce(y)
                assert y.item() == half.allreduce(rank)
                """, ranks=3, begin=first + BEGIN)

    def test_mpi4py_and_an_exception(self):
        self.needs_mpi4py()
        end = self.launch("""
            if rank == 1:
                raise ValueError("a bad sample")
            dist.all_reduce(x)
            """, begin="from mpi4py import MPI" + BEGIN, code=1)
        self.assertEqual(end.stderr.count("Traceback"), 1, end.stderr)

    def test_other_torch(self):
        end = self.run_command(sys.executable, "-c", "import torch; torch.__version__ = '1.0'; import muster_torch")
        self.assertIn("ImportError", end.stderr)
        self.assertIn("torch 1.0", end.stderr)
        self.assertIn(__import__("torch").__version__, end.stderr)


if __name__ == "__main__":
    chosen = sys.argv[3:] or [f"Ends.test_{name}" for name in QUICK]
    unittest.main(argv=sys.argv[:1] + [name for name in chosen if name != "--all"], verbosity=2)
