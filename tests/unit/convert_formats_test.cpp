// Each format, its types, and refused files.
#include "base/log.hpp"
#include "muster/convert.hpp"
#include "support/files.hpp"

#include <c10/util/complex.h>

#include <limits>
#include <stdexcept>
#include <utility>

namespace muster::convert_formats_test {
namespace {

using test::bytes, test::idx, test::message, test::npy, test::values;
using Bytes = std::vector<std::uint8_t>;
using Shape = std::vector<std::int64_t>;
const ConvertOptions only_x{.columns = {"x"}};

Json column(const std::filesystem::path& path, std::size_t index = 0) {
  return describe_dataset(path.string()).at("columns").at(index);
}

class Idx : public test::FolderTest {
 protected:
  template <class Number>
  void round_trip(int type, const std::vector<Number>& all, const char* dtype) {
    const auto output = folder / "out.h5";
    convert_idx({write("x", idx(type, {static_cast<std::uint32_t>(all.size())}, all))}, output, only_x);
    EXPECT_EQ(values<Number>(output, "x"), all);
    EXPECT_EQ(column(output).at("dtype"), dtype);
  }
  std::string refusal(const std::string& content) {
    const auto input = write("input", content);
    return message(ExitCode::data, [&] { convert_idx({input}, folder / "out.h5", only_x); });
  }
};

TEST_F(Idx, KeepsEveryType) {
  round_trip<std::uint8_t>(0x08, {0, 1, 255}, "uint8");
  round_trip<std::int8_t>(0x09, {-128, 0, 127}, "int8");
  round_trip<std::int16_t>(0x0B, {-32768, 1, 32767}, "int16");
  round_trip<std::int32_t>(0x0C, {std::numeric_limits<std::int32_t>::min(), 1, 65536}, "int32");
  round_trip<float>(0x0D, {-1.5F, 0, 3e38F}, "float32");
  round_trip<double>(0x0E, {-1.5, 1e-300, 3e300}, "float64");
}

TEST_F(Idx, KeepsTheShapeOfImagesGzippedOrNot) {
  Bytes pixels(2 * 3 * 4);
  for (std::size_t i = 0; i < pixels.size(); ++i) pixels[i] = static_cast<std::uint8_t>(i);
  const auto images = write_gz("images.gz", idx(0x08, {2, 3, 4}, pixels));
  const auto labels = write("labels", idx(0x08, {2}, Bytes{7, 9}));
  const auto output = folder / "out.h5";
  EXPECT_EQ(convert_idx({images, labels}, output), std::vector{output});
  EXPECT_EQ(column(output).at("shape"), Shape({2, 3, 4}));
  EXPECT_EQ(column(output, 1).at("shape"), Shape({2}));
  EXPECT_EQ(values<std::uint8_t>(output, "x"), pixels);
  EXPECT_EQ(values<std::uint8_t>(output, "y"), Bytes({7, 9}));
}

TEST_F(Idx, RefusesWhatIsNotWhole) {
  const auto whole = idx(0x08, {3}, Bytes{1, 2, 3});
  EXPECT_NE(refusal("").find("truncated"), std::string::npos);
  EXPECT_NE(refusal(whole.substr(0, 6)).find("truncated"), std::string::npos);
  EXPECT_NE(refusal(whole.substr(0, 10)).find("2 follow: it is truncated"), std::string::npos);
  EXPECT_NE(refusal(whole + "x").find("longer than it should be"), std::string::npos);
  EXPECT_NE(refusal("\x89PNG and so on").find("not an IDX file"), std::string::npos);
  EXPECT_NE(refusal(idx(0x0A, {1}, Bytes{1})).find("not an IDX file"), std::string::npos);
  EXPECT_NE(refusal(idx(0x08, {}, Bytes{1})).find("not samples"), std::string::npos);
  EXPECT_NE(refusal(idx(0x08, {0}, Bytes{})).find("no sample"), std::string::npos);
  EXPECT_NE(refusal(idx(0x08, {2, 0}, Bytes{})).find("samples are empty"), std::string::npos);
  EXPECT_NE(refusal(idx(0x08, std::vector<std::uint32_t>(40, 1), Bytes{1})).find("40 dimensions"), std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{"input"});
}

TEST_F(Idx, RefusesAbsurdSizesBeforeItAllocates) {
  const std::uint32_t huge = 0xFFFFFFFF;
  EXPECT_NE(refusal(idx(0x0E, {huge, huge, huge}, Bytes{})).find("absurdly large"), std::string::npos);
  EXPECT_NE(refusal(idx(0x0E, {huge, 1 << 20}, Bytes{1})).find("truncated"), std::string::npos);
  const auto packed = write_gz("packed", idx(0x0E, {huge, 1 << 20}, Bytes{1}));
  const auto shuffled = [&] { convert_idx({packed}, folder / "out.h5", {.columns = {"x"}, .shuffle = 1}); };
  EXPECT_NE(message(ExitCode::data, shuffled).find("more than can be packed"), std::string::npos);
}

TEST_F(Idx, RefusesDamagedGzip) {
  Bytes noise(5000);
  for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<std::uint8_t>(i * i >> 3);
  const auto path = write_gz("good.gz", idx(0x08, {5000}, noise));
  std::ifstream file(path, std::ios::binary);
  const std::string packed(std::istreambuf_iterator<char>(file), {});
  EXPECT_NE(refusal(packed.substr(0, packed.size() - 9)).find("truncated"), std::string::npos);
  auto flipped = packed;
  flipped[flipped.size() - 6] ^= 1;  // in the checksum
  EXPECT_NE(refusal(flipped).find("damaged"), std::string::npos);
  const auto longer = write_gz("longer.gz", idx(0x08, {3}, Bytes{1, 2, 3, 4}));
  const auto converted = [&] { convert_idx({longer}, folder / "out.h5", only_x); };
  EXPECT_NE(message(ExitCode::data, converted).find("bytes follow after the values"), std::string::npos);
  EXPECT_EQ(names(), (std::vector<std::string>{"good.gz", "input", "longer.gz"}));
}

TEST_F(Idx, RefusesMissingFilesAndFolders) {
  const auto refused = [&](const char* name) {
    return message(ExitCode::data, [&] { convert_idx({folder / name}, folder / "out.h5", only_x); });
  };
  EXPECT_NE(refused("none").find("No such file"), std::string::npos);
  EXPECT_NE(refused(".").find("it is a folder"), std::string::npos);
}

class Npy : public test::FolderTest {
 protected:
  static std::string header(const std::string& descr, const std::string& shape) {
    return "{'descr': '" + descr + "', 'fortran_order': False, 'shape': " + shape + ", }   \n";
  }
  template <class Number>
  void round_trip(const std::string& descr, const std::vector<Number>& all, const char* dtype) {
    const auto output = folder / "out.h5";
    std::string content;
    for (const auto& value : all) content += bytes(value, descr.front() == '>');
    const auto shape = "(" + std::to_string(all.size()) + ",)";
    for (const int version : {1, 2, 3}) {
      convert_npy({write("x.npy", npy(header(descr, shape), content, version))}, output, only_x);
      EXPECT_EQ(values<Number>(output, "x"), all) << descr;
      EXPECT_EQ(column(output).at("dtype"), dtype);
    }
  }
  std::string refusal(const std::string& content) {
    const auto input = write("input", content);
    return message(ExitCode::data, [&] { convert_npy({input}, folder / "out.h5", only_x); });
  }
};

TEST_F(Npy, KeepsEveryTypeInBothByteOrders) {
  for (const std::string order : {"<", ">"}) {
    round_trip<std::int16_t>(order + "i2", {-2, 258}, "int16");
    round_trip<std::int32_t>(order + "i4", {-2, 16909060}, "int32");
    round_trip<std::int64_t>(order + "i8", {-2, 72623859790382856}, "int64");
    round_trip<float>(order + "f4", {-1.25F, 3e38F}, "float32");
    round_trip<double>(order + "f8", {-1.25, 3e300}, "float64");
  }
  round_trip<std::int8_t>("|i1", {-1, 1}, "int8");
  round_trip<std::uint8_t>("|u1", {0, 255}, "uint8");
}

TEST_F(Npy, KeepsUnsignedHalfComplexAndBoolean) {
  const auto output = folder / "out.h5";
  const auto convert = [&](const std::string& descr, const std::string& content) {
    convert_npy({write("x.npy", npy(header(descr, "(2,)"), content))}, output, only_x);
    return column(output).at("dtype").get<std::string>();
  };
  for (const bool big : {false, true}) {
    const std::string order = big ? ">" : "<";
    EXPECT_EQ(convert(order + "u2", bytes<std::uint16_t>(1, big) + bytes<std::uint16_t>(65535, big)), "uint16");
    EXPECT_EQ(values<std::int32_t>(output, "x"), (std::vector<std::int32_t>{1, 65535}));
    EXPECT_EQ(convert(order + "u4", bytes<std::uint32_t>(1, big) + bytes<std::uint32_t>(4294967295, big)), "uint32");
    EXPECT_EQ(values<std::int64_t>(output, "x"), (std::vector<std::int64_t>{1, 4294967295}));
    EXPECT_EQ(convert(order + "u8", bytes<std::uint64_t>(1, big) + bytes<std::uint64_t>(1ULL << 62, big)), "uint64");
    EXPECT_EQ(values<std::int64_t>(output, "x"), (std::vector<std::int64_t>{1, std::int64_t{1} << 62}));
    EXPECT_EQ(convert(order + "f2", bytes<std::uint16_t>(0x3C00, big) + bytes<std::uint16_t>(0xC100, big)), "float16");
    EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{1, -2.5F}));
    const auto parts = bytes(1.5F, big) + bytes(-2.F, big) + bytes(3.F, big) + bytes(4.F, big);
    EXPECT_EQ(convert(order + "c8", parts), "complex64");
    EXPECT_EQ(values<c10::complex<float>>(output, "x"), (std::vector<c10::complex<float>>{{1.5F, -2}, {3, 4}}));
  }
  EXPECT_EQ(convert("<c16", bytes(1., false) + bytes(2., false) + bytes(3., false) + bytes(4., false)), "complex128");
  EXPECT_EQ(convert("|b1", std::string("\1\0", 2)), "bool");
  EXPECT_EQ(values<std::int8_t>(output, "x").size(), 2U);
}

