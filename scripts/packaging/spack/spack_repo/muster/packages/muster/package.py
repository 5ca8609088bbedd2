from pathlib import Path

from spack_repo.builtin.build_systems.cmake import CMakePackage

from spack.package import *


class Muster(CMakePackage):
    """A launcher that trains libtorch models on HPC clusters: data-parallel training over MPI, datasets from HDF5,
    checkpoints that resume at any number of ranks, and sweeps."""

    # The checkout in which this recipe lies.
    git = Path(__file__).resolve().parents[7].as_uri()

    license("Apache-2.0")

    version("main", branch="main")

    variant("shared", default=True, description="Build shared libraries")
    variant("apps", default=True, description="Build the muster command and the examples")
    variant("cuda", default=False, description="Train on NVIDIA GPUs, also with the backend nccl")
    variant("gloo", default=False, description="Build the backend gloo")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")

    # The lower bounds are the oldest releases that were tried.
    depends_on("mpi")
    depends_on("hdf5@1.10.8:")
    depends_on("py-torch@2.13:+distributed")
    depends_on("cli11@2.1.2:")
    depends_on("spdlog@1.10:")
    depends_on("nlohmann-json@3.11.2:")
    depends_on("isa-l@2.30:")
    depends_on("zlib-api")
    # They decode chunks of datasets.
    depends_on("libdeflate@1.14:")
    depends_on("libaec@1.0.6:")
    depends_on("liblzf@3.6:")
    depends_on("lz4@1.9.4:")
    depends_on("zstd@1.5.4:")
    depends_on("c-blosc@1.21.3:")
    # It reads NumPy's archives (.npz).
    depends_on("libzip@1.7.3:")

    # An example writes pictures with it. Spack has neither protozero nor dygraphs, so that --tensorboard and
    # `muster report` are not built.
    depends_on("libpng@1.6.39:", when="+apps")

    depends_on("py-torch+cuda+nccl", when="+cuda")
    depends_on("py-torch~cuda", when="~cuda")
    depends_on("cuda", when="+cuda")
    depends_on("nccl", when="+cuda")
    depends_on("py-torch+gloo", when="+gloo")
    depends_on("gloo", when="+gloo")

    depends_on("googletest@1.12:", type="test")
    depends_on("python@3.9:", type="test")

    conflicts("%gcc@:10", msg="muster needs C++20: GCC 11 or later")
    conflicts("%clang@:15", msg="muster needs C++20: Clang 16 or later")

    def cmake_args(self):
        return [
            self.define_from_variant("BUILD_SHARED_LIBS", "shared"),
            self.define_from_variant("MUSTER_BUILD_APPS", "apps"),
            self.define("MUSTER_BUILD_TESTS", self.run_tests),
        ]

    def check(self):
        """Runs the tests that start no ranks."""
        with working_dir(self.build_directory):
            ctest("-L", "^unit$", "--output-on-failure")
