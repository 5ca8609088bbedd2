"""The Spack recipe asks for what CMake looks for, and sets options that exist.

Spack is seldom at hand where muster is tested, so the recipe is loaded with a stand-in for Spack's modules that records
its directives. Whether Spack itself accepts the recipe is not tested here.

spack.py ROOT
"""
import importlib.util
import pathlib
import re
import sys
import types

ROOT = pathlib.Path(sys.argv[1])
REPOSITORY = ROOT / "scripts/packaging/spack/spack_repo/muster"

# Spack's packages for what MusterDependencies.cmake looks for. None: it comes with the compiler, or Spack has no package
# and muster is built without it.
PACKAGES = {
    "Threads": None,
    "ZLIB": "zlib-api",
    "MPI": "mpi",
    "HDF5": "hdf5",
    "CLI11": "cli11",
    "spdlog": "spdlog",
    "nlohmann_json": "nlohmann-json",
    "isa-l/crc.h": "isa-l",
    "isal": "isa-l",
    "libdeflate.h": "libdeflate",
    "deflate": "libdeflate",
    "szlib.h": "libaec",
    "sz": "libaec",
    "lzf.h": "liblzf",
    "lzf": "liblzf",
    "lz4.h": "lz4",
    "lz4": "lz4",
    "zstd.h": "zstd",
    "zstd": "zstd",
    "blosc.h": "c-blosc",
    "blosc": "c-blosc",
    "zip.h": "libzip",
    "zip": "libzip",
    "protozero/pbf_writer.hpp": None,
    "PNG": "libpng",
    "simdjson": None,
    "dygraph.min.js": None,
    "Torch": "py-torch",
    "crt/host_config.h": "cuda",
    "gloo/config.h": "gloo",
    "nccl.h": "nccl",
}


class Recorder:
    """Stands for Spack's directives and for the base class of a package."""

    def __init__(self):
        self.calls = []

    def module(self):
        module = types.ModuleType("spack.package")
        for name in ("license", "version", "variant", "depends_on", "conflicts"):
            setattr(module, name, lambda *values, _name=name, **options: self.calls.append((_name, values, options)))
        return module


class CMakePackage:
    run_tests = False

    def define(self, name, value):
        return f"-D{name}:BOOL={'ON' if value else 'OFF'}"

    def define_from_variant(self, name, variant):
        assert variant in variants, f"The recipe has no variant {variant}."
        return self.define(name, variants[variant])


recorder = Recorder()
cmake = types.ModuleType("spack_repo.builtin.build_systems.cmake")
cmake.CMakePackage = CMakePackage
for name in ("spack", "spack_repo", "spack_repo.builtin", "spack_repo.builtin.build_systems"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["spack.package"] = recorder.module()
sys.modules["spack_repo.builtin.build_systems.cmake"] = cmake
spec = importlib.util.spec_from_file_location("package", REPOSITORY / "packages/muster/package.py")
package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

variants = {values[0]: options["default"] for name, values, options in recorder.calls if name == "variant"}
dependencies = [(values[0], options) for name, values, options in recorder.calls if name == "depends_on"]
always = {re.match(r"[\w-]+", spec)[0] for spec, options in dependencies if "when" not in options}
sometimes = {re.match(r"[\w-]+", spec)[0] for spec, options in dependencies}
problems = []


def expect(condition, problem):
    if not condition:
        problems.append(problem)


expect(f"namespace: {REPOSITORY.name}" in (REPOSITORY / "repo.yaml").read_text(),
       "The namespace in repo.yaml differs from the name of its folder.")
expect(package.Muster.git == ROOT.resolve().as_uri(),
       f"The recipe's sources are {package.Muster.git}, not this checkout.")

# What CMake looks for.
text = (ROOT / "scripts/cmake/MusterDependencies.cmake").read_text()
text = re.sub(r"#.*", "", text)
wanted = {name: "REQUIRED" in rest for name, rest in re.findall(r"find_package\((\w+)([^)]*)\)", text)}
for name, rest in re.findall(r"find_(?:path|library)\(\w+ ([\w./-]+)([^)]*)\)", text):
    wanted[name] = "REQUIRED" in rest
for _, header in re.findall(r"muster_torch_backend\((\w+) ([\w./-]+)", text):
    wanted[header] = False
wanted["Torch"] = True
for name, required in wanted.items():
    expect(name in PACKAGES,
           f"MusterDependencies.cmake looks for {name}: add it to the recipe and to tests/style/spack.py.")
    dependency = PACKAGES.get(name)
    expect(dependency is None or dependency in (always if required else sometimes),
           f"MusterDependencies.cmake looks for {name}, and the recipe does not depend on {dependency}.")
for name in PACKAGES:
    expect(name in wanted, f"tests/style/spack.py knows {name}, which MusterDependencies.cmake does not look for.")

# The options that the recipe sets, and the releases that it asks for.
root_file = (ROOT / "CMakeLists.txt").read_text()
options = set(re.findall(r"option\((\w+)", root_file))
for argument in package.Muster().cmake_args():
    name = re.match(r"-D(\w+):", argument)[1]
    expect(name in options, f"The recipe sets {name}, which is no option in CMakeLists.txt.")
release = re.search(r"cmake_minimum_required\(VERSION ([\d.]+)\)", root_file)[1]
expect(any(spec == f"cmake@{release}:" for spec, _ in dependencies), f"The recipe does not ask for cmake@{release}:.")
release = re.search(r"torch_version=(\d+\.\d+)", (ROOT / "scripts/setup").read_text())[1]
expect(any(spec.startswith(f"py-torch@{release}:") for spec, _ in dependencies),
       f"The recipe does not ask for py-torch@{release}:, the release that scripts/setup installs.")

for problem in problems:
    print(problem)
sys.exit(1 if problems else 0)