TEST_F(Npy, ReadsWhatPython2HasWritten) {
  const auto output = folder / "out.h5";
  std::string content;
  for (int value = 0; value < 12; ++value) content += bytes(static_cast<float>(value), false);
  for (const auto& [text, shape] : {std::pair("(4L, 3L)", Shape{4, 3}), std::pair("(12L,)", Shape{12})}) {
    convert_npy({write("x.npy", npy(header("<f4", text), content))}, output, only_x);
    EXPECT_EQ(column(output).at("shape"), shape);
    EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  }
  EXPECT_NE(refusal(npy(header("<f4", "(12LL,)"), content)).find("malformed"), std::string::npos);
}

TEST_F(Npy, RefusesWithTheRemedy) {
  const std::string four(16, '\0');
  EXPECT_NE(refusal(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 2), }", four)).find("ascontiguousarray"),
            std::string::npos);
  for (const char* descr : {"<U4", "|S4", "<M8[s]", "|V8", "<f16", "f4", "<i3", "|f4", ""})
    EXPECT_NE(refusal(npy(header(descr, "(4,)"), four)).find("astype"), std::string::npos) << descr;
  EXPECT_NE(refusal(npy(header("|O", "(4,)"), four)).find("Python objects"), std::string::npos);
  EXPECT_NE(refusal(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (4,), }", four)).find("fields"),
            std::string::npos);
  EXPECT_NE(refusal("PK\3\4 an archive").find(".npz"), std::string::npos);
  EXPECT_NE(refusal(npy(header("<f4", "(4,)"), four, 4)).find("version, 4.0"), std::string::npos);
  EXPECT_NE(refusal(npy(header("<f4", "()"), four)).find("not samples"), std::string::npos);
  EXPECT_NE(refusal(npy(header("<f4", "(4,)"), four + "x")).find("longer"), std::string::npos);
  EXPECT_NE(refusal(npy(header("<f4", "(5,)"), four)).find("truncated"), std::string::npos);
  EXPECT_NE(refusal(npy(header("<f4", "(4,)"), "").substr(0, 30)).find("truncated"), std::string::npos);
  EXPECT_NE(refusal("\x93NUMPY\2" + std::string("\0\xFF\xFF\xFF\xFF", 5)).find("absurdly long"), std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{"input"});
}

