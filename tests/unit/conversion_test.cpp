// Values of all types that files hold, in every layout, compared with a plain reference.
#include "hdf5/conversion.hpp"
#include "hdf5/types.hpp"
#include "muster/dataset.hpp"
#include "muster/error.hpp"
#include "support/hdf5_fixture.hpp"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <fstream>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace muster::conversion_test {
namespace {

using detail::hdf5::check;
using detail::hdf5::Handle;
using test::Folder;
using test::H5File;
using test::Layout;

struct Type {
  hid_t stored;
  at::ScalarType plain, packed;
  double least, most;  ///< of the values to test
};

std::vector<Type> types() {
  const auto top = std::ldexp(1.0, 53);
  return {
      {H5T_STD_I8LE, at::kChar, at::kFloat, -128, 127},       {H5T_STD_U8LE, at::kByte, at::kFloat, 0, 255},
      {H5T_STD_I16LE, at::kShort, at::kFloat, -32768, 32767}, {H5T_STD_I16BE, at::kShort, at::kFloat, -32768, 32767},
      {H5T_STD_U16LE, at::kInt, at::kFloat, 0, 65535},        {H5T_STD_U16BE, at::kInt, at::kFloat, 0, 65535},
      {H5T_STD_I32BE, at::kInt, at::kDouble, -2e9, 2e9},      {H5T_STD_U32LE, at::kLong, at::kDouble, 0, 4e9},
      {H5T_STD_U32BE, at::kLong, at::kDouble, 0, 4e9},        {H5T_STD_I64LE, at::kLong, at::kDouble, -top, top},
      {H5T_STD_I64BE, at::kLong, at::kDouble, -top, top},     {H5T_STD_U64BE, at::kLong, at::kDouble, 0, top},
      {H5T_IEEE_F32LE, at::kFloat, at::kFloat, -1e6, 1e6},    {H5T_IEEE_F32BE, at::kFloat, at::kFloat, -1e6, 1e6},
      {H5T_IEEE_F64LE, at::kDouble, at::kDouble, -1e9, 1e9},  {H5T_IEEE_F64BE, at::kDouble, at::kDouble, -1e9, 1e9}};
}

void attribute(const H5File& file, const std::string& dataset, const char* name, double value,
               hid_t type = H5T_NATIVE_DOUBLE) {
  const detail::hdf5::Lock lock;
  const Handle object(check(H5Dopen2(file.id(), dataset.c_str(), H5P_DEFAULT), "fixture"), H5Dclose);
  const Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  const Handle made(check(H5Acreate2(object.get(), name, type, space.get(), H5P_DEFAULT, H5P_DEFAULT), "fixture"),
                    H5Aclose);
  check(H5Awrite(made.get(), H5T_NATIVE_DOUBLE, &value), "fixture");
}

std::vector<std::int64_t> all(std::size_t rows) { return test::counting<std::int64_t>(rows); }

TEST(Conversion, OfEveryTypeAndLayoutIsThatOfThePlainReference) {
  std::mt19937_64 random(4);
  const Layout layouts[] = {{}, {.compact = true}, {.chunk = 5}, {.chunk = 5, .deflate = 1}};
  for (const auto& type : types())
    for (int round = 0; round < 24; ++round) {
      const bool is_packed = round % 2 == 1, has_missing = round % 3 == 0;
      const bool is_float = at::isFloatingType(type.plain);
      std::uniform_real_distribution<double> value(type.least, type.most);
      std::vector<double> stored(3 * (5 + random() % 700));
      for (auto& each : stored) each = is_float ? static_cast<float>(value(random)) : std::floor(value(random));
      const double scale = 0.25 + static_cast<double>(random() % 8), offset = static_cast<double>(random() % 100) - 50;
      const double missing = stored[random() % stored.size()];
      const std::pair limits(stored[random() % stored.size()], stored[random() % stored.size()]);
      const bool has_limits = round % 5 == 1;

      const Folder folder;
      const std::size_t rows = stored.size() / 3;
      {
        H5File file(folder.file("a.h5"));
        file.dataset("x", {rows, 3}, type.stored, H5T_NATIVE_DOUBLE, stored.data(), layouts[round % 4]);
        if (is_packed) attribute(file, "x", "scale_factor", scale);
        if (is_packed) attribute(file, "x", "add_offset", offset);
        if (has_missing) attribute(file, "x", "_FillValue", missing, type.stored);
        if (has_limits) attribute(file, "x", "valid_min", limits.first, type.stored);
        if (has_limits) attribute(file, "x", "valid_max", limits.second, type.stored);
      }
      std::vector<double> wanted;
      for (const auto each : stored)
        wanted.push_back((is_packed || is_float) && ((has_missing && each == missing) ||
                                                     (has_limits && (each < limits.first || each > limits.second)))
                             ? std::numeric_limits<double>::quiet_NaN()
                             : (is_packed ? each * scale + offset : each));
      const auto dtype = is_packed ? type.packed : type.plain;
      const auto data = Dataset(folder.file("a.h5"));
      EXPECT_EQ(data.schema().front().dtype, dtype);
      const auto reference = at::tensor(wanted, at::kDouble).to(dtype).view({static_cast<std::int64_t>(rows), 3});
      EXPECT_TRUE(at::allclose(data.read(all(rows))["x"].to(at::kDouble), reference.to(at::kDouble), 0, 0, true))
          << at::toString(dtype) << ", round " << round;
    }
}

void text_attribute(const H5File& file, const std::string& dataset, const char* name, const std::string& text,
                    std::optional<std::size_t> fixed_size = {}) {
  const detail::hdf5::Lock lock;
  const Handle object(check(H5Dopen2(file.id(), dataset.c_str(), H5P_DEFAULT), "fixture"), H5Dclose);
  const Handle type(H5Tcopy(H5T_C_S1), H5Tclose), space(H5Screate(H5S_SCALAR), H5Sclose);
  check(H5Tset_size(type.get(), fixed_size.value_or(H5T_VARIABLE)), "fixture");
  const Handle made(check(H5Acreate2(object.get(), name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), "fixture"),
                    H5Aclose);
  std::string padded = text;
  padded.resize(fixed_size.value_or(text.size()), '\0');
  const char* const pointer = padded.c_str();
  check(H5Awrite(made.get(), type.get(), fixed_size ? static_cast<const void*>(padded.data()) : &pointer), "fixture");
}

TEST(Conversion, SignedIntegersMayStandForUnsignedOnes) {
  struct Case {
    hid_t stored;
    double beyond;  ///< 2 to the power of its bits
    at::ScalarType plain, packed;
  };
  const auto beyond = [](int bits) { return std::ldexp(1.0, bits); };
  for (const auto& [stored, size, plain, packed] :
       {Case{H5T_STD_I8LE, beyond(8), at::kByte, at::kFloat}, Case{H5T_STD_I16BE, beyond(16), at::kInt, at::kFloat},
        Case{H5T_STD_I16LE, beyond(16), at::kInt, at::kFloat},
        Case{H5T_STD_I32BE, beyond(32), at::kLong, at::kDouble}}) {
    const Folder folder;
    const std::vector<double> values{0, 5, 127, -1, -2, -128};
    {
      H5File file(folder.file("a.h5"));
      for (const std::string name : {"plain", "packed", "signed"})
        file.dataset(name, {6}, stored, H5T_NATIVE_DOUBLE, values.data());
      text_attribute(file, "plain", "_Unsigned", "true");
      text_attribute(file, "packed", "_Unsigned", "True", 8);
      text_attribute(file, "signed", "_Unsigned", "false");
      attribute(file, "packed", "scale_factor", 2);
      attribute(file, "packed", "_FillValue", -1, stored);
      attribute(file, "signed", "_FillValue", -1, stored);
    }
    const auto batch = Dataset(folder.file("a.h5")).read(all(6));
    EXPECT_EQ(batch["plain"].scalar_type(), plain);
    EXPECT_EQ(batch["packed"].scalar_type(), packed);
    EXPECT_NE(batch["signed"].scalar_type(), plain);
    for (std::int64_t i = 0; i < 6; ++i) {
      const double value = values[static_cast<std::size_t>(i)], wanted = value < 0 ? value + size : value;
      EXPECT_EQ(batch["plain"][i].item<double>(), wanted);
      EXPECT_EQ(batch["signed"][i].item<double>(), value);
      EXPECT_EQ(batch["packed"][i].isnan().item<bool>(), value == -1);
      if (value == -1) continue;
      EXPECT_EQ(batch["packed"][i].item<double>(), 2 * wanted);
    }
  }
}

std::string error_of(const std::string& path) {
  try {
    Dataset(path).count();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::data);
    return error.what();
  }
  return "no error";
}

