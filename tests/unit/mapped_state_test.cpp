// A checkpoint's file that is mapped into memory, with each size of memory pages.
#include "checkpoint/files/manifest.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "muster/error.hpp"
#include "support/folder.hpp"
#include "support/large_pages.hpp"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>

namespace muster::detail::checkpoint::mapped_state_test {
namespace {

class MappedPages : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Kib, MappedPages, testing::Values(4, 16, 64), testing::PrintToStringParamName());

/// A file of one tensor, which does not begin with a page unless a page has 4 KiB.
Manifest one_tensor(const std::filesystem::path& folder) {
  constexpr std::int64_t elements = 50'000;
  constexpr std::uint64_t begin = 4096, bytes = begin + 4 * 50'000;
  std::ofstream(folder / "state.h5") << std::string(begin, ' ') << std::string(bytes - begin, '\1');
  Manifest manifest;
  manifest.files.push_back({.name = "state.h5", .bytes = bytes, .piece_bytes = 64 << 10});
  TensorEntry entry{};
  entry.name = "weight";
  entry.type = at::kInt;
  entry.shape = {elements};
  entry.offset = begin;
  entry.bytes = bytes - begin;
  manifest.tensors.push_back(entry);
  return manifest;
}

TEST_P(MappedPages, HoldTheTensors) {
  const test::PageSize size(static_cast<std::size_t>(GetParam()) << 10);
  const test::Folder folder;
  const auto manifest = one_tensor(folder);
  const auto state = MappedState::open(folder, manifest.files.at(0));
  ASSERT_TRUE(state);
  const auto weight = state->tensors(manifest).at("weight");
  EXPECT_EQ(weight.const_data_ptr<int>()[0], 0x01010101);
  EXPECT_EQ(weight.const_data_ptr<int>()[weight.numel() - 1], 0x01010101);
}

TEST_P(MappedPages, ThatCannotBeReadAreAnErrorAndNoSignal) {
  const test::PageSize size(static_cast<std::size_t>(GetParam()) << 10);
  const test::Folder folder;
  const auto manifest = one_tensor(folder);
  const auto state = MappedState::open(folder, manifest.files.at(0));
  ASSERT_TRUE(state);
  std::filesystem::resize_file(folder / "state.h5", 64 << 10);
  try {
    state->tensors(manifest);
    FAIL() << "the end of the file is gone";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::retry);
    EXPECT_NE(std::string(error.what()).find("reading " + folder.file("state.h5")), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace muster::detail::checkpoint::mapped_state_test
