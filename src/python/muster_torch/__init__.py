"""torch.distributed over MPI, by muster.

    import torch.distributed as dist, muster_torch       # mpirun -n 4 python train.py
    dist.init_process_group("muster", init_method="muster://")

The import sets RANK, LOCAL_RANK and WORLD_SIZE where they are missing. It initialises MPI if a launcher (mpirun, srun
and others) has started this process; without a launcher the process is a world of one. At the exit, MPI is finalised
by the library that has initialised it, so mpi4py may be imported before or after.
"""

import atexit
import collections
import multiprocessing
import os
import shutil
import sys
import tempfile
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from ._build import TORCH_VERSION

if torch.__version__ != TORCH_VERSION:
    raise ImportError(f"loading muster_torch: it was built for torch {TORCH_VERSION}, and this is torch "
                      f"{torch.__version__}. Build it for this environment by scripts/build-python")

from . import _C  # noqa: E402

__all__ = ["from_mpi"]

_LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID",
                         "PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID")

_process = os.getpid()
_worlds = []  # made by from_mpi()
_all_ranks = None
_default = None  # the world of the default group
_num_groups = collections.Counter()  # default groups so far in each world


def _start_mpi():
    wrong = _C.start()
    if wrong:
        raise RuntimeError(f"starting MPI: {wrong}")


def from_mpi(comm):
    """Returns the init_method of a default group over a duplicate of an mpi4py communicator. Collective over comm.

    dist.init_process_group("muster", init_method=muster_torch.from_mpi(comm))
    """
    _worlds.append(_C.from_fortran_handle(comm.py2f(), dist.default_pg_timeout))
    return f"muster://{len(_worlds) - 1}"


def _world_of_all_ranks(timeout):
    global _all_ranks
    if _all_ranks is None:
        _start_mpi()
        _all_ranks = _C.world_of_mpi(timeout)
    return _all_ranks


def _make_store(world, timeout):
    """A store without a port. Collective over the world."""
    if world.size == 1:
        return dist.HashStore()
    if _C.threads_may_call_mpi():
        return world.mpi_store(timeout)
    if world.num_nodes > 1:
        raise RuntimeError("starting the process group: MPI was initialised without MPI_THREAD_MULTIPLE, and the ranks "
                           "are on several nodes. Import muster_torch first, or ask mpi4py for \"multiple\"")
    folder = world.broadcast(tempfile.mkdtemp(prefix="muster-") if world.rank == 0 else "")  # mode 0700
    store = dist.FileStore(os.path.join(folder, "store"), world.size)
    _C.keep(store)  # not destroyed: the destructor uses the file, which may be removed by then
    atexit.register(_remove, folder, store, world.size)
    return store


def _remove(folder, store, size):
    if os.getpid() == _process and store.add("left", 1) == size:
        shutil.rmtree(folder, ignore_errors=True)


def _refuse_world(rank, size):
    raise RuntimeError(f"starting the process group: torch takes this process for rank {rank} of {size}, and for MPI it is "
                       f"rank {_default.rank} of {_default.size}. Start the ranks with mpirun -n {size} or srun instead of "
                       "torchrun, and give init_method=\"muster://\"")


def _rendezvous(url, timeout=dist.default_pg_timeout, **_):
    """The rendezvous handler of muster://, for all ranks of MPI, and of muster://N, which from_mpi() returns."""
    global _default
    parts = urlsplit(url)
    _default = _worlds[int(parts.netloc)] if parts.netloc else _world_of_all_ranks(timeout)
    if _default.size == 1 and not parts.netloc and os.environ.get("WORLD_SIZE", "1") != "1":
        _refuse_world(os.environ.get("RANK"), os.environ["WORLD_SIZE"])  # torchrun has started several processes
    asked = dict(parse_qsl(parts.query))
    for name, own in (("rank", _default.rank), ("world_size", _default.size)):
        if int(asked.get(name, own)) != own:
            raise ValueError(f"starting the process group: {name} is {asked[name]}, and MPI says {own}. Leave it out")
    _num_groups[_default] += 1
    yield dist.PrefixStore(f"muster {_num_groups[_default]}", _make_store(_default, timeout)), _default.rank, _default.size
    raise RuntimeError("muster:// has one rendezvous for each init_process_group(). Call that again")


def _make_group(options, _):
    """Makes the backend of a group; without an accelerator, the group itself. Collective over the group's ranks."""
    global _default
    members = list(options.global_ranks_in_group)
    if not members:  # the default group
        place = (options.group_rank, options.group_size)
        if _default is None or place != (_default.rank, _default.size):  # after another rendezvous, such as env://
            _default = _world_of_all_ranks(options.timeout)
        if place != (_default.rank, _default.size):
            _refuse_world(*place)
        members = list(range(_default.size))
    if _default is None:
        raise RuntimeError("starting a process group: the default group has not met over MPI. Give "
                           "init_process_group() init_method=\"muster://\"")
    backend = _default.make_backend(members, options.timeout)
    if torch.accelerator.is_available():
        return backend  # another backend may serve the accelerator
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        backend = dist.distributed_c10d._create_process_group_wrapper(
            wrapped_pg=backend, store_prefix=options.group_id, store=options.store, rank=options.group_rank,
            world_size=options.group_size, timeout=options.timeout)
    return _C.make_group(options.store, backend)


def _end():
    """Runs before Python is finalised. If muster has initialised MPI, end() in module.cpp finalises it afterwards,
    unless the exit code is not 0."""
    if os.getpid() != _process:
        return  # a child of fork()
    _C.end_progress()  # its callbacks need Python
    if _worlds or _all_ranks:
        failed = getattr(sys, "last_value", None) is not None
        if failed and not _C.owns_mpi() and _C.rank_and_size()[1] > 1:
            # Whoever has initialised MPI would finalise it now, and wait there for the ranks that wait for this one.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)


def _set_variables():
    launched = _C.is_launched()
    if launched:
        _start_mpi()
    rank, size = _C.rank_and_size() if launched or _C.is_mpi_initialised() else (0, 1)
    known = [os.environ[name] for name in _LOCAL_RANK_VARIABLES if name in os.environ]
    local_rank = 0 if size == 1 else known[0] if known else None
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", size)):
        if value is not None:
            os.environ.setdefault(name, str(value))


# A process that multiprocessing has spawned imports the main module again, before it knows its parent; it is no rank.
if multiprocessing.parent_process() is None and not getattr(multiprocessing.current_process(), "_inheriting", False):
    _set_variables()
dist.distributed_c10d.Backend.register_backend("muster", _make_group, extended_api=True, devices=["cpu"])
dist.register_rendezvous_handler("muster", _rendezvous)
atexit.register(_end)