TEST(Conversion, UnsignedIntegersMayStandForSignedOnes) {
  struct Case {
    hid_t stored;
    int bits;
    at::ScalarType plain;
  };
  for (const auto& [stored, bits, plain] :
       {Case{H5T_STD_U8LE, 8, at::kChar}, Case{H5T_STD_U16BE, 16, at::kShort}, Case{H5T_STD_U16LE, 16, at::kShort},
        Case{H5T_STD_U32BE, 32, at::kInt}, Case{H5T_STD_U64LE, 64, at::kLong}}) {
    const Folder folder;
    const auto beyond = std::ldexp(1.0, bits), half = beyond / 2;
    const std::vector<double> values{0, 5, bits == 64 ? half - 1024 : half - 1, half};
    {
      H5File file(folder.file("a.h5"));
      for (const std::string name : {"plain", "packed"})
        file.dataset(name, {4}, stored, H5T_NATIVE_DOUBLE, values.data());
      text_attribute(file, "plain", "_Unsigned", "false");
      text_attribute(file, "packed", "_Unsigned", "False");
      attribute(file, "packed", "scale_factor", 2);
      attribute(file, "packed", "_FillValue", half, stored);
    }
    const auto batch = Dataset(folder.file("a.h5")).read(all(4));
    EXPECT_EQ(batch["plain"].scalar_type(), plain);
    for (std::int64_t i = 0; i < 4; ++i) {
      const double value = values[static_cast<std::size_t>(i)], wanted = value < half ? value : value - beyond;
      EXPECT_EQ(batch["plain"][i].item<double>(), wanted) << bits;
      EXPECT_EQ(batch["packed"][i].isnan().item<bool>(), value == half) << bits;
    }
  }
}

