#include "zarr/codec_chain.hpp"

#include "base/json.hpp"
#include "base/number.hpp"
#include "base/runs.hpp"
#include "base/text.hpp"
#include "hdf5/codecs.hpp"
#include "hdf5/filter_pipeline.hpp"
#include "hdf5/shuffle.hpp"
#include "zarr/store_files.hpp"

#include <isa-l/crc.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>
#include <string_view>
#include <tuple>
#include <type_traits>
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
  constexpr std::size_t at_once = 1 << 30;  // bytes; the length is an int
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

/// Calls action(T()) with the C++ type of the values. False if delta and fixedscaleoffset do not know it.
bool with_number(const NumberType& type, auto&& action) {
  const auto with_one_of = [&](auto... zeros) {
    return ((c10::CppTypeToScalarType<decltype(zeros)>::value == type.scalar && (action(zeros), true)) || ...);
  };
  return std::apply(with_one_of, std::tuple<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t, std::int32_t,
                                            std::uint32_t, std::int64_t, std::uint64_t, float, double>());
}

/// Calls action(encoded value, previous decoded value) for each value and stores the result as the decoded value.
bool each_value(const NumberType& encoded, const NumberType& decoded, Bytes from, Into into, auto&& action) {
  if (from.size() / encoded.bytes() != into.size() / decoded.bytes() || from.size() % encoded.bytes() != 0)
    return false;
  return with_number(encoded, [&](auto value) {
    with_number(decoded, [&](auto last) {
      for (std::size_t i = 0; i < into.size() / sizeof last; ++i) {
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
  return size == into.size() && hdf5::bare_decoder("lz4")(encoded.subspan(sizeof size), into);
}

}  // namespace

/// Adds the codecs to the chain, one after the other. Keeps what the next one is applied to: type, shape and size.
class CodecChain::Builder {
 public:
  Builder(CodecChain& chain, const NumberType& type, std::vector<std::int64_t> shape, const std::string& doing)
      : chain_(chain), type_(type), shape_(std::move(shape)), doing_(doing), bytes_(bytes_of_chunk()) {
    chain.decoded_bytes_ = chain.most_encoded_bytes_ = *bytes_;
  }

  void add(const Json& codec) {
    const auto& given = (codec.is_string() ? codec : codec.at("name")).get_ref<const std::string&>();
    const auto options = codec.is_object() ? codec.value("configuration", Json::object()) : Json::object();
    constexpr std::string_view prefix = "numcodecs.";
    const auto name = given.starts_with(prefix) ? given.substr(prefix.size()) : given;
    if (name == "transpose") return add_transpose(options.at("order"));
    if (name == "bytes") return end_of_values(options.value("endian", "little") == "big");
    if (name == "delta" || name == "fixedscaleoffset") return add_filter(name, options);
    if (holds_values_) end_of_values(type_.is_big_endian);
    if (name == "crc32c") return add_crc32c(options.value("location", "end") == "end");
    if (name == "shuffle") return add_shuffle(options.value("elementsize", std::int64_t{4}));
    if (constexpr std::string_view known[] = {"zlib", "gzip", "zstd", "lz4", "blosc"};
        std::ranges::find(known, name) == std::end(known))
      refuse("it is encoded by a codec that muster does not know (" + given + ")",
             "Write it with another one, such as blosc or zstd");
    const auto shown = name == "blosc" ? "blosc " + options.value("cname", "lz4") : name;
    const auto decoder = hdf5::bare_decoder(shown);
    if (decoder == nullptr)
      refuse("it is compressed by a codec that muster was built without here (" + shown + ")",
             "Build muster again where lib" + name + "-dev is installed, or write it with another codec");
    add_step(shown, name == "lz4" ? undo_lz4 : decoder);
    if (!bytes_) refuse("it is compressed twice", "Write it with one codec that compresses");
    bytes_.reset();
    auto& most = chain_.most_encoded_bytes_;
    most += most / 4 + (64 << 10);  // what cannot be compressed becomes longer
  }

  void finish() {
    if (holds_values_) end_of_values(type_.is_big_endian);
    chain_.encoded_bytes_ = bytes_;
  }

 private:
  [[noreturn]] void refuse(const std::string& fact, const std::string& remedy = "Correct its metadata") const {
    throw Error(ExitCode::data, doing_, fact, remedy);
  }

  std::size_t bytes_of_chunk() const {
    auto bytes = static_cast<std::int64_t>(type_.bytes());
    for (const auto size : shape_) bytes = checked_product(bytes, size, doing_, "the shape of its chunks");
    return static_cast<std::size_t>(bytes);
  }

  void add_step(const std::string& shown, Undo undo) {
    chain_.text_ += (chain_.text_.empty() ? "" : ", ") + shown;
    chain_.steps_.push_back({shown, std::move(undo), bytes_});
  }

  void add_crc32c(bool is_at_end) {
    add_step("crc32c", {});
    chain_.steps_.back().is_at_end = is_at_end;
    chain_.most_encoded_bytes_ += crc_bytes;
    if (bytes_) *bytes_ += crc_bytes;
  }

  void add_shuffle(std::int64_t size) {
    if (size < 1) refuse(str("its codec shuffle has values of ", size, " bytes"));
    add_step("shuffle", [size](Bytes from, Into into) {
      if (from.size() == into.size()) hdf5::unshuffle(from, static_cast<std::size_t>(size), into);
      return from.size() == into.size();
    });
  }

  /// `given`: the dimensions in the order in which they are stored, "C" for their own order, or "F" for its reverse.
  void add_transpose(const Json& given) {
    std::vector<std::int64_t> axes(shape_.size());
    std::iota(axes.begin(), axes.end(), 0);
    std::vector<std::int64_t> order(axes.rbegin(), axes.rend());
    if (given != "F") order = given == "C" ? axes : given.get<std::vector<std::int64_t>>();
    if (!std::ranges::is_permutation(order, axes)) refuse("its transpose is not an order of its dimensions");
    if (!holds_values_) refuse("it is transposed after it was made bytes");
    const auto shape = shape_;
    const auto strides = [&](const std::vector<std::int64_t>& dimensions) {
      std::vector<std::size_t> of(shape.size());
      auto stride = type_.bytes();
      for (auto k = of.size(); k-- > 0; stride *= static_cast<std::size_t>(shape_[k])) {
        shape_[k] = shape[static_cast<std::size_t>(dimensions[k])];
        of[static_cast<std::size_t>(dimensions[k])] = stride;
      }
      return of;
    };
    add_step("transpose",
             [shape, own = strides(axes), stored = strides(order), value = type_.bytes()](Bytes from, Into into) {
               if (from.size() != into.size()) return false;
               each_run(shape, stored, own, value, [&](std::size_t a, std::size_t b, std::size_t bytes) {
                 std::memcpy(into.data() + b, from.data() + a, bytes);
               });
               return true;
             });
  }

  /// Adds a codec that turns numbers into other numbers.
  void add_filter(const std::string& name, const Json& options) {
    const auto decoded = number_type(options.at("dtype"), doing_);
    const auto astype = options.value("astype", Json());
    const auto encoded = astype.is_null() ? decoded : number_type(astype, doing_);
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
    type_ = encoded;
    bytes_ = bytes_of_chunk();
    chain_.most_encoded_bytes_ = std::max<std::uint64_t>(chain_.most_encoded_bytes_, *bytes_);
  }

  /// The values become bytes, in this order.
  void end_of_values(bool is_big_endian) {
    if (!holds_values_) refuse("it is made bytes twice");
    holds_values_ = false;
    const auto part = type_.part_bytes();
    if (is_big_endian && part > 1)
      add_step("bytes", part == 2 ? swap_parts<2> : part == 4 ? swap_parts<4> : swap_parts<8>);
  }

  CodecChain& chain_;
  NumberType type_;
  std::vector<std::int64_t> shape_;
  const std::string& doing_;
  std::optional<std::size_t> bytes_;  ///< none after a codec that compresses
  bool holds_values_ = true;          ///< no codec has made bytes of them
};

CodecChain::CodecChain(const Json& codecs, const NumberType& type, std::vector<std::int64_t> chunk,
                       const std::string& doing) {
  Builder builder(*this, type, std::move(chunk), doing);
  for (const auto& codec : codecs) builder.add(codec);
  builder.finish();
}

void CodecChain::decode(std::span<const std::byte> encoded, std::span<std::byte> into,
                        const std::function<std::string()>& doing) const {
  thread_local hdf5::FilterPipeline::Workspace workspace;
  const auto refuse_size = [&](const std::string& by) {
    throw Error(
        ExitCode::data, doing(),
        str("its ", encoded.size(), " stored bytes do not decode to ", into.size(), by.empty() ? "" : " by " + by),
        damaged);
  };
  auto bytes = encoded;
  std::size_t buffer = 0;
  for (auto i = steps_.size(); i-- > 0;) {
    const auto& step = steps_[i];
    if (!step.undo) {
      if (!check_and_remove_crc32c(bytes, step.is_at_end))
        throw Error(ExitCode::data, doing(), "its crc32c checksum does not match", damaged);
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
