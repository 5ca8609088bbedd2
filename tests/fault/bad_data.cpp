// Files of data that cannot be (bad_data make FOLDER), and a training that is to use one (bad_data --train FILE).
#include "muster/launch.hpp"
#include "muster/trainer.hpp"
#include "support/hdf5_fixture.hpp"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <fstream>
#include <string>

namespace {

void make(const std::filesystem::path& folder) {
  using muster::test::H5File;
  const auto values = muster::test::counting<float>(24);
  const auto in = [&](const char* name) { return (folder / name).string(); };
  const auto dataset = [&](H5File& file, const char* name, std::vector<hsize_t> shape) {
    file.dataset(name, shape, H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, values.data());
  };
  std::ofstream(in("text.h5")) << "a,b\n1,2\n";
  std::ofstream(in("empty.h5"));
  H5File nothing(in("no_dataset.h5"));
  H5File good(in("good.h5")), ragged(in("ragged.h5")), strings(in("strings.h5")), flat(in("flat.h5")),
      doubles(in("doubles.h5")), cut(in("cut.h5"));
  for (auto* file : {&good, &ragged, &cut}) dataset(*file, "x", {6, 2});
  for (auto* file : {&good, &strings, &flat, &doubles, &cut}) dataset(*file, "y", {6});
  dataset(ragged, "y", {5});
  dataset(flat, "x", {6});
  const auto wide = muster::test::counting<double>(12);
  doubles.dataset("x", {6, 2}, H5T_NATIVE_DOUBLE, H5T_NATIVE_DOUBLE, wide.data());
  const muster::detail::hdf5::Handle text(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(text.get(), H5T_VARIABLE);
  strings.dataset("x", {6}, text.get(), 0, nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && argv[1] == std::string("make")) {
    make(argv[2]);
    std::filesystem::resize_file(std::filesystem::path(argv[2]) / "cut.h5", 2100);
    return 0;
  }
  muster::Launch launch(argc, argv);
  std::vector<std::string> files, columns;
  launch.app().add_option("--train", files);
  launch.app().add_option("--columns", columns);
  return launch.run([&] {
    const auto train = [](muster::Session& session, const muster::Config&) {
      for (auto& batch : session.get_dataset_shard().iter_torch_batches({.batch_size = 2})) batch["x"];
    };
    return muster::TorchTrainer(launch, train,
                                {.datasets = {{"train", muster::Dataset::from_hdf5(files, {.columns = columns})}}})
        .fit();
  });
}