TEST(Conversion, ATextThatIsANumberIsOne) {
  const std::vector<std::int16_t> whole{1, -9999, 7, -2};
  const std::vector<float> real{1, -9999, 7, 1e20F};
  for (const std::optional<std::size_t> size : {std::optional<std::size_t>{}, {32}})
    for (const auto* name : {"missing_value", "_FillValue"}) {
      const Folder folder;
      {
        H5File file(folder.file("a.h5"));
        file.dataset("packed", {4}, H5T_STD_I16BE, H5T_NATIVE_INT16, whole.data());
        file.dataset("real", {4}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, real.data());
        file.dataset("whole", {4}, H5T_STD_I16LE, H5T_NATIVE_INT16, whole.data());
        text_attribute(file, "packed", "scale_factor", "0.5 ", size);
        text_attribute(file, "packed", "add_offset", "+1e1", size);
        for (const std::string column : {"packed", "whole"}) text_attribute(file, column, name, "-9999", size);
        text_attribute(file, "real", name, "-9999 , 1e20,", size);
        text_attribute(file, "real", "valid_range", " ", size);
      }
      const auto batch = Dataset(folder.file("a.h5")).read(all(4));
      const auto nan = std::numeric_limits<float>::quiet_NaN();
      const auto same = [](const at::Tensor& a, const at::Tensor& b) { return at::allclose(a, b, 0, 0, true); };
      EXPECT_TRUE(same(batch["packed"], at::tensor({10.5F, nan, 13.5F, 9.F})));
      EXPECT_TRUE(same(batch["real"], at::tensor({1.F, nan, 7.F, nan})));
      EXPECT_TRUE(at::equal(batch["whole"], at::tensor(whole))) << "integers have no NaN";
    }
}