TEST_F(Npy, RefusesMalformedHeaders) {
  for (const char* text : {
           "",
           "{",
           "{}",
           "{'descr': '<f4', 'fortran_order': False}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'shape': (4,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), 'more': 1}",
           "{'descr': '<f4', 'fortran_order': 0, 'shape': (4,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (4)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (-4,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': [4]}",
           "{'descr': '<f4, 'fortran_order': False, 'shape': (4,)}",
           "{'descr': '<f4', 'fortran_order': False, 'shape': (4,)} x",
       })
    EXPECT_NE(refusal(npy(text, std::string(16, '\0'))).find("malformed"), std::string::npos) << text;
}

class Csv : public test::FolderTest {
 protected:
  std::filesystem::path convert(const std::vector<std::string>& contents) {
    std::vector<std::filesystem::path> inputs;
    for (const auto& content : contents) inputs.push_back(write(std::to_string(inputs.size()) + ".csv", content));
    convert_csv(inputs, folder / "out.h5");
    return folder / "out.h5";
  }
  std::string refusal(const std::string& content) {
    const auto input = write("input.csv", content);
    return message(ExitCode::data, [&] { convert_csv({input}, folder / "out.h5"); });
  }
};

TEST_F(Csv, EveryLineEnds) {
  const auto endless = write("endless.csv", std::string(std::size_t{65} << 20, '1'));
  EXPECT_NE(message(ExitCode::data, [&] { convert_csv({endless}, folder / "out.h5"); })
                .find("it has a line of more than 64 MB"),
            std::string::npos);
}

