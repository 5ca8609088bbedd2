// state.h5: who writes what of it, what lies where, and that it comes back from whatever takes it.
#include "base/direct.hpp"
#include "checkpoint/files/checked_files.hpp"
#include "checkpoint/files/state_reader.hpp"
#include "checkpoint/files/state_writer.hpp"
#include "checkpoint/files/write_plan.hpp"
#include "hdf5/file.hpp"
#include "muster/error.hpp"
#include "state/replica_fingerprint.hpp"
#include "storage/folder_tier.hpp"
#include "support/folder.hpp"

#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <zlib.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace muster::detail::checkpoint::state_file_test {
namespace {

namespace fs = std::filesystem;
using test::Folder;

constexpr std::uint64_t megabyte = 1'000'000;

std::vector<int> nodes_of(int ranks, int ranks_of_a_node) {
  std::vector<int> nodes(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) nodes[static_cast<std::size_t>(rank)] = rank / ranks_of_a_node;
  return nodes;
}

std::vector<int> owned_by_none(std::uint64_t bytes) {
  return std::vector<int>(piece_count(bytes, piece_bytes_for(bytes)), -1);
}

TEST(WritePlan, IsEvenAtAnyNumberOfRanks) {
  std::printf("    ranks  nodes     bytes  writers  on nodes  most bytes of one  opened  synced\n");
  for (const auto& [ranks, bytes] :
       {std::pair(1, 420 * megabyte), std::pair(2, 420 * megabyte), std::pair(10, 420 * megabyte),
        std::pair(100, 420 * megabyte), std::pair(1000, 420 * megabyte), std::pair(10'000, 420 * megabyte),
        std::pair(1000, 64'000 * megabyte), std::pair(10'000, 64'000 * megabyte)}) {
    const auto nodes = nodes_of(ranks, 64);
    const auto plan = plan_writers(bytes, owned_by_none(bytes), nodes);
    std::map<int, std::uint64_t> bytes_of;
    std::map<int, std::set<int>> on_node;
    for (std::size_t piece = 0; piece < plan.size(); ++piece) {
      ASSERT_GE(plan[piece], 0);
      ASSERT_LT(plan[piece], ranks);
      const auto range = piece_range(bytes, piece_bytes_for(bytes), piece);
      bytes_of[plan[piece]] += range.end - range.begin;
      on_node[nodes[static_cast<std::size_t>(plan[piece])]].insert(plan[piece]);
      EXPECT_GE(plan[piece], piece > 0 ? plan[piece - 1] : 0) << "each writes one stretch";
    }
    std::uint64_t least = bytes, most = 0;
    for (const auto& [writer, its] : bytes_of) {
      least = std::min(least, its);
      most = std::max(most, its);
    }
    EXPECT_LE(most - least, 2 * piece_bytes_for(bytes));
    for (const auto& [node, writers] : on_node) EXPECT_LE(writers.size(), 4u);
    const auto writers = bytes_of.size();
    EXPECT_TRUE(bytes_of.contains(0));
    EXPECT_TRUE(ranks > 4 || writers == static_cast<std::size_t>(ranks));
    // Each writer opens the file and syncs it; then come the manifest and two folders.
    std::printf("%9d %6zu %6llu MB %8zu %9zu %15llu MB %7zu %7zu\n", ranks, static_cast<std::size_t>(nodes.back()) + 1,
                static_cast<unsigned long long>(bytes / megabyte), writers, on_node.size(),
                static_cast<unsigned long long>((most + megabyte / 2) / megabyte), writers, writers + 3);
  }
}

TEST(WritePlan, SmallFilesHaveOneWriter) {
  for (const std::uint64_t bytes : {4096ull, 40'960ull, 8ull << 20})
    for (const int ranks : {1, 2, 1000})
      for (const int writer : plan_writers(bytes, owned_by_none(bytes), nodes_of(ranks, 3))) EXPECT_EQ(writer, 0);
  EXPECT_TRUE(plan_writers(0, {}, {0, 0}).empty());
}

TEST(WritePlan, WhatIsARanksOwnIsWrittenOnItsNode) {
  const std::uint64_t bytes = 64'000 * megabyte;
  for (const int of_a_node : {1, 3, 64}) {
    const int ranks = 200;
    const auto nodes = nodes_of(ranks, of_a_node);
    auto owners = owned_by_none(bytes);
    for (std::size_t piece = 100; piece < owners.size(); ++piece)
      owners[piece] = static_cast<int>((piece - 100) * ranks / (owners.size() - 100));
    const auto plan = plan_writers(bytes, owners, nodes);
    std::set<int> writers(plan.begin(), plan.end());
    for (std::size_t piece = 100; piece < owners.size(); ++piece) {
      EXPECT_EQ(nodes[static_cast<std::size_t>(plan[piece])], nodes[static_cast<std::size_t>(owners[piece])]);
      EXPECT_TRUE(plan[piece] == owners[piece] || !writers.contains(owners[piece]));
    }
  }
  // If there are fewer writers than nodes, they write the other ranks' tensors.
  const auto few = plan_writers(20 * megabyte, std::vector<int>(77, 9), nodes_of(10, 1));
  EXPECT_LE(std::set<int>(few.begin(), few.end()).size(), 2u);
}

/// Tensors that begin and end at, before and after every boundary.
Tensors at_borders() {
  Tensors tensors;
  for (const std::int64_t border : {4096, 65'536, 131'072, 524'288, 1 << 20})
    for (const std::int64_t by : {-1, 0, 1})
      tensors["t/" + std::to_string(border + by)] = at::arange(border + by, at::kInt).to(at::kByte);
  for (const std::int64_t size : {0, 1, 2, 3, 5, 100, 1000})
    tensors["s/" + std::to_string(size)] = at::arange(size, at::kDouble);
  tensors["scalar"] = at::full({}, 3, at::kLong);
  return tensors;
}

/// At least as large as what is written directly.
Tensors large() {
  auto tensors = at_borders();
  tensors["large"] = at::arange(2'500'001, at::kDouble);
  tensors["turned"] = at::arange(400'000, at::kFloat).reshape({400, 1000}).t();
  return tensors;
}

/// Writes it in that many parts, as that many ranks would; returns the manifest.
Manifest write(const fs::path& folder, const Tensors& tensors, int parts) {
  fs::create_directories(folder);
  const auto path = folder / state_name;
  const auto layout = unpack_layout(pack(make_layout(tensors)));
  storage::create_file(path, layout.bytes);
  const OpenFile open = [&](storage::Alignment alignment) { return storage::open_file(path, alignment); };
  const auto writers = plan_writers(layout.bytes, piece_owners(layout, 1), nodes_of(parts, parts),
                                    {.max_writers_per_node = parts, .min_share_bytes = 1});
  FileEntry entry{.name = state_name, .bytes = layout.bytes, .piece_bytes = piece_bytes_for(layout.bytes)};
  StateWriter writer;  // one for all: what it holds is used again
  for (int part = 0; part < parts; ++part)
    for (const auto checksum : writer.write(open, layout, tensors, pieces_of(writers, part)))
      entry.piece_checksums.push_back(checksum);
  return {.tensors = layout.tensors, .files = {entry}};
}

/// By its mapping, verified.
Tensors map(const fs::path& folder, const Manifest& manifest) {
  const auto state = MappedState::open(folder, manifest.state_file());
  if (!state) return read_tensors(folder, manifest);
  verify(folder, manifest, {}, {}, state.get());
  return state->tensors(manifest);
}

void expect_same(const Tensors& back, const Tensors& tensors) {
  ASSERT_EQ(back.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) EXPECT_TRUE(at::equal(back.at(name), tensor)) << name;
}

TEST(StateFile, ComesBackFromWhereverItLies) {
  const Folder on_disk;
  const auto in_memory = fs::path("/dev/shm") / on_disk.path().filename();
  for (const auto& tensors : {at_borders(), large()}) {
    for (const auto& folder : {on_disk.path() / "state", in_memory})
      for (const int parts : {1, 3}) {
        const auto manifest = write(folder, tensors, parts);
        EXPECT_EQ(manifest.state_file().bytes % 4096, 0u);
        EXPECT_EQ(fs::file_size(folder / state_name), manifest.state_file().bytes);
        verify(folder, manifest);
        expect_same(read_tensors(folder, manifest), tensors);
        expect_same(map(folder, manifest), tensors);
        fs::remove_all(folder);
      }
  }
}

TEST(StateFile, ViewsOfOtherNumbersInTheSameMemoryAreTensorsOfTheirOwn) {
  const Folder folder;
  const auto numbers = at::complex(at::arange(9, at::kFloat), at::arange(1, 10, at::kFloat));
  const Tensors tensors{{"a", numbers},
                        {"conjugate", numbers.conj()},
                        {"imaginary", at::imag(numbers)},
                        {"negative", at::imag(numbers.conj())}};
  expect_same(read_tensors(folder.path(), write(folder.path(), tensors, 1)), tensors);
}

TEST(StateFile, Hdf5ReadsIt) {
  const Folder folder;
  const auto tensors = at_borders();
  write(folder.path(), tensors, 2);
  const hdf5::Lock lock;
  const auto file = hdf5::open_file(folder / state_name);
  for (const auto& [name, tensor] : tensors) {
    const auto dataset = hdf5::open_dataset(file.get(), name, name);
    auto back = at::empty_like(tensor);
    const hid_t type = H5Dget_type(dataset.get());
    EXPECT_GE(H5Dread(dataset.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, back.mutable_data_ptr()), 0) << name;
    H5Tclose(type);
    EXPECT_TRUE(at::equal(back, tensor)) << name;
  }
}

TEST(StateFile, OnlyWhatIsWantedIsRead) {
  const Folder folder;
  auto tensors = large();
  tensors["tied"] = tensors["large"];
  const auto manifest = write(folder.path(), tensors, 1);
  const auto some = read_tensors(folder.path(), manifest, [](const auto& name) { return name == "tied"; });
  ASSERT_EQ(some.size(), 1u);
  EXPECT_TRUE(at::equal(some.at("tied"), tensors.at("large")));
  // Damage elsewhere is not noticed.
  const auto& small = *std::ranges::find(manifest.tensors, std::string_view("turned"), &TensorEntry::name);
  File file(folder / state_name, File::Mode::write);
  const std::byte other[] = {std::byte{7}};
  file.write_at(other, small.offset + small.bytes / 2);
  EXPECT_NO_THROW(read_tensors(folder.path(), manifest, [](const auto& name) { return name == "tied"; }));
  EXPECT_THROW(read_tensors(folder.path(), manifest), Error);
  EXPECT_THROW(verify(folder.path(), manifest), Error);
  EXPECT_THROW(map(folder.path(), manifest), Error);
}

TEST(StateFile, WhatIsWrittenToATensorStaysHere) {
  const Folder folder;
  const auto tensors = large();
  const auto manifest = write(folder.path(), tensors, 1);
  auto mapped = map(folder.path(), manifest);
  mapped.at("large").zero_();
  verify(folder.path(), manifest);
  expect_same(map(folder.path(), manifest), tensors);
}

TEST(StateFile, PiecesWithATensorAreThoseThatHoldAByteOfIt) {
  Tensors tensors{{"a", at::full({50'000}, 1.0)}, {"b", at::full({50'000}, 2.0)}};
  tensors["c"] = tensors["b"];
  const auto layout = make_layout(tensors);
  for (const char* name : {"a", "b", "c"}) {
    const auto& place = layout.tensors[*name == 'a' ? 0 : 1];
    const auto pieces =
        pieces_of_tensors(layout.tensors, layout.bytes, [&](const auto& other) { return other == name; });
    for (std::uint64_t piece = 0; piece < piece_count(layout.bytes, 65'536); ++piece) {
      const auto range = piece_range(layout.bytes, 65'536, piece);
      const bool holds = range.begin < place.offset + place.bytes && place.offset < range.end;
      EXPECT_EQ(std::ranges::count(pieces, piece), holds) << name << " " << piece;
    }
  }
}

TEST(StateFile, AFullDiskIsAnErrorBeforeAnythingIsWritten) {
  const Folder folder;
  if (::unshare(CLONE_NEWNS) != 0 || ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=8m") != 0)
    GTEST_SKIP() << "needs the right to mount";
  const auto error_of = [&](const Tensors& tensors) {
    try {
      write(folder / "state", tensors, 2);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::retry);
      fs::remove_all(folder / "state");
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(error_of(large()).find("taking space for"), std::string::npos) << error_of(large());
  const auto small = error_of({{"t", at::full({3'000'000}, 1.0)}});
  EXPECT_NE(small.find("writing " + (folder / "state/state.h5").string()), std::string::npos) << small;
  EXPECT_NE(small.find("Make room"), std::string::npos) << small;
  EXPECT_EQ(error_of({{"t", at::full({100'000}, 1.0)}}), "no error");
  ::umount(folder.path().c_str());
}

TEST(File, WritesThatCannotGoDirectlyGoAllTheSame) {
  const Folder folder;
  File file(folder / "file", File::Mode::create);
  write_directly(file);
  std::vector<std::byte> bytes(10'000, std::byte{5});
  file.write_at(std::span(bytes).subspan(1, 5001), 3);
  std::vector<std::byte> back(5001);
  file.read_at(back, 3);
  EXPECT_TRUE(std::ranges::equal(back, std::span(bytes).first(5001)));
  file.sync();
}

TEST(Crc32, IsZlibs) {
  std::vector<unsigned char> bytes(100'000);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(1));
  for (const std::size_t begin : {0, 1, 7, 64})
    for (std::size_t size = 0; begin + size <= bytes.size(); size += size < 600 ? 1 : 12'345) {
      const auto* const from = bytes.data() + begin;
      const auto expected = static_cast<std::uint32_t>(::crc32_z(77, from, size));
      EXPECT_EQ(crc32(std::as_bytes(std::span(from, size)), 77), expected) << size;
    }
}

TEST(Layout, FitsWhatWouldBeLaidOutSo) {
  const auto shared = at::arange(6, at::kFloat);
  const Tensors tensors{{"a", shared}, {"b", shared}, {"c", at::empty({0})}, {"d", at::arange(4)}};
  const auto with = [&](const std::string& name, const at::Tensor& tensor) {
    auto changed = tensors;
    changed[name] = tensor;
    return changed;
  };
  const auto layout = make_layout(tensors, {"d"}, 2);
  EXPECT_TRUE(layout_fits(layout, tensors, {"d"}, 2));
  EXPECT_TRUE(layout_fits(layout, with("d", at::full({4}, 7, at::kLong)), {"d"}, 2)) << "other numbers";
  EXPECT_FALSE(layout_fits({}, tensors, {"d"}, 2));
  EXPECT_FALSE(layout_fits(layout, tensors, {}, 2));
  EXPECT_FALSE(layout_fits(layout, tensors, {"d"}, 3));
  EXPECT_FALSE(layout_fits(layout, with("b", shared.clone()), {"d"}, 2)) << "no longer one memory";
  EXPECT_FALSE(layout_fits(layout, with("b", shared.view({2, 3})), {"d"}, 2));
  EXPECT_FALSE(layout_fits(layout, with("d", at::arange(4, at::kInt)), {"d"}, 2));
  EXPECT_FALSE(layout_fits(layout, with("e", at::arange(4)), {"d"}, 2));
  auto fewer = tensors;
  fewer.erase("c");
  EXPECT_FALSE(layout_fits(layout, fewer, {"d"}, 2));
}

TEST(ReplicaFingerprint, IsThatOfAllNumbersHoweverItIsFound) {
  const auto large = at::arange(200'001, at::kDouble);
  const std::vector<at::Tensor> tensors{large, at::empty({0}), at::arange(6).reshape({2, 3}).t()};
  const auto at_once = state::ReplicaFingerprint(tensors).value();
  for (int parts = 1; parts < 12; ++parts) {
    state::ReplicaFingerprint number(tensors);
    for (int part = 0; part < parts; ++part) number.advance();
    EXPECT_EQ(number.value(), at_once) << parts;
  }
  state::ReplicaFingerprint ended(tensors);
  while (ended.advance()) continue;
  EXPECT_FALSE(ended.advance());
  EXPECT_EQ(ended.value(), at_once);
  for (const std::int64_t place : {0, 100'000, 200'000}) {
    auto other = tensors;
    other[0] = large.clone();
    other[0][place] += 1;
    EXPECT_NE(state::ReplicaFingerprint(other).value(), at_once) << place;
  }
}

}  // namespace
}  // namespace muster::detail::checkpoint::state_file_test