TEST(Conversion, ATextThatIsNoNumberIsRefused) {
  const auto values = test::counting<float>(3);
  for (const auto* name :
       {"missing_value", "_FillValue", "valid_min", "valid_max", "valid_range", "scale_factor", "add_offset"})
    for (const auto* text : {"none", "-9999.f", "1 to 2", "0x10", "1e999", "-9999,0", "1, ,2"}) {
      const Folder folder;
      {
        H5File file(folder.file("a.h5"));
        file.dataset("x", {3}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, values.data());
        text_attribute(file, "x", name, text);
      }
      EXPECT_NE(error_of(folder.file("a.h5")).find(std::string(name) + " is not a number"), std::string::npos) << text;
    }
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    file.dataset("x", {3}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, values.data());
    text_attribute(file, "x", "valid_range", "1, 2, 3");
  }
  EXPECT_NE(error_of(folder.file("a.h5")).find("valid_range is not two numbers"), std::string::npos);
}

TEST(Conversion, ValuesOutsideOfTheValidRangeAreMissing) {
  const Folder folder;
  const std::vector<double> values{-9, 0.1, 1, 100, 200, 250};
  const auto whole = std::vector<double>{-9, 0, 1, 100, 200, 250};
  {
    H5File file(folder.file("a.h5"));
    for (const std::string name : {"both", "least", "most"})
      file.dataset(name, {6}, H5T_IEEE_F32BE, H5T_NATIVE_DOUBLE, values.data());
    for (const std::string name : {"fraction", "packed", "whole"})
      file.dataset(name, {6}, H5T_STD_I16LE, H5T_NATIVE_DOUBLE, whole.data());
    file.dataset("unsigned", {6}, H5T_STD_I8LE, H5T_NATIVE_INT8, std::vector<std::int8_t>{0, 1, 2, -6, -5, -1}.data());
    text_attribute(file, "both", "valid_range", "0.1, 200");
    attribute(file, "least", "valid_min", 0.1);  // with more digits than the values
    attribute(file, "most", "valid_max", 100, H5T_NATIVE_FLOAT);
    for (const std::string name : {"fraction", "packed", "unsigned"}) attribute(file, name, "scale_factor", 0.01);
    attribute(file, "fraction", "valid_min", 0.5);
    attribute(file, "packed", "valid_min", 0, H5T_STD_I16LE);
    attribute(file, "packed", "valid_max", 100, H5T_STD_I16LE);
    attribute(file, "whole", "valid_max", 100, H5T_STD_I16LE);
    text_attribute(file, "unsigned", "_Unsigned", "true");
    attribute(file, "unsigned", "valid_max", -6, H5T_STD_I8LE);
  }
  const auto batch = Dataset(folder.file("a.h5")).read(all(6));
  const auto missing = [&](const std::string& name) { return batch[name].isnan().to(at::kInt); };
  EXPECT_TRUE(at::equal(missing("both"), at::tensor({1, 0, 0, 0, 0, 1})));
  EXPECT_TRUE(at::equal(missing("least"), at::tensor({1, 0, 0, 0, 0, 0})));
  EXPECT_TRUE(at::equal(missing("most"), at::tensor({0, 0, 0, 0, 1, 1})));
  EXPECT_TRUE(at::equal(missing("packed"), at::tensor({1, 0, 0, 0, 1, 1}))) << "limits are of stored values";
  EXPECT_TRUE(at::equal(missing("fraction"), at::tensor({0, 0, 0, 0, 0, 0}))) << "none of stored integers";
  EXPECT_TRUE(at::equal(missing("unsigned"), at::tensor({0, 0, 0, 0, 1, 1})));
  EXPECT_EQ(batch["whole"].scalar_type(), at::kShort);
  EXPECT_EQ(batch["whole"][5].item<int>(), 250);
}