TEST_F(Csv, TakesTheLastFieldAsTarget) {
  const auto output = convert({"\xEF\xBB\xBFsepal,petal,class\r\n1.5, -2e1 ,0\r\n\r\n\"+3\",1e-60,2"});
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{1.5F, -20, 3, 0}));
  EXPECT_EQ(values<std::int64_t>(output, "y"), (std::vector<std::int64_t>{0, 2}));
  EXPECT_EQ(column(output).at("shape"), Shape({2, 2}));
  EXPECT_EQ(column(output).at("dtype"), "float32");
  EXPECT_EQ(column(output, 1).at("dtype"), "int64");
}

TEST_F(Csv, MakesTargetsFloatWhereOneIs) {
  const auto output = convert({"1,2\n", "1,2.5\n1,3\n"});
  EXPECT_EQ(values<float>(output, "y"), (std::vector<float>{2, 2.5F, 3}));
  EXPECT_EQ(column(output, 1).at("dtype"), "float32");
  EXPECT_EQ(column(output, 1).at("shape"), Shape({3}));
}

TEST_F(Csv, KeepsLargeWholeNumbersApart) {
  // 2^24 + 1 is no float32.
  auto output = convert({"16777217,16777217\n-16777217,1e2\n3.0,5\n"});
  EXPECT_EQ(values<std::int64_t>(output, "x"), (std::vector<std::int64_t>{16777217, -16777217, 3}));
  EXPECT_EQ(values<std::int64_t>(output, "y"), (std::vector<std::int64_t>{16777217, 100, 5}));
  EXPECT_EQ(column(output).at("dtype"), "int64");
  EXPECT_EQ(column(output, 1).at("dtype"), "int64");
  output = convert({"0.1,16777217\n", "16777217,0.1\n"});
  EXPECT_EQ(values<double>(output, "x"), (std::vector<double>{0.1, 16777217}));
  EXPECT_EQ(values<double>(output, "y"), (std::vector<double>{16777217, 0.1}));
  EXPECT_EQ(column(output).at("dtype"), "float64");
  EXPECT_EQ(column(output, 1).at("dtype"), "float64");
  output = convert({"16777216,0.1\n-16777216,1e2\n"});
  EXPECT_EQ(column(output).at("dtype"), "float32");
  EXPECT_EQ(column(output, 1).at("dtype"), "float32");
  output = convert({"9007199254740993,1e2\n9007199254740992,2.0\n"});
  EXPECT_EQ(values<std::int64_t>(output, "x"), (std::vector<std::int64_t>{9007199254740993, 9007199254740992}));
  EXPECT_EQ(column(output, 1).at("dtype"), "float32") << "whole, but not written so: not classes";
  testing::internal::CaptureStderr();
  convert({"9007199254740993,1\n0.5,2\n"});
  detail::log::flush();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("rounds some of those above 2^53"), std::string::npos);
}

