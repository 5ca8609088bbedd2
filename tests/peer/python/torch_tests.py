"""torch's own tests of torch.distributed, which its wheel contains, over muster: all that gloo or MPI run on CPUs.

mpirun -n 3 python torch_tests.py FOLDER [--quick] [NAME…]

The ranks run each test together, with a default group of its own. FOLDER is empty and shared by the ranks, which tell
each other there how a test has ended. --quick: every eighth test, and those of `ALWAYS`. Ends with 1 if a test has
failed that is not in `EXPECTED`, or one has passed that is.
"""

import contextlib
import datetime
import importlib
import os
import re
import sys
import time
import traceback
import unittest
import warnings

import muster_torch  # noqa: F401
import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import TEST_SKIPS

# Tests that cannot pass: torch itself refuses monitored_barrier() unless the backend's name is gloo.
EXPECTED = {"test_monitored_barrier_failure_order", "test_monitored_barrier_gloo", "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_wait_all_ranks"}
# In a quick run, too.
ALWAYS = {"test_all_reduce_sum", "test_all_to_all", "test_barrier_timeout_global", "test_batch_isend_irecv_gloo",
          "test_ddp_logging_data_cpu", "test_DistributedDataParallelCPU", "test_send_recv_any_source",
          "test_scatter_object_list", "test_sparse_all_reduce_sum"}
LIMIT_S = 60
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def tests_of(backend):
    """torch's module of tests as for that backend: it decides at its import which tests the backend runs."""
    os.environ["BACKEND"] = backend
    name = "torch.testing._internal.distributed.distributed_test"
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    for features in module.DistTestCases.backend_feature.values():
        if backend in features:
            features.add("muster")
    return module


class As(str):
    """ "muster", which the bodies of the tests take for that other backend."""

    def __new__(cls, other):
        self = super().__new__(cls, "muster")
        self.other = other
        return self

    def __eq__(self, name):
        return name == self.other or super().__eq__(name)

    def __hash__(self):
        return super().__hash__()


def case_of(module):
    class OverMuster(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super(module.MultiProcessTestCase, self).setUp()
            self.special_return_code_checks, self.skip_return_code_checks = {}, []
            self.processes, self.pid_to_pipe = [], {}
            self.rank = rank
            self.file_name = os.path.join(os.environ["TEMP_DIR"], "file")
            module.Barrier.barrier_id = 0
            limit = module.CUSTOM_PG_TIMEOUT.get(self._testMethodName, LIMIT_S)
            dist.init_process_group("muster", init_method="muster://", timeout=datetime.timedelta(seconds=limit))
            module.Barrier.sync(timeout=LIMIT_S)

        def tearDown(self):
            super(module.MultiProcessTestCase, self).tearDown()

    return OverMuster


def chosen_tests():
    """The tests with the module they are in: gloo's, and those that only MPI runs."""
    mpi, gloo = tests_of("mpi"), tests_of("gloo")  # the last one's classes can be pickled
    # For gloo torch leaves out tests of groups on fewer than 8 ranks, for MPI it runs them; they need rank 2.
    os.environ["BACKEND"] = "mpi" if size > 2 else "muster"
    gloo.BACKEND, mpi.BACKEND = As("gloo"), As("mpi")
    chosen = {}
    for module in (gloo, mpi):
        case = case_of(module)
        for name in unittest.TestLoader().getTestCaseNames(case):
            if not getattr(getattr(case, name), "__unittest_skip__", False):
                chosen.setdefault(name, case)
    return chosen


def run(name, case):
    """ "passed", "skipped: …" or the traceback of the failure."""
    result = unittest.TestResult()
    case(name).run(result)
    problems = result.errors + result.failures
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    if problems:
        # torch's way to skip a test in a process of its own.
        exited = re.search(r"^SystemExit: (\d+)$", problems[0][1], re.MULTILINE)
        skips = [skip.message for skip in TEST_SKIPS.values() if exited and skip.exit_code == int(exited[1])]
        return f"skipped: {skips[0]}" if skips else problems[0][1]
    return "passed"


def tell_and_hear(folder, number, outcome):
    """The outcomes of all ranks."""
    path = os.path.join(folder, f"outcome-{number}-")
    with open(path + f"{rank}.new", "w") as file:
        file.write(outcome)
    os.rename(path + f"{rank}.new", path + str(rank))
    end = time.monotonic() + 5 * LIMIT_S
    outcomes = []
    for other in range(size):
        while not os.path.exists(path + str(other)):
            if time.monotonic() > end:
                sys.exit(f"rank {rank}: rank {other} did not end the test")
            time.sleep(0.01)
        with open(path + str(other)) as file:
            outcomes.append(file.read())
    return outcomes


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    quick = "--quick" in names
    names = [name for name in names if name != "--quick"]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = chosen_tests()
    if quick:
        names = [name for i, name in enumerate(chosen) if name in ALWAYS or i % 8 == 0]
    counts, wrong = {"passed": 0, "skipped": 0, "failed": 0}, []
    for number, name in enumerate(names or chosen):
        os.environ["TEMP_DIR"] = os.path.join(folder, str(number))
        for part in ("barrier", "test_dir", "init_dir"):
            os.makedirs(os.path.join(os.environ["TEMP_DIR"], part), exist_ok=True)
        start = time.monotonic()
        outcome = run(name, chosen[name])
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        outcomes = tell_and_hear(folder, number, outcome)
        kinds = {one.split(":")[0] if one.startswith(("passed", "skipped")) else "failed" for one in outcomes}
        kind = next(one for one in ("failed", "passed", "skipped") if one in kinds)
        counts[kind] += 1
        if kind == ("passed" if name in EXPECTED else "failed"):
            wrong.append(name)
        if rank == 0:
            print(f"{kind} {name} {time.monotonic() - start:.1f} s", flush=True)
            for other, one in enumerate(outcomes):
                if kind == "failed" and one != "passed":
                    print(f"  rank {other}: {one}", flush=True)
                elif kind == "skipped":
                    print(f"  {one}", flush=True)
                    break
    if rank == 0:
        print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"on {size} ranks")
        for name in wrong:
            print(f"not as expected: {name}")
    sys.exit(1 if wrong or not counts["passed"] else 0)


try:
    main()
except Exception:
    traceback.print_exc()
    sys.exit(1)