TEST(Conversion, OnlyAnAttributeThatChangesTheSignChangesNumbers) {
  struct Case {
    hid_t stored;
    double value;       ///< next to 0, 1 and 100
    const char* which;  ///< attribute with `number`
    double number;
    const char* is_unsigned;
    bool is_missing;
  };
  for (const auto& [stored, value, which, number, is_unsigned, is_missing] :
       {Case{H5T_STD_U8LE, 200, "valid_min", -1, nullptr, false},
        Case{H5T_STD_U8LE, 255, "missing_value", -1, nullptr, false},
        Case{H5T_STD_U16BE, 55537, "missing_value", -9999, nullptr, false},
        Case{H5T_STD_U16LE, 55537, "missing_value", -9999, "true", false},
        Case{H5T_STD_I8LE, -100, "valid_max", 200, "false", false},
        Case{H5T_STD_I16BE, -2, "missing_value", 65534, nullptr, false},
        Case{H5T_STD_I8LE, -1, "missing_value", -1, "true", true},
        Case{H5T_STD_U8LE, 255, "missing_value", 255, "false", true}}) {
    const Folder folder;
    const std::vector<double> values{0, 1, 100, value};
    {
      H5File file(folder.file("a.h5"));
      file.dataset("x", {4}, stored, H5T_NATIVE_DOUBLE, values.data());
      attribute(file, "x", "scale_factor", 0.5);
      attribute(file, "x", which, number);
      if (is_unsigned != nullptr) text_attribute(file, "x", "_Unsigned", is_unsigned);
    }
    const auto x = Dataset(folder.file("a.h5")).read(all(4))["x"];
    EXPECT_TRUE(at::equal(x.isnan().to(at::kInt), at::tensor({0, 0, 0, is_missing ? 1 : 0}))) << which << number;
  }
}

TEST(Conversion, AMissingValueIsRoundedAsTheValuesAre) {
  const Folder folder;
  const std::vector<float> values{1, 1e20f, 0.1f, std::numeric_limits<float>::infinity()};
  {
    H5File file(folder.file("a.h5"));
    for (const std::string name : {"large", "small", "beyond"})
      file.dataset(name, {4}, H5T_IEEE_F32BE, H5T_NATIVE_FLOAT, values.data());
    attribute(file, "large", "missing_value", 1e20);
    attribute(file, "small", "missing_value", 0.1);
    attribute(file, "beyond", "missing_value", 1e300);
  }
  const auto batch = Dataset(folder.file("a.h5")).read(all(4));
  const auto missing = [&](const std::string& name) { return batch[name].isnan().to(at::kInt); };
  EXPECT_TRUE(at::equal(missing("large"), at::tensor({0, 1, 0, 0})));
  EXPECT_TRUE(at::equal(missing("small"), at::tensor({0, 0, 1, 0})));
  EXPECT_FALSE(missing("beyond").any().item<bool>()) << "no float32 is 1e300";
}

TEST(Conversion, OfHalfFloatsAndComplexNumbers) {
  const Folder folder;
  const std::vector<float> values{1.5, -2, 0.25, 100, 0, -0.125};
  {
    H5File file(folder.file("a.h5"));
    for (const auto& [name, type] : {std::pair("half", at::kHalf), std::pair("bfloat", at::kBFloat16)}) {
      const auto native = detail::hdf5::memory_type_of(type);
      for (const auto order : {H5T_ORDER_LE, H5T_ORDER_BE}) {
        const Handle stored(H5Tcopy(native.get()), H5Tclose);
        H5Tset_order(stored.get(), order);
        const auto of_order = std::string(name) + (order == H5T_ORDER_BE ? "_big" : "");
        file.dataset(of_order, {6}, stored.get(), H5T_NATIVE_FLOAT, values.data());
        file.dataset(of_order + "_scaled", {6}, stored.get(), H5T_NATIVE_FLOAT, values.data());
        attribute(file, of_order + "_scaled", "scale_factor", 2);
      }
    }
    const auto complex = detail::hdf5::memory_type_of(at::kComplexFloat);
    file.dataset("z", {6}, complex.get(), complex.get(), std::vector<float>(12, 3).data());
    attribute(file, "z", "scale_factor", 2);
  }
  const auto batch = Dataset(folder.file("a.h5")).read(all(6));
  for (const std::string name : {"half", "half_big", "bfloat", "bfloat_big"}) {
    EXPECT_EQ(batch[name].scalar_type(), name.starts_with("half") ? at::kHalf : at::kBFloat16);
    EXPECT_TRUE(at::equal(batch[name].to(at::kFloat), at::tensor(values))) << name;
    EXPECT_TRUE(at::equal(batch[name + "_scaled"], at::tensor(values).mul(2))) << name;
  }
  EXPECT_EQ(batch["z"][5].item<c10::complex<float>>(), c10::complex<float>(3, 3)) << "complex numbers are not scaled";
}

