"""Bytes per second from one writer to one reader on this machine: a live stream beside ADIOS2's SST, in alternation.

    live_sst.py live_speed

Needs PyPI's adios2, which has no MPI: its writer and its reader are two processes. Prints the median ratio.
"""
import os, statistics, subprocess, sys, tempfile, time

try:
    import adios2, numpy
except ImportError:
    print("skipped: there is no adios2 beside this Python")
    sys.exit(77)

ROUNDS, SAMPLES = 7, 40


def engine():
    io = adios2.Adios().declare_io("sst")
    io.set_engine("SST")
    io.set_parameters({"QueueLimit": "4", "QueueFullPolicy": "Block", "OpenTimeoutSecs": "30"})
    return io


def write(name, megabytes):
    block = numpy.ones(megabytes << 20, numpy.uint8)
    with adios2.Stream(engine(), name, "w") as stream:
        for _ in stream.steps(SAMPLES):
            stream.write("x", block, block.shape, [0], block.shape)


def read(name):
    taken, begin = 0, 0.0
    with adios2.Stream(engine(), name, "r") as stream:
        for _ in stream.steps():
            assert stream.read("x")[-1] == 1
            taken += 1
            if taken == SAMPLES // 2:
                begin = time.perf_counter()
    print((time.perf_counter() - begin) / (taken - SAMPLES // 2))


def sst(folder, megabytes):
    """Seconds for a sample by SST."""
    name = f"{folder}/stream"
    writer = subprocess.Popen([sys.executable, __file__, "write", name, str(megabytes)])
    reader = subprocess.run([sys.executable, __file__, "read", name], capture_output=True, text=True, timeout=120)
    assert writer.wait(60) == 0 and reader.returncode == 0, reader.stderr
    return float(reader.stdout)


def live(program, megabytes):
    """Seconds for a sample by a live stream. A LiveWorld sets malloc as these variables do."""
    malloc = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2000000000", "MALLOC_TOP_PAD_": "67108864"}
    out = subprocess.run(["mpirun", "-n", "2", program, "stream", str(megabytes), str(SAMPLES)], capture_output=True,
                         text=True, timeout=120, env=os.environ | malloc)
    assert out.returncode == 0, out.stderr
    return float(out.stdout.split()[0])


if sys.argv[1] == "write":
    write(sys.argv[2], int(sys.argv[3]))
elif sys.argv[1] == "read":
    read(sys.argv[2])
else:
    for megabytes in 1, 16, 64:
        with tempfile.TemporaryDirectory() as folder:
            pairs = [(sst(folder, megabytes), live(sys.argv[1], megabytes)) for _ in range(ROUNDS)]
        ratios = sorted(a / b for a, b in pairs)
        print(f"{megabytes} MB: {statistics.median(ratios):.1f} x SST ({ratios[0]:.1f} to {ratios[-1]:.1f}, "
              f"{ROUNDS} rounds), at least 4; a sample takes {1e3 * statistics.median(b for _, b in pairs):.2f} ms",
              flush=True)