TEST_F(Csv, KeepsLargeWholeNumbersWithAPointOrAnExponent) {
  const auto output =
      convert({"1234567890123456789.0,9223372036854775807.00\n-9007199254740993.,1\n"
               "1.234567890123456789e18,-9223372036854775808.0\n100000000000000000000e-2,2\n1e18,3\n"});
  constexpr auto most = std::numeric_limits<std::int64_t>::max(), least = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(values<std::int64_t>(output, "x"),
            (std::vector<std::int64_t>{1234567890123456789, -9007199254740993, 1234567890123456789, 1000000000000000000,
                                       1000000000000000000}));
  EXPECT_EQ(values<std::int64_t>(output, "y"), (std::vector<std::int64_t>{most, 1, least, 2, 3}));
  for (const std::string field : {"1234567890123456789.5", "123456789012345678901e-2", "9223372036854775807.5"}) {
    testing::internal::CaptureStderr();
    convert({field + ",1\n2,3\n"});
    detail::log::flush();
    EXPECT_NE(testing::internal::GetCapturedStderr().find("rounds some of those above 2^53"), std::string::npos);
    EXPECT_EQ(values<double>(output, "x"), (std::vector<double>{std::stod(field), 2})) << field;
    const auto input = write("input.csv", field + ",1\n");
    EXPECT_NE(message(ExitCode::data,
                      [&] {
                        convert_csv({input}, output, {.types = {{"x", "int64"}}});
                      })
                  .find("is not a whole number that int64 holds"),
              std::string::npos)
        << field;
  }
}

TEST_F(Csv, MakesAColumnOfNumbersBeyondFloat32Float64) {
  const auto output = convert({"1e39,-1e300\n0.5,1\n"});
  EXPECT_EQ(values<double>(output, "x"), (std::vector<double>{1e39, 0.5}));
  EXPECT_EQ(values<double>(output, "y"), (std::vector<double>{-1e300, 1}));
}

TEST_F(Csv, StoresTheTypesThatAreAskedFor) {
  const auto input = write("input.csv", "16777217,1\n2,3\n");
  const auto output = folder / "out.h5";
  const auto types_of = [&](const std::map<std::string, std::string>& types) {
    convert_csv({input}, output, {.columns = {"a", "b"}, .types = types});
    return column(output).at("dtype").get<std::string>() + " " + column(output, 1).at("dtype").get<std::string>();
  };
  EXPECT_EQ(types_of({}), "int64 int64");
  EXPECT_EQ(types_of({{"a", "float32"}, {"b", "float64"}}), "float32 float64");
  EXPECT_EQ(values<float>(output, "a"), (std::vector<float>{16777216, 2}));
  EXPECT_EQ(values<double>(output, "b"), (std::vector<double>{1, 3}));
  EXPECT_EQ(types_of({{"b", "float32"}}), "int64 float32");
  const auto refused = [&](const std::string& content, const ConvertOptions& options, ExitCode code) {
    return message(code, [&] { convert_csv({write("input.csv", content)}, output, options); });
  };
  EXPECT_NE(refused("1,2\n", {.types = {{"z", "int64"}}}, ExitCode::usage)
                .find("there is no such column. The columns are x and y"),
            std::string::npos);
  EXPECT_NE(refused("1,2\n", {.types = {{"x", "int8"}}}, ExitCode::usage).find("float32, float64 or int64"),
            std::string::npos);
  EXPECT_NE(refused("1.5,2\n", {.types = {{"x", "int64"}}}, ExitCode::data).find("is not a whole number"),
            std::string::npos);
  EXPECT_NE(refused("1e19,2\n", {.types = {{"x", "int64"}}}, ExitCode::data).find("that int64 holds"),
            std::string::npos);
  EXPECT_NE(refused("1e99,2\n", {.types = {{"x", "float32"}}}, ExitCode::data).find("--type x=float64"),
            std::string::npos);
  convert_csv({write("input.csv", "1e99,2\n0.5,3\n")}, output, {.types = {{"x", "float64"}}});
  EXPECT_EQ(values<double>(output, "x"), (std::vector<double>{1e99, 0.5}));
}

