"""read_events.py MPIRUN -n PROGRAM COUNT SEED: COUNT random runs of PROGRAM (tensorboard.cpp) on 1 and 3 ranks, with the
seeds from SEED on, some of them stopped, killed or failed, and started again, and what TensorBoard's own package reads
from their files. Ends with 77 where Python has none."""

import glob
import io
import json
import math
import os
import random
import subprocess
import sys
import tempfile

try:
    from PIL import Image
    from tensorboard.backend.event_processing import event_accumulator
    from tensorboard.plugins.hparams import plugin_data_pb2
except ImportError:
    print(f"skipped: {sys.executable} has no tensorboard")
    sys.exit(77)

NAMES = ["loss/train", "lr", "größe", "a b", "deep/er/down", "x" * 300]
SAMPLES = 24
ENDS = ("stop_at", "die_at", "throw_at")


def picture(generator):
    channels, height, width = generator.choice([0, 1, 3, 4]), generator.randint(1, 9), generator.randint(1, 9)
    is_bytes = generator.random() < 0.5
    values = [generator.randint(0, 255) for _ in range(max(channels, 1) * height * width)]
    return {"name": "picture/" + generator.choice("ab"),
            "shape": ([channels] if channels else []) + [height, width],
            "bytes": is_bytes, "values": values if is_bytes else [value / 255 for value in values], "pixels": values}


def make_plan(generator, ranks):
    epochs = generator.randint(1, 6)
    count = epochs * math.ceil(SAMPLES / ranks / 4)
    steps = [[]]
    for _ in range(count):
        logged = []
        for name in generator.sample(NAMES, generator.randint(0, 3)):
            special = generator.choice([None, 0, -0.0, 1e300, -1e-300, 3])
            logged.append({"name": name, "value": special if generator.random() < 0.2 else generator.gauss(0, 1e3)})
        if generator.random() < 0.2:
            logged.append(picture(generator))
        steps.append(logged)
    plan = {"epochs": epochs, "steps": steps}
    end = generator.choice(["none", "stop_at", "die_at", "throw_at"])
    if end != "none":
        plan[end] = generator.randint(1, count)
    return plan


def single(value):
    """The value as a float of 32 bits."""
    import struct
    if value is None:
        return math.nan
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def same(one, other, tolerance=0.0):
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-30)


def run(command, plan, codes):
    with open("plan.json", "w") as file:
        json.dump(plan, file)
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode in codes, f"{command} ended with {ended.returncode}, not {codes}:\n{ended.stdout}"
    return ended.returncode


def check(folder, plan):
    events = event_accumulator.EventAccumulator(folder, {name: 0 for name in ("scalars", "images", "histograms")})
    events.Reload()
    wanted, pictures = {}, {}
    for step, logged in enumerate(plan["steps"]):
        for one in logged:
            (pictures if "shape" in one else wanted).setdefault(one["name"], []).append((step, one))
    for name, points in wanted.items():
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(step, single(one["value"])) for step, one in points]
        assert len(found) == len(expected) and all(
            a[0] == b[0] and same(a[1], b[1]) for a, b in zip(found, expected)), f"{name}: {found}, not {expected}"
    for name, points in pictures.items():
        found = events.Images(name)
        assert [event.step for event in found] == [step for step, _ in points], f"{name}: other steps"
        for event, (_, one) in zip(found, points):
            image = Image.open(io.BytesIO(event.encoded_image_string))
            *channels, height, width = one["shape"]
            channels = channels[0] if channels else 1
            assert image.size == (width, height) == (event.width, event.height), f"{name}: {image.size}"
            data = list(image.tobytes())
            planes = [one["pixels"][c * height * width:(c + 1) * height * width] for c in range(channels)]
            assert data == [value for pixel in zip(*planes) for value in pixel], f"{name}: other pixels"
    rows = [json.loads(line) for line in open(f"{folder}/result.json")]
    for name in ("loss", "seen", "run/epoch", "run/world_size"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        expected = [(row["global_step"], single(row[name.removeprefix("run/")])) for row in rows]
        assert found == expected, f"{name}: {found}, not {expected}"
    summaries = {}  # a step that was made again is the last of its lines
    for line in open(f"{folder}/artifacts/summaries"):
        line = json.loads(line)
        summaries[line.pop("step")] = line
    with_histograms = [row["global_step"] for row in rows if row["training_iteration"] % 2 == 0]
    for name in ("weights/weight", "weights/bias", "gradients/weight", "gradients/bias"):
        wanted = [step for step in with_histograms if summaries[step][name] is not None]
        found = events.Histograms(name) if wanted else []
        assert [event.step for event in found] == wanted, f"{name}: {[event.step for event in found]}, not {wanted}"
        for event in found:
            value, numbers = event.histogram_value, summaries[event.step][name]
            for a, b in zip((value.min, value.max, value.num, value.sum, value.sum_squares), numbers):
                assert same(a, b, 1e-5), f"{name}: {value}, not {numbers}"
            assert sum(value.bucket) == value.num and value.bucket_limit == sorted(value.bucket_limit)
            assert value.bucket_limit[-1] > value.max
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["optimizer.lr"].number_value == 0.1 and settings["optimizer.nesterov"].bool_value is False
    assert settings["layers"].string_value == "[3,4]" and settings["plan"].string_value == "plan.json"
    content = events.SummaryMetadata("_hparams_/session_end_info").plugin_data.content
    assert plugin_data_pb2.HParamsPluginData.FromString(content).session_end_info.status == 1, "not a success"


def main():
    mpirun, flag, program = sys.argv[1:4]
    count, seed = int(sys.argv[4]), int(sys.argv[5])
    for number in range(seed, seed + count):
        generator = random.Random(number)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            ranks = generator.choice([1, 3])
            plan = make_plan(generator, ranks)
            command = [mpirun, flag, str(ranks), program, "--name", "run", "--set", "plan=plan.json", "--progress", "none"]
            # By the environment, too.
            if generator.random() < 0.5:
                command.append("--tensorboard")
            else:
                os.environ["MUSTER_TENSORBOARD"] = "1"
            try:
                codes = set(range(1, 256)) if "die_at" in plan else {1} if "throw_at" in plan else {0}
                run(command, plan, {0, 85} if "stop_at" in plan else codes)
                if any(end in plan for end in ENDS):
                    plan = {name: value for name, value in plan.items() if name not in ENDS}
                    run(command, plan, {0})
                    assert len(glob.glob("runs/run/events.out.tfevents.*")) >= 1
                check("runs/run", plan)
            except AssertionError as error:
                print(f"seed {number}, {ranks} ranks: {error}")
                return 1
            finally:
                os.environ.pop("MUSTER_TENSORBOARD", None)
                os.chdir("/")
    print(f"{count} runs from seed {seed} on: TensorBoard reads what they have logged")
    return 0


sys.exit(main())
