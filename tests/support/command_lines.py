"""What the tests of the command line share: files to name, a command that is run, and what may not come of it."""
import array
import concurrent.futures
import hashlib
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess

# What a shell may have inherited from a launcher that has not started it: of a job that is over, and of srun --pty.
INHERITED = [
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess": "pmi",
     "OMPI_MCA_orte_ess_num_procs": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1234",
     "PMIX_SERVER_URI2": "1234.0;tcp4://127.0.0.1:1"},
    {"SLURM_JOB_ID": "12", "SLURM_JOBID": "12", "SLURM_NODELIST": socket.gethostname(), "SLURM_TASKS_PER_NODE": "1",
     "SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "1"},
]
LIMIT = 60  # seconds; no command that is tried takes as long
LONG = "x" * 300  # longer than any name of a file may be
# What belongs to libraries, and not into the text for a user.
RAW = re.compile(r"json\.exception|filesystem error|terminate called|std::|\.tmp\.|oneMKL|\d{30}|[\x00-\x08\x0b-\x1f\x7f]")


class Forks:
    """Runs commands of one program as forks of a process that has loaded its libraries (forks.cpp)."""

    def __init__(self, library, program):
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT)
        self.readers = concurrent.futures.ThreadPoolExecutor(2)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.process = subprocess.Popen(
                [program], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                env={**os.environ, "LD_PRELOAD": library, "MUSTER_TEST_FORKS": str(theirs.fileno())})

    def run(self, command, environment):
        """Returns the exit code, as subprocess does, and what the command wrote to stdout and to stderr."""
        texts = [os.getcwd(), str(len(command)), *command, *(f"{name}={value}" for name, value in environment.items())]
        (out, to_out), (errors, to_errors) = os.pipe(), os.pipe()
        with open(os.devnull) as nothing:
            self.socket.sendmsg([b"".join(os.fsencode(text) + b"\0" for text in texts)],
                                [(socket.SOL_SOCKET, socket.SCM_RIGHTS,
                                  array.array("i", [nothing.fileno(), to_out, to_errors]))])
        os.close(to_out)
        os.close(to_errors)
        process, = struct.unpack("i", self.socket.recv(4))
        written = [self.readers.submit(read, stream) for stream in (out, errors)]
        try:
            code = os.waitstatus_to_exitcode(struct.unpack("i", self.socket.recv(4))[0])
        except TimeoutError:
            os.kill(process, signal.SIGKILL)
            self.socket.recv(4)
            raise
        return code, *(text.result(LIMIT) for text in written)

    def end(self):
        self.socket.close()
        self.process.wait()


def read(descriptor):
    with open(descriptor, "rb") as stream:
        return stream.read()


forks = {}  # for a program, what forks it; any other is started anew for each command


class Ended:
    """How a command has ended: `code` (None if it did not end), and what it said."""

    def __init__(self, command, environment=None, before_start=None):
        self.command = command
        environment = {**os.environ, **(environment or {})}
        try:
            if command[0] in forks and not before_start:
                self.code, *texts = forks[command[0]].run(command, environment)
            else:
                ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                       env=environment, timeout=LIMIT, preexec_fn=before_start)
                self.code, *texts = ended.returncode, ended.stdout, ended.stderr
        except (subprocess.TimeoutExpired, TimeoutError, concurrent.futures.TimeoutError):
            self.code, self.out, self.said = None, "", ""
            return
        self.out, self.said = (text.decode(errors="replace") for text in texts)

    def problems(self):
        """What no command may do, whatever it was asked for."""
        if self.code is None:
            return ["it does not end"]
        found = []
        if self.code < 0 or self.code > 127:
            found.append(f"it ended by a signal ({self.code})")
        if raw := RAW.search(self.said) or RAW.search(self.out):
            found.append(f"it says {raw.group()!r}")
        errors = [line for line in self.said.splitlines() if line.startswith("muster: ") and " warning: " not in line]
        if os.path.basename(self.command[0]) != "muster":
            errors = [line for line in errors if line.startswith("muster: error: ")]
        if len(errors) != (self.code != 0):
            found.append("it does not say once, in one line, what is wrong")
        return found

    def __str__(self):
        return f"{' '.join(map(repr, self.command))} ended with {self.code}\n{self.out}{self.said}"


def snapshot(folder):
    """What lies in a folder: kinds, links and contents; logs and locks are written by whoever looks."""
    found = {}
    for path in sorted(pathlib.Path(folder).rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == ".lock" or path.parent.name == "logs":
            continue
        if path.is_symlink():
            found[name] = "link to " + os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = oct(path.lstat().st_mode)
    return found


def npy(path, values):
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % len(values)
    header += " " * (-(len(header) + 11) % 64) + "\n"
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode()
    pathlib.Path(path).write_bytes(data + struct.pack("<%df" % len(values), *values))


def make_files(muster, linear):
    """In the working directory: good and bad files, a run called runs/own, and one of which a checkpoint is damaged.
    The newest checkpoint of the first is what comes back."""
    write = lambda name, text: pathlib.Path(name).write_text(text)
    write("a.csv", "1,2\n3,4\n5,6\n7,8\n9,0\n")
    write("fractions.csv", "1,2.5\n3,4.5\n")
    npy("a.npy", [1, 2, 3, 4, 5])
    os.mkfifo("pipe")
    os.mkfifo("pipe.h5")
    os.symlink("loop", "loop")
    os.symlink("a.csv", "link.h5")
    os.mkdir("folder")
    os.mkdir("pipes")
    os.mkfifo("pipes/params.json")
    for name, text in {"good": '{"lr": 0.2}  // as in the paper', "twice": '{"lr": 0.1, "lr": 0.2}',
                       "broken": '{"lr": ', "null": '{"epochs": null}', "unknown": '{"learning": 1}'}.items():
        write(name + ".json", text)
    for command in ([muster, "convert", "csv", "a.csv", "a.h5"],
                    [linear, "--set", "epochs=2", "--name", "own", "--progress", "none"]):
        ended = Ended(command)
        if ended.code != 0:
            raise SystemExit(str(ended))
    checkpoint = "runs/own/" + max(name for name in os.listdir("runs/own") if name.startswith("checkpoint_"))
    os.makedirs("damaged/checkpoint_000000")
    write("damaged/checkpoint_000000/manifest.json", "{")
    os.symlink("../" + checkpoint, "damaged/checkpoint_000001")
    return checkpoint