TEST(Conversion, EnumerationsAreTheirIntegers) {
  const Folder folder;
  const std::vector<std::int16_t> values{2, 1, 2, 7};
  {
    H5File file(folder.file("a.h5"));
    const Handle type(H5Tenum_create(H5T_STD_I16BE), H5Tclose);
    std::int16_t code = 0;
    for (const char* name : {"land", "sea", "ice"}) {
      std::int16_t big = static_cast<std::int16_t>(__builtin_bswap16(static_cast<std::uint16_t>(++code)));
      H5Tenum_insert(type.get(), name, &big);
    }
    std::vector<std::uint16_t> stored;
    for (const auto value : values) stored.push_back(__builtin_bswap16(static_cast<std::uint16_t>(value)));
    file.dataset("kind", {4}, type.get(), type.get(), stored.data());
    file.dataset("packed", {4}, type.get(), type.get(), stored.data(), {.chunk = 2, .deflate = 1});
    file.dataset("compact", {4}, type.get(), type.get(), stored.data(), {.compact = true});
  }
  const auto batch = Dataset(folder.file("a.h5")).read(all(4));
  for (const char* name : {"kind", "packed", "compact"})
    EXPECT_TRUE(at::equal(batch[name], at::tensor(values))) << name;
}

TEST(Conversion, FieldsOfCompoundsAreColumns) {
  struct Particle {
    double mass;
    std::int16_t kind;
    float place[3];
  };
  const Folder folder;
  const hsize_t three = 3;
  const Handle place(H5Tarray_create2(H5T_NATIVE_FLOAT, 1, &three), H5Tclose);
  const Handle type(H5Tcreate(H5T_COMPOUND, sizeof(Particle)), H5Tclose);
  H5Tinsert(type.get(), "mass", offsetof(Particle, mass), H5T_NATIVE_DOUBLE);
  H5Tinsert(type.get(), "kind", offsetof(Particle, kind), H5T_NATIVE_INT16);
  H5Tinsert(type.get(), "place", offsetof(Particle, place), place.get());
  std::vector<Particle> particles(300);
  for (int i = 0; i < 300; ++i)
    particles[static_cast<std::size_t>(i)] = {i / 4.0, static_cast<std::int16_t>(i), {1, 2, 3}};
  {
    H5File file(folder.file("a.h5"));
    file.dataset("plain", {300}, type.get(), type.get(), particles.data());
    file.dataset("packed", {300}, type.get(), type.get(), particles.data(), {.chunk = 7, .deflate = 1});
    file.dataset("a.b", {300}, type.get(), type.get(), particles.data());
    file.dataset("x.y", {300}, H5T_NATIVE_DOUBLE, H5T_NATIVE_DOUBLE, std::vector<double>(300, 5).data());
  }
  for (const std::int64_t cache : {100, 1 << 20}) {
    const auto data = Dataset::from_hdf5(
        {folder.file("a.h5")}, {.columns = {"packed.mass", "plain.kind", "a.b.mass", "x.y"}, .cache_bytes = cache});
    const auto batch = data.read(all(300));
    for (std::int64_t i = 0; i < 300; ++i) {
      EXPECT_EQ(batch["packed.mass"][i].item<double>(), static_cast<double>(i) / 4);
      EXPECT_EQ(batch["plain.kind"][i].item<std::int16_t>(), i);
    }
    EXPECT_TRUE(at::equal(batch["a.b.mass"], batch["packed.mass"]));
    EXPECT_EQ(batch["x.y"][7].item<double>(), 5);
  }
  const auto error = [&](const std::string& column) {
    try {
      Dataset::from_hdf5({folder.file("a.h5")}, {.columns = {column}}).count();
    } catch (const Error& refused) {
      return std::string(refused.what());
    }
    return std::string("no error");
  };
  EXPECT_NE(error("plain.weight").find("no field \"weight\". Its fields are mass, kind, place"), std::string::npos);
  EXPECT_NE(error("plain.place").find("arrays in one element"), std::string::npos);
  EXPECT_NE(error("x.y.z").find("no field \"z\""), std::string::npos);
  EXPECT_NE(error("plain").find("compound values"), std::string::npos);
}

