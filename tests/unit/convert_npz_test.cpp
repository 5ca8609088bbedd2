// Archives of .npy files: compared with conversions of the same .npy files, and damaged in every byte.
#include "muster/convert.hpp"
#include "support/files.hpp"

#include <sys/resource.h>
#include <zip.h>

#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>

namespace muster::convert_npz_test {
namespace {

using test::bytes, test::message, test::npy, test::values;
using Entries = std::vector<std::pair<std::string, std::string>>;  ///< names and contents
using Names = std::vector<std::string>;

std::string header(const std::string& descr, const std::string& shape, const char* fortran = "False") {
  return "{'descr': '" + descr + "', 'fortran_order': " + fortran + ", 'shape': " + shape + ", }\n";
}
std::string floats(std::size_t rows, float first) {
  std::string content;
  for (std::size_t i = 0; i < rows; ++i) content += bytes(first + static_cast<float>(i), false);
  return npy(header("<f4", "(" + std::to_string(rows) + ",)"), content);
}
std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
/// The archive with these bytes replaced in both headers of its first entry, `local` and `central` bytes after their
/// marks.
std::string patched(std::string archive, std::size_t local, std::size_t central, std::string_view replacement) {
  archive.replace(archive.find("PK\x03\x04") + local, replacement.size(), replacement);
  archive.replace(archive.find("PK\x01\x02") + central, replacement.size(), replacement);
  return archive;
}

class Npz : public test::FolderTest {
 protected:
  std::filesystem::path archive(const Entries& entries, int method = ZIP_CM_DEFLATE) const {
    const auto path = folder / "in.npz";
    std::filesystem::remove(path);
    int error = 0;
    auto* const file = zip_open(path.c_str(), ZIP_CREATE, &error);
    if (file == nullptr) throw std::runtime_error("zip_open failed");
    for (const auto& [name, content] : entries) {
      auto* const source = zip_source_buffer(file, content.data(), content.size(), 0);
      const auto index = zip_file_add(file, name.c_str(), source, 0);
      EXPECT_GE(index, 0) << name;
      if (!name.ends_with('/')) {
        EXPECT_EQ(zip_set_file_compression(file, static_cast<zip_uint64_t>(index), method, 0), 0);
      }
    }
    EXPECT_EQ(zip_close(file), 0);
    return path;
  }
  std::filesystem::path convert(const Entries& entries, const ConvertOptions& options = {}) const {
    convert_npz({archive(entries)}, folder / "out.h5", options);
    return folder / "out.h5";
  }
  /// The text of the Error with which these bytes, or entries, are refused. Nothing is left behind.
  std::string refusal(const std::string& content, const ConvertOptions& options = {}) const {
    const auto path = write("in.npz", content);
    const auto text = message(ExitCode::data, [&] { convert_npz({path}, folder / "out.h5", options); });
    EXPECT_EQ(names(), Names{"in.npz"});
    return text;
  }
  std::string refusal(const Entries& entries, const ConvertOptions& options = {}) const {
    return refusal(content_of(archive(entries)), options);
  }
  static Names columns(const std::filesystem::path& path) {
    Names found;
    const auto description = describe_dataset(path.string());
    for (const auto& column : description.at("columns")) found.push_back(column.at("name"));
    return found;
  }
};

TEST_F(Npz, GivesTheBytesThatItsNpyFilesGive) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    const auto rows = 1 + random() % 300, width = 1 + random() % 7;
    Entries entries;
    std::vector<std::filesystem::path> files;
    ConvertOptions options;
    for (const std::string descr : {">i2", "<f8", "|b1"}) {
      const auto size = static_cast<std::size_t>(descr[2] - '0');
      std::string content;
      for (std::size_t i = 0; i < rows * width * size; ++i) content.push_back(static_cast<char>(random() % 2));
      const auto shape = "(" + std::to_string(rows) + ", " + std::to_string(width) + ")";
      const auto file = npy(header(descr, shape), content, 1 + static_cast<int>(random() % 3));
      const auto name = "a" + std::to_string(entries.size());
      entries.emplace_back(name + ".npy", file);
      files.push_back(write(name, file));
      options.columns.push_back(name);
    }
    if (random() % 2 != 0) options.chunk = 1 + random() % rows;
    if (random() % 2 != 0) options.compress = 3;
    if (random() % 2 != 0) options.shuffle = random();
    convert_npz({archive(entries, random() % 2 != 0 ? ZIP_CM_DEFLATE : ZIP_CM_STORE)}, folder / "out.h5", options);
    const auto found = content_of(folder / "out.h5");
    convert_npy(files, folder / "out.h5", options);
    EXPECT_EQ(found, content_of(folder / "out.h5")) << "round " << round;
  }
}

