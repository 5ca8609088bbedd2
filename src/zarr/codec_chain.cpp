#include "zarr/codec_chain.hpp"

#include "base/json.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/shuffle.hpp"
#include "zarr/store_files.hpp"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace muster::detail::zarr {
namespace {

using Bytes = std::span<const std::byte>;
using Into = std::span<std::byte>;

constexpr std::size_t crc_bytes = 4;

/// Removes the checksum from `bytes`. False if it is wrong.
bool check_and_remove_crc32c(Bytes& bytes, bool at_end) {
  if (bytes.size() < crc_bytes) return false;
  const auto stored = at_end ? bytes.last(crc_bytes) : bytes.first(crc_bytes);
  bytes = at_end ? bytes.first(bytes.size() - crc_bytes) : bytes.subspan(crc_bytes);
  std::uint32_t sum = std::numeric_limits<std::uint32_t>::max();
  constexpr std::size_t at_once = 1 << 30;  // of an int
  for (auto rest = bytes; !rest.empty(); rest = rest.subspan(std::min(at_once, rest.size())))
    sum = ::crc32_iscsi(reinterpret_cast<unsigned char*>(const_cast<std::byte*>(rest.data())),
                        static_cast<int>(std::min(at_once, rest.size())), sum);
  sum = ~sum;
  return std::memcmp(&sum, stored.data(), sizeof sum) == 0;
}

template <std::size_t PartBytes>
bool swap_parts(Bytes from, Into into) {
  if (from.size() != into.size()) return false;
  for (std::size_t at = 0; at + PartBytes <= from.size(); at += PartBytes)
    std::reverse_copy(from.data() + at, from.data() + at + PartBytes, into.data() + at);
  return true;
}

/// Writes the values of an array of this shape in the order of its dimensions. They lie in `from` with these strides.
template <std::size_t ValueBytes>
void gather(const std::byte* from, const std::vector<std::size_t>& shape, const std::vector<std::size_t>& strides,
            std::byte* into) {
  const auto last = shape.size() - 1;
  std::vector<std::size_t> at(shape.size(), 0);
  while (true) {
    for (std::size_t i = 0; i < shape[last]; ++i, into += ValueBytes)
      std::memcpy(into, from + i * strides[last], ValueBytes);
    auto d = last;
    for (; d > 0; --d) {
      from += strides[d - 1];
      if (++at[d - 1] < shape[d - 1]) break;
      from -= strides[d - 1] * shape[d - 1];
      at[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

/// Calls action() with the type of values that delta and fixedscaleoffset know. False if it is another one.
bool with_number(const NumberType& type, auto&& action) {
  return with_one_of<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t, std::uint32_t, std::int64_t,
                     std::uint64_t, float, double>(type.scalar, action);
}

/// Calls action(encoded value, Value()) for each value; its result is stored.
bool each_value(const NumberType& encoded, const NumberType& decoded, Bytes from, Into into, auto&& action) {
  if (from.size() / encoded.bytes() != into.size() / decoded.bytes() || from.size() % encoded.bytes() != 0)
    return false;
  return with_number(encoded, [&]<class Encoded>(std::type_identity<Encoded>) {
    with_number(decoded, [&]<class Value>(std::type_identity<Value>) {
      Value last{};
      for (std::size_t i = 0; i < into.size() / sizeof(Value); ++i) {
        Encoded value;
        std::memcpy(&value, from.data() + i * sizeof value, sizeof value);
        last = action(value, last);
        std::memcpy(into.data() + i * sizeof last, &last, sizeof last);
      }
    });
  });
}

bool undo_delta(const NumberType& encoded, const NumberType& decoded, Bytes from, Into into) {
  return each_value(encoded, decoded, from, into, []<class Encoded, class Value>(Encoded step, Value last) {
    if constexpr (std::is_floating_point_v<Value>)
      return static_cast<Value>(last + static_cast<Value>(step));
    else
      return static_cast<Value>(static_cast<std::uint64_t>(last) + static_cast<std::uint64_t>(step));
  });
}

bool undo_scale(const NumberType& encoded, const NumberType& decoded, double scale, double offset, Bytes from,
                Into into) {
  return each_value(encoded, decoded, from, into, [=]<class Encoded, class Value>(Encoded value, Value) {
    // As NumPy computes: floats in their own precision, integers in double.
    using Number = std::conditional_t<std::is_same_v<Encoded, float>, float, double>;
    const auto number = static_cast<Number>(value) / static_cast<Number>(scale) + static_cast<Number>(offset);
    if constexpr (std::is_floating_point_v<Value>) return static_cast<Value>(number);
    return number > -0x1p63 && number < 0x1p63 ? static_cast<Value>(static_cast<std::int64_t>(number)) : Value{};
  });
}

/// numcodecs' lz4: the size of the chunk, the lowest byte first, and one block.
bool undo_lz4(Bytes encoded, Into into) {
  std::uint32_t size = 0;
  if (encoded.size() < sizeof size) return false;
  std::memcpy(&size, encoded.data(), sizeof size);
  return size == into.size() && hdf5::lz4_block_decoder()(encoded.subspan(sizeof size), into);
}

/// The package of Debian that brings the library of a codec.
std::string package_of(const std::string& codec) {
  return codec == "zstd" ? "libzstd-dev" : codec == "lz4" ? "liblz4-dev" : "libblosc-dev";
}

}  // namespace

CodecChain::CodecChain(std::vector<std::int64_t> chunk, const NumberType& type, const std::string& doing)
    : doing_(doing), shape_(std::move(chunk)), type_(type) {
  auto bytes = static_cast<std::int64_t>(type.bytes());
  for (const auto size : shape_) bytes = checked_product(bytes, size, doing, "the shape of its chunks");
  decoded_bytes_ = static_cast<std::size_t>(bytes);
  bytes_ = most_encoded_bytes_ = decoded_bytes_;
}

CodecChain::CodecChain(const Json& codecs, const NumberType& type, std::vector<std::int64_t> chunk,
                       const std::string& doing)
    : CodecChain(std::move(chunk), type, doing) {
  for (const auto& codec : codecs) {
    const bool has_options = codec.is_object() && codec.contains("configuration");
    add(codec.is_string() ? codec.get<std::string>() : codec.at("name").get<std::string>(),
        has_options ? codec.at("configuration") : Json::object());
  }
  if (holds_values_) end_of_values(false);
}

CodecChain CodecChain::of_version_2(const Json& array, const NumberType& type, std::vector<std::int64_t> chunk,
                                    const std::string& doing) {
  const auto rank = chunk.size();
  CodecChain chain(std::move(chunk), type, doing);
  if (array.value("order", "C") == "F" && rank > 1) {
    std::vector<std::int64_t> order(rank);
    std::iota(order.rbegin(), order.rend(), 0);
    chain.add_transpose(std::move(order));
    chain.text_.clear();  // it is the order of the values, and no codec
  }
  if (const auto filters = array.find("filters"); filters != array.end() && filters->is_array())
    for (const auto& filter : *filters) chain.add(filter.at("id").get<std::string>(), filter);
  if (const auto compressor = array.find("compressor"); compressor != array.end() && !compressor->is_null())
    chain.add(compressor->at("id").get<std::string>(), *compressor);
  if (chain.holds_values_) chain.end_of_values(chain.type_.is_big_endian);
  return chain;
}

void CodecChain::refuse(const std::string& fact, const std::string& remedy) const {
  throw Error(ExitCode::data, doing_, fact, remedy);
}

void CodecChain::add_step(const std::string& shown, Undo undo) {
  text_ += (text_.empty() ? "" : ", ") + shown;
  steps_.push_back({shown, std::move(undo), bytes_});
}

void CodecChain::add(const std::string& given, const Json& options) {
  constexpr std::string_view prefix = "numcodecs.";
  const auto name = given.starts_with(prefix) ? given.substr(prefix.size()) : given;
  if (name == "transpose") {
    const auto& order = options.at("order");
    if (order.is_array()) return add_transpose(order.get<std::vector<std::int64_t>>());
    std::vector<std::int64_t> axes(shape_.size());
    std::iota(axes.begin(), axes.end(), 0);
    if (order == "F") std::ranges::reverse(axes);
    return add_transpose(std::move(axes));
  }
  if (name == "bytes") return end_of_values(options.value("endian", "little") == "big");
  if (name == "delta" || name == "fixedscaleoffset") return add_filter(name, options);
  if (holds_values_) end_of_values(type_.is_big_endian);
  if (name == "crc32c") {
    add_step(name, {});
    steps_.back().is_at_end = options.value("location", "end") == "end";
    most_encoded_bytes_ += crc_bytes;
    if (bytes_) *bytes_ += crc_bytes;
    return;
  }
  auto shown = name;
  Undo undo;
  if (name == "shuffle") {
    const auto size = options.value("elementsize", std::int64_t{4});
    if (size < 1) refuse(str("its codec shuffle has values of ", size, " bytes"), "Correct its metadata");
    undo = [size](Bytes from, Into into) {
      if (from.size() == into.size()) hdf5::unshuffle(from, static_cast<std::size_t>(size), into);
      return from.size() == into.size();
    };
  } else if (name == "zlib" || name == "gzip") {
    const auto form = name == "zlib" ? hdf5::Deflated::zlib : hdf5::Deflated::gzip;
    undo = [form](Bytes from, Into into) { return hdf5::inflate(form, from, into); };
  } else if (name == "zstd") {
    if (const auto decoder = hdf5::zstd_decoder()) undo = decoder;
  } else if (name == "lz4") {
    if (hdf5::lz4_block_decoder()) undo = undo_lz4;
  } else if (name == "blosc") {
    const auto codec = options.value("cname", "lz4");
    shown += " " + codec;
    if (const auto decoder = hdf5::blosc_decoder(); decoder && hdf5::blosc_has(codec)) undo = decoder;
  } else {
    refuse("it is encoded by a codec that muster does not know (" + given + ")",
           "Write it with another one, such as blosc or zstd");
  }
  if (!undo)
    refuse("it is compressed by a codec that muster was built without here (" + shown + ")",
           "Build muster again where " + package_of(name) + " is installed, or write it with another codec");
  add_step(shown, std::move(undo));
  if (name == "shuffle") return;
  if (!bytes_) refuse("it is compressed twice", "Write it with one codec that compresses");
  bytes_.reset();
  most_encoded_bytes_ += most_encoded_bytes_ / 4 + (64 << 10);  // what cannot be compressed becomes longer
}

void CodecChain::add_transpose(std::vector<std::int64_t> order) {
  std::vector<std::int64_t> axes(shape_.size());
  std::iota(axes.begin(), axes.end(), 0);
  if (!std::ranges::is_permutation(order, axes))
    refuse("its transpose is not an order of its dimensions", "Correct its metadata");
  if (!holds_values_) refuse("it is transposed after it was made bytes", "Correct its metadata");
  const std::vector<std::size_t> shape(shape_.begin(), shape_.end());
  std::vector<std::size_t> strides(shape.size());
  auto stride = type_.bytes();
  for (auto k = order.size(); k-- > 0;) {
    const auto d = static_cast<std::size_t>(order[k]);
    strides[d] = stride;
    stride *= shape[d];
    shape_[k] = static_cast<std::int64_t>(shape[d]);
  }
  const auto copy = type_.bytes() == 1   ? gather<1>
                    : type_.bytes() == 2 ? gather<2>
                    : type_.bytes() == 4 ? gather<4>
                    : type_.bytes() == 8 ? gather<8>
                                         : gather<16>;
  add_step("transpose", [shape, strides, copy](Bytes from, Into into) {
    if (from.size() == into.size()) copy(from.data(), shape, strides, into.data());
    return from.size() == into.size();
  });
}

/// Adds a codec that makes numbers of numbers.
void CodecChain::add_filter(const std::string& name, const Json& options) {
  const auto decoded = number_type(options.at("dtype"), doing_);
  const auto encoded = options.contains("astype") && !options.at("astype").is_null()
                           ? number_type(options.at("astype"), doing_)
                           : decoded;
  const auto is_known = [](const NumberType& type) { return with_number(type, [](auto) {}); };
  if (!holds_values_ || decoded.scalar != type_.scalar || !is_known(decoded) || !is_known(encoded) ||
      (name == "delta" && c10::isFloatingType(encoded.scalar) && !c10::isFloatingType(decoded.scalar)))
    refuse("its codec " + name + " is not for values of its type", "Write it with another codec");
  if (name == "delta") {
    add_step(name, [=](Bytes from, Into into) { return undo_delta(encoded, decoded, from, into); });
  } else {
    const auto scale = options.at("scale").get<double>(), offset = options.at("offset").get<double>();
    add_step(name, [=](Bytes from, Into into) { return undo_scale(encoded, decoded, scale, offset, from, into); });
  }
  bytes_ = checked_product(*bytes_ / type_.bytes(), encoded.bytes(), doing_, "the shape of its chunks");
  most_encoded_bytes_ = std::max<std::uint64_t>(most_encoded_bytes_, *bytes_);
  type_ = encoded;
}

/// The values become bytes, in this order.
void CodecChain::end_of_values(bool is_big_endian) {
  if (!holds_values_) refuse("it is made bytes twice", "Correct its metadata");
  holds_values_ = false;
  const auto part = type_.part_bytes();
  if (is_big_endian && part > 1)
    steps_.push_back({"bytes", part == 2 ? swap_parts<2> : part == 4 ? swap_parts<4> : swap_parts<8>, bytes_});
}

void CodecChain::decode(std::span<const std::byte> encoded, std::span<std::byte> into, const std::string& doing) const {
  thread_local hdf5::FilterPipeline::Workspace workspace;
  const auto refuse_size = [&](const std::string& by) {
    throw Error(
        ExitCode::data, doing,
        str("its ", encoded.size(), " stored bytes do not decode to ", into.size(), by.empty() ? "" : " by " + by),
        damaged);
  };
  auto bytes = encoded;
  std::size_t buffer = 0;
  for (auto i = steps_.size(); i-- > 0;) {
    const auto& step = steps_[i];
    if (!step.undo) {
      if (!check_and_remove_crc32c(bytes, step.is_at_end))
        throw Error(ExitCode::data, doing, "its crc32c checksum does not match", damaged);
      continue;
    }
    const auto output = i == 0 ? into : workspace[buffer++ % 2].take(step.bytes.value_or(bytes.size()));
    if (!step.undo(bytes, output)) refuse_size(step.name);
    bytes = output;
  }
  if (bytes.size() != into.size()) refuse_size("");
  if (bytes.data() != into.data()) std::ranges::copy(bytes, into.begin());
}

}  // namespace muster::detail::zarr