TEST(Conversion, ValuesThatWereNeverWrittenAreMissing) {
  const Folder folder;
  {
    H5File file(folder.file("a.h5"));
    const detail::hdf5::Lock lock;
    const Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    const hsize_t shape = 10, chunk = 4;
    const Handle space(H5Screate_simple(1, &shape, nullptr), H5Sclose);
    check(H5Pset_chunk(creation.get(), 1, &chunk), "fixture");
    const std::int16_t missing = -999;
    check(H5Pset_fill_value(creation.get(), H5T_NATIVE_INT16, &missing), "fixture");
    check(H5Pset_deflate(creation.get(), 1), "fixture");
    file.create("t", H5T_STD_I16BE, H5T_NATIVE_INT16, space.get(), creation.get(), nullptr);
    attribute(file, "t", "_FillValue", missing, H5T_STD_I16BE);
    attribute(file, "t", "add_offset", 273.15);
  }
  EXPECT_TRUE(Dataset(folder.file("a.h5")).read(all(10))["t"].isnan().all().item<bool>());
}

TEST(Conversion, AttributesMustBeNumbers) {
  const Folder folder;
  for (const auto value : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    {
      H5File file(folder.file("a.h5"));
      file.columns(3);
      attribute(file, "x", "scale_factor", value);
    }
    EXPECT_NE(error_of(folder.file("a.h5")).find("scale_factor is not a number"), std::string::npos);
  }
  {
    H5File file(folder.file("b.h5"));
    file.columns(3);
    const Handle text(H5Tcopy(H5T_C_S1), H5Tclose), space(H5Screate(H5S_SCALAR), H5Sclose);
    const Handle column(H5Dopen2(file.id(), "y", H5P_DEFAULT), H5Dclose);
    Handle(H5Acreate2(column.get(), "add_offset", text.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
  }
  EXPECT_NE(error_of(folder.file("b.h5")).find("add_offset is not a number"), std::string::npos);
}

TEST(Conversion, AnyOfManyMissingValuesIsMissing) {
  const Folder folder;
  const auto values = test::counting<float>(4);
  const auto make = [&](const std::string& name, hsize_t count) {
    H5File file(folder.file(name));
    file.dataset("x", {4}, H5T_IEEE_F32LE, H5T_NATIVE_FLOAT, values.data());
    const detail::hdf5::Lock lock;
    const Handle column(H5Dopen2(file.id(), "x", H5P_DEFAULT), H5Dclose);
    const Handle space(H5Screate_simple(1, &count, nullptr), H5Sclose);
    const Handle made(
        H5Acreate2(column.get(), "missing_value", H5T_NATIVE_FLOAT, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose);
    std::vector<float> numbers(count, 50);
    numbers.back() = 2;
    H5Awrite(made.get(), H5T_NATIVE_FLOAT, numbers.data());
  };
  make("some.h5", 40);
  const auto missing = Dataset(folder.file("some.h5")).read(all(4))["x"].isnan().to(at::kInt);
  EXPECT_TRUE(at::equal(missing, at::tensor({0, 0, 1, 0})));
  make("many.h5", 1025);
  EXPECT_NE(error_of(folder.file("many.h5")).find("missing_value has 1025 numbers; the most are 1024"),
            std::string::npos);
}

TEST(Conversion, ClassicNetCDFIsRefusedWithTheCommandThatConvertsIt) {
  const Folder folder;
  for (const char version : {'\1', '\2', '\5'}) {
    std::ofstream(folder.file("old.nc")) << "CDF" << version << std::string(60, '\0');
    EXPECT_NE(error_of(folder.file("old.nc")).find("nccopy -k nc4"), std::string::npos);
  }
}

}  // namespace
}  // namespace muster::conversion_test