TEST_F(Npz, TakesAllArraysOfSamplesOrThoseNamed) {
  const Entries entries{{"y.npy", floats(3, 0)},
                        {"x.npy", floats(3, 10)},
                        {"notes.txt", "not an array"},
                        {"folder/", ""},
                        {"scale.npy", npy(header("<U3", "()"), std::string(12, 'a'))}};
  const auto output = convert(entries);
  EXPECT_EQ(columns(output), (Names{"x", "y"}));
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{10, 11, 12}));
  EXPECT_EQ(values<float>(output, "y"), (std::vector<float>{0, 1, 2}));
  EXPECT_EQ(columns(convert(entries, {.columns = {"x"}})), Names{"x"});
  // The last array in the archive holds the classes of --per-class, and the progress ends at all bytes.
  std::uint64_t last = 0;
  const std::string classes = npy(header("|u1", "(4,)"), std::string("\1\1\2\1", 4));
  convert({{"x.npy", floats(4, 0)}, {"a.npy", classes}},
          {.per_class = 1, .progress = [&](std::uint64_t done, std::uint64_t) { last = done; }});
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{0, 2}));
  EXPECT_EQ(last, 2 * (4 + 1));
}

TEST_F(Npz, RefusesArraysThatAreNoColumns) {
  const auto refused = [&](const std::string& file) { return refusal(Entries{{"x.npy", file}}); };
  EXPECT_NE(refused(npy(header("|O", "(2,)"), "pickled")).find("in.npz:x: it holds Python objects"), std::string::npos);
  EXPECT_NE(refused(npy(header("<U2", "(1,)"), std::string(8, 'a'))).find("values of type '<U2'"), std::string::npos);
  EXPECT_NE(refused(npy(header("<f4", "(1, 2)", "True"), std::string(8, 'a'))).find("Fortran order"),
            std::string::npos);
  EXPECT_NE(refused(npy(header("<f4", "(3,)"), std::string(8, 'a'))).find("8 follow: it is truncated"),
            std::string::npos);
  EXPECT_NE(refused(npy(header("<f4", "()"), std::string(4, 'a'))).find("it holds single values only"),
            std::string::npos);
  EXPECT_NE(refused("not an array").find("not a .npy file"), std::string::npos);
  EXPECT_NE(refused("").find("truncated"), std::string::npos);
}

TEST_F(Npz, RefusesNamesThatSayTooLittle) {
  const Entries entries{{"x.npy", floats(2, 0)}, {"deep/y.npy", floats(2, 0)}, {"long.npy", floats(3, 0)}};
  EXPECT_NE(refusal(entries).find("in.npz:deep/y: its name has a slash"), std::string::npos);
  const auto unknown = refusal(entries, {.columns = {"x", "z"}});
  EXPECT_NE(unknown.find("there is no array \"z\" in it. Its arrays are x, deep/y, long"), std::string::npos)
      << unknown;
  const auto uneven = refusal(entries, {.columns = {"x", "long"}});
  EXPECT_NE(uneven.find("in.npz:x has 2 samples"), std::string::npos);
  EXPECT_NE(uneven.find("choose columns of one length with --columns"), std::string::npos);
  // libzip itself adds no second entry of a name.
  auto twice = content_of(archive({{"x.npy", floats(2, 0)}, {"y.npy", floats(2, 0)}}));
  for (std::size_t at = 0; (at = twice.find("y.npy", at)) != std::string::npos;) twice[at] = 'x';
  EXPECT_NE(refusal(twice).find("there are several arrays \"x\""), std::string::npos);
  EXPECT_NE(refusal(Entries{{"x.txt", "text"}}).find("there is no array in it"), std::string::npos);
  const auto usage = message(ExitCode::usage, [&] { convert_npz({"a.npz", "b.npz"}, folder / "out.h5"); });
  EXPECT_NE(usage.find("2 inputs are given, and one .npz archive is read"), std::string::npos);
}

