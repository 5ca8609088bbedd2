// Virtual datasets, whose values lie in other datasets.
#include "muster/convert.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/hdf5_fixture.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace muster::virtual_test {
namespace {

using detail::hdf5::check;
using detail::hdf5::Handle;
using test::Folder;
using test::H5File;

struct Source {
  std::string file, dataset;
  hsize_t rows;
  hsize_t first = 0;  ///< 0: all rows of the source are meant
};

/// A file "all.h5" whose dataset "x" [rows, 3] shows the rows of the sources, one after the other.
void show(const Folder& folder, const std::vector<Source>& sources, const std::function<void(H5File&)>& more = {}) {
  const detail::hdf5::Lock lock;
  hsize_t rows = 0, first = 0;
  for (const auto& source : sources) rows += source.rows;
  const hsize_t all[] = {rows, 3};
  const Handle space(H5Screate_simple(2, all, nullptr), H5Sclose), creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  for (const auto& source : sources) {
    const hsize_t begin[] = {first, 0}, part[] = {source.rows, 3};
    const hsize_t other[] = {source.first, 0}, of_all[] = {source.first + source.rows, 3};
    const Handle of_source(H5Screate_simple(2, of_all, nullptr), H5Sclose);
    if (source.first > 0) H5Sselect_hyperslab(of_source.get(), H5S_SELECT_SET, other, nullptr, part, nullptr);
    H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, begin, nullptr, part, nullptr);
    check(H5Pset_virtual(creation.get(), space.get(), source.file.c_str(), source.dataset.c_str(), of_source.get()),
          "fixture");
    first += source.rows;
  }
  H5Sselect_all(space.get());
  H5File file(folder.file("all.h5"));
  if (more) more(file);
  file.create("x", H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, space.get(), creation.get(), nullptr);
}

std::string error_of(const Folder& folder) {
  try {
    Dataset::from_hdf5({folder.file("all.h5")}, {.columns = {"x"}}).count();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    return error.what();
  }
  return "no error";
}

TEST(VirtualData, IsThatOfItsSources) {
  const Folder folder;
  H5File(folder.file("a.h5")).columns(10);
  H5File(folder.file("b.h5")).columns(25, 10, {.chunk = 4, .deflate = 1});
  show(folder, {{"a.h5", "x", 10}, {"b.h5", "x", 25}, {".", "more", 5}}, [](H5File& file) {
    file.columns(5, 35);
    H5Lmove(file.id(), "x", file.id(), "more", H5P_DEFAULT, H5P_DEFAULT);
  });
  const auto wanted = at::arange(120, at::kFloat).view({40, 3});
  std::vector<std::int64_t> samples(40);
  std::iota(samples.begin(), samples.end(), 0);
  for (const std::int64_t cache : {0, 1 << 20}) {
    const auto data = Dataset::from_hdf5({folder.file("all.h5")}, {.columns = {"x"}, .cache_bytes = cache});
    EXPECT_TRUE(at::equal(data.read(samples)["x"], wanted));
  }
  const auto windows = Dataset::windows({folder.file("all.h5") + ":/x"}, {.size = {40, 3}});
  EXPECT_TRUE(at::equal(windows.read(std::vector<std::int64_t>{0})["x"][0], wanted));
  const auto described = describe_dataset(folder.file("all.h5"));
  EXPECT_NE(described.dump().find("\"virtual\""), std::string::npos);
  EXPECT_NE(described.dump().find("it is a virtual dataset, which HDF5 reads"), std::string::npos);
  EXPECT_EQ(described.dump().find("nothing was ever written"), std::string::npos);
}

TEST(VirtualData, WithoutItsSourcesIsAnError) {
  const Folder folder;
  std::filesystem::create_directory(folder.file("sub"));
  H5File(folder.file("a.h5")).columns(10);
  H5File(folder.file("sub/c.h5")).columns(10);
  const auto expect = [&](const Source& source, const std::string& words) {
    show(folder, {{"a.h5", "x", 5}, source});
    EXPECT_NE(error_of(folder).find(words), std::string::npos) << words << ": " << error_of(folder);
  };
  expect({"a.h5", "x", 10}, "no error");
  expect({"nowhere.h5", "x", 5},
         "all.h5:/x: it is a virtual dataset, and its source " + folder.file("nowhere.h5") + " does not exist");
  expect({"a.h5", "z", 5}, "a.h5:z does not exist");
  expect({"a.h5", "x", 11}, "it has 30 values, 33 are needed");
  expect({"a.h5", "x", 8, 2}, "no error");
  expect({"a.h5", "x", 8, 3}, "it has 10 values along dimension 0, 11 are needed");
  expect({"sub/c.h5", "x", 5}, "its source sub/c.h5 is not named as a file in its own folder");
  expect({folder.file("a.h5"), "x", 5}, "is not named as a file in its own folder");
  expect({"all.h5", "x", 5}, "lie in other files");
  expect({".", "x", 5}, "lie in other files");
}

TEST(VirtualData, BehindASymbolicLinkHasItsSourcesThereOrHere) {
  const Folder folder;
  std::filesystem::create_directory(folder.file("stored"));
  std::filesystem::create_directory(folder.file("links"));
  H5File(folder.file("a.h5")).columns(10);
  H5File(folder.file("b.h5")).columns(5, 10);
  show(folder, {{"a.h5", "x", 10}, {"b.h5", "x", 5}});
  for (const char* name : {"a.h5", "b.h5", "all.h5"})
    std::filesystem::rename(folder.file(name), folder.file(std::string("stored/") + name));
  const auto expect_all = [&] {
    const auto dataset = Dataset::from_hdf5({folder.file("links/all.h5")}, {.columns = {"x"}});
    EXPECT_TRUE(at::equal(dataset.column("x"), at::arange(45, at::kFloat).view({15, 3})));
  };
  std::filesystem::create_symlink("../stored/all.h5", folder.file("links/all.h5"));
  expect_all();
  for (const char* name : {"a.h5", "b.h5"})
    std::filesystem::rename(folder.file(std::string("stored/") + name), folder.file(std::string("links/") + name));
  expect_all();
}

TEST(VirtualData, OfAnyNumberOfFilesIsRefused) {
  const Folder folder;
  {
    const detail::hdf5::Lock lock;
    H5File file(folder.file("all.h5"));
    const hsize_t size = 5, any = H5S_UNLIMITED, begin = 0, block = 5;
    const Handle space(H5Screate_simple(1, &size, &any), H5Sclose),
        of_source(H5Screate_simple(1, &size, nullptr), H5Sclose);
    const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    check(H5Sselect_hyperslab(space.get(), H5S_SELECT_SET, &begin, &block, &any, &block), "fixture");
    check(H5Pset_virtual(creation.get(), space.get(), "part-%b.h5", "x", of_source.get()), "fixture");
    file.create("x", H5T_NATIVE_FLOAT, H5T_NATIVE_FLOAT, space.get(), creation.get(), nullptr);
  }
  EXPECT_NE(error_of(folder).find("its sources are named by a pattern, part-%b.h5:x"), std::string::npos);
}

}  // namespace
}  // namespace muster::virtual_test