TEST_F(Csv, TakesNumbersThatAreTooSmallForZero) {
  const std::string zeros(400, '0');
  const auto output = convert({"1e-46,1e-400,-0.5e-99999999999999999999,0." + zeros + "1,1" + zeros + "e-900,0.5\n"});
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{0, 0, 0, 0, 0}));
  for (const auto& large : std::vector<std::string>{"1e400", "-1e99999999999999999999", "1" + zeros,
                                                    "0." + zeros + "1e900", "1e-400x", "1e-"})
    EXPECT_NE(refusal(large + ",1\n").find("is not a number"), std::string::npos) << large;
}

TEST_F(Csv, UnderstandsQuotedLineBreaks) {
  const auto output = convert({"\"length\n(cm)\",\"the \"\"class\"\"\r\nof it\"\r\n1,0\r\n\"2\",1"});
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{1, 2}));
  EXPECT_NE(refusal("\"a\nb\",c\n1,2\n3,z\n").find("line 4: field 2"), std::string::npos);
  EXPECT_NE(refusal("a,b\n1,\"2\n3,4\n").find("line 2: it has a quote that nothing closes"), std::string::npos);
}

TEST_F(Csv, RefusesWhatIsNoTableOfNumbersWithItsCause) {
  for (const bool big : {false, true}) {
    std::string utf16 = big ? "\xFE\xFF" : "\xFF\xFE";
    for (const char c : std::string("a,b\n1,2\n")) utf16 += big ? std::string({'\0', c}) : std::string({c, '\0'});
    EXPECT_NE(refusal(utf16).find("zero bytes, as UTF-16 text does. Save it as UTF-8"), std::string::npos);
  }
  for (const auto* text : {"a,b,\n1,2,\n", "1,2,\n3,4,\n", "a,b,\n1,2,3\n"})
    EXPECT_NE(refusal(text).find("line 1: it ends in a comma, so the last column, the target, is empty"),
              std::string::npos);
  for (const auto* text : {",a,b\n0,1.5,0\n1,2.5,1\n", "Unnamed: 0,a,b\n0,1.5,0\n"})
    EXPECT_NE(refusal(text).find("counts the lines, as the index of pandas does"), std::string::npos);
  testing::internal::CaptureStderr();
  const auto output = convert({",a,b\n4,1.5,0\n2,2.5,1\n"});
  detail::log::flush();
  EXPECT_NE(testing::internal::GetCapturedStderr().find("the first column has no name"), std::string::npos);
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{4, 1.5, 2, 2.5}));
}

TEST_F(Csv, JoinsFilesEachWithItsHeader) {
  const auto output = convert({"a,b\n1,2\n", "a,b\n3,4\n"});
  EXPECT_EQ(values<float>(output, "x"), (std::vector<float>{1, 3}));
}

TEST_F(Csv, RefusesAFileWithOtherColumns) {
  EXPECT_NE(message(ExitCode::data,
                    [&] {
                      convert({"x1,x2,y\n1,2,3\n", "x2,x1,y\n4,5,6\n"});
                    })
                .find("line 1: its header names column 1 \"x2\", but an earlier file names it \"x1\""),
            std::string::npos);
}

TEST_F(Csv, KnowsAHeaderWithNumbersInIt) {
  EXPECT_EQ(values<float>(convert({",0,1,target\n7,8,9,1\n"}), "x"), (std::vector<float>{7, 8, 9}));
}