TEST_F(Npz, RefusesWhatItCannotUnpack) {
  const auto whole = content_of(archive({{"x.npy", floats(100, 0)}}));
  EXPECT_NE(refusal("").find("not a whole .npz archive"), std::string::npos);
  EXPECT_NE(refusal(floats(3, 0)).find("not a whole .npz archive"), std::string::npos);
  EXPECT_NE(refusal(patched(whole, 6, 8, std::string_view("\1\0", 2))).find("it is encrypted"), std::string::npos);
  EXPECT_NE(refusal(patched(whole, 8, 10, std::string_view("\14\0", 2))).find("by method 12 of zip"),
            std::string::npos);
  const auto large = refusal(patched(whole, 22, 24, "\xff\xff\xff\x0f"));
  EXPECT_NE(large.find("it announces 268435455 bytes, more than can be packed in it"), std::string::npos) << large;
  EXPECT_NE(refusal(patched(whole, 14, 16, "abcd")).find("it is damaged or truncated (CRC error)"), std::string::npos);
  EXPECT_NE(
      message(ExitCode::data, [&] { convert_npz({folder / "none.npz"}, folder / "out.h5"); }).find("No such file"),
      std::string::npos);
  EXPECT_NE(message(ExitCode::data, [&] { convert_npz({folder / "."}, folder / "out.h5"); }).find("Is a directory"),
            std::string::npos);
}

TEST_F(Npz, NeverGivesOtherValuesOfADamagedArchive) {
  for (const int method : {ZIP_CM_STORE, ZIP_CM_DEFLATE}) {
    const auto whole = content_of(archive({{"x.npy", floats(20, 0)}}, method));
    const auto expected = values<float>(convert({{"x.npy", floats(20, 0)}}), "x");
    std::filesystem::remove(folder / "out.h5");
    for (std::size_t length = 0; length < whole.size(); length += 3) refusal(whole.substr(0, length));
    int refused = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      auto damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << i % 8));
      const auto path = write("in.npz", damaged);
      try {
        convert_npz({path}, folder / "out.h5");
        EXPECT_EQ(values<float>(folder / "out.h5", columns(folder / "out.h5").front()), expected) << "byte " << i;
        std::filesystem::remove(folder / "out.h5");
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::data) << error.what();
        EXPECT_EQ(names(), Names{"in.npz"});
        ++refused;
      }
    }
    EXPECT_GT(refused, 100);
  }
}

TEST_F(Npz, NeedsLittleMemory) {
  constexpr std::size_t samples = 300'000;  // of 1 KB
  const auto path = archive(
      {{"x.npy", npy(header("|u1", "(" + std::to_string(samples) + ", 1024)"), std::string(samples << 10, 'a'))}});
  const auto copy = [&] {
    std::ifstream status("/proc/self/status");
    std::uint64_t kilobytes = 0;
    for (std::string word; status >> word;)
      if (word == "VmSize:") status >> kilobytes;
    const rlimit limit{(kilobytes << 10) + (100 << 20), RLIM_INFINITY};
    ::setrlimit(RLIMIT_AS, &limit);
    convert_npz({path}, folder / "out.h5");
    std::_Exit(0);  // the folders of other tests stay
  };
  EXPECT_EXIT(copy(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace muster::convert_npz_test