TEST_F(Csv, TakesTheFirstLineForWhatItIsSaidToBe) {
  const auto first_line = [&](const std::string& content, std::optional<bool> header) {
    testing::internal::CaptureStderr();
    const auto input = write("input.csv", content);
    convert_csv({input, input}, folder / "out.h5", {.header = header});
    detail::log::flush();
    const auto said = testing::internal::GetCapturedStderr();
    return std::pair(values<float>(folder / "out.h5", "x"), said);
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  const std::string pandas = "0,1,2\n7,8,1\n";  // with names that nobody has given
  const auto taken = first_line(pandas, {});
  EXPECT_EQ(taken.first, (std::vector<float>{0, 1, 7, 8, 0, 1, 7, 8}));
  EXPECT_TRUE(contains(taken.second, "counts the columns and is taken as a sample; set --header yes")) << taken.second;
  EXPECT_EQ(first_line(pandas, true), (std::pair(std::vector<float>{7, 8, 7, 8}, std::string())));
  EXPECT_EQ(first_line(pandas, false), (std::pair(std::vector<float>{0, 1, 7, 8, 0, 1, 7, 8}, std::string())));
  const auto years = first_line("2018,2019,2021\n1.5,0,2\n", {});
  EXPECT_EQ(years.first.size(), 8u);
  EXPECT_TRUE(contains(years.second, "looks like years that ascend and is taken as a sample")) << years.second;
  EXPECT_EQ(first_line("2018,2019,2021\n1.5,0,2\n", true).second, "");
  const auto named = first_line("5.1,3.5,setosa\n7,8,1\n", {});
  EXPECT_EQ(named.first, (std::vector<float>{7, 8, 7, 8}));
  EXPECT_TRUE(contains(named.second, "ends in \"setosa\", and is taken as a header")) << named.second;
  EXPECT_EQ(first_line("a,b,c\n7,8,1\n", {}).second, "");
  EXPECT_EQ(first_line("5,1,2\n7,8,1\n", {}).second, "");
  const auto input = write("input.csv", "a,b\n1,2\n");
  EXPECT_NE(message(ExitCode::data, [&] { convert_csv({input}, folder / "out.h5", {.header = false}); })
                .find("line 1: field 1, \"a\", is not a number"),
            std::string::npos);
}

TEST_F(Csv, NamesTheLineThatIsWrong) {
  EXPECT_NE(refusal("1,2\n\n3\n").find("line 3: it has one field"), std::string::npos);
  EXPECT_NE(refusal("1,2,3\n1,2\n").find("line 2: it has 2 fields"), std::string::npos);
  EXPECT_NE(refusal("a,b\n1,\n").find("line 2: field 2 is missing"), std::string::npos);
  EXPECT_NE(refusal("1,,3\n").find("line 1: field 2 is missing"), std::string::npos);
  EXPECT_NE(refusal("NA,2\n").find("line 1: field 1 is missing"), std::string::npos);
  EXPECT_NE(refusal("1,2\nnan,3\n").find("line 2: field 1 is missing"), std::string::npos);
  EXPECT_NE(refusal("1,2\n1,setosa\n").find("\"setosa\", is not a number"), std::string::npos);
  EXPECT_NE(refusal("1,2\n1e999,2\n").find("\"1e999\", is not a number"), std::string::npos);
  EXPECT_NE(refusal("1,2\n0x1,2\n").find("\"0x1\", is not a number"), std::string::npos);
  EXPECT_NE(refusal("1;2\n").find("one field"), std::string::npos);
  EXPECT_NE(refusal("a,b\n").find("no sample"), std::string::npos);
  EXPECT_NE(refusal("").find("it holds no sample. Give a file that has some, a line for each"), std::string::npos);
  EXPECT_EQ(names(), std::vector<std::string>{"input.csv"});
}

/// Ends a conversion when it has read so much that it was called `calls` times.
ConvertOptions ended_after(int calls, ConvertOptions options = {}) {
  options.progress = [calls](std::uint64_t, std::uint64_t total) mutable {
    if (total > 0) throw std::logic_error("it writes already");
    if (--calls == 0) throw std::runtime_error("ended");
  };
  return options;
}

TEST_F(Csv, EndsWhileItReads) {
  std::string lines;
  for (int i = 0; i < 100'000; ++i) lines += "1,2\n";
  const auto input = write("input.csv", lines);  // of some blocks of 64 KiB
  EXPECT_THROW(convert_csv({input}, folder / "out.h5", ended_after(5)), std::runtime_error);
  EXPECT_EQ(names(), std::vector<std::string>{"input.csv"});
}

TEST_F(Npy, EndsWhileItLoads) {
  constexpr std::size_t count = 20 << 20;
  const auto input = write("x.npy", npy(header("|u1", "(" + std::to_string(count) + ",)"), std::string(count, '\0')));
  EXPECT_THROW(convert_npy({input}, folder / "out.h5", ended_after(5, {.columns = {"x"}, .shuffle = 1})),
               std::runtime_error);
  EXPECT_EQ(names(), std::vector<std::string>{"x.npy"});
}

}  // namespace
}  // namespace muster::convert_formats_test
