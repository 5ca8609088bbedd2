#include "data/sources/fingerprint.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <zlib.h>

#include <algorithm>

namespace muster::detail::data {
namespace {

constexpr std::uint64_t block_bytes = 4096;

/// Calls `look` with the first unit and the number of units of each block: the first block, the last, and some between
/// them; once with all units if there are few. `units`: all units; `block`: units per block; `blocks`: number of
/// blocks, of which there are at least 2.
template <class Look>
void for_blocks(std::uint64_t units, std::uint64_t block, int blocks, Look&& look) {
  const auto some = static_cast<std::uint64_t>(std::max(2, blocks));
  if (units <= some * block) return look(std::uint64_t{0}, units);
  const auto last = units - block;
  for (std::uint64_t b = 0; b < some; ++b) look(last / (some - 1) * b + last % (some - 1) * b / (some - 1), block);
}

}  // namespace

std::uint32_t checksum_of(std::span<const std::byte> bytes, std::uint32_t before) {
  return static_cast<std::uint32_t>(
      ::crc32_z(before, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()));
}

FingerprintPart fingerprint_of(const File& file, int blocks) {
  FingerprintPart portion{.name = file.path().filename().string(), .bytes = file.size()};
  std::vector<std::byte> bytes;
  for_blocks(portion.bytes, block_bytes, blocks, [&](std::uint64_t first, std::uint64_t count) {
    bytes.resize(count);
    file.read_at(bytes, first);
    portion.checksum = checksum_of(bytes, portion.checksum);
  });
  return portion;
}

FingerprintPart fingerprint_of(const std::string& column, const at::Tensor& tensor, int blocks) {
  const at::NoGradGuard no_grad;
  const auto unit = static_cast<std::uint64_t>(tensor.element_size());
  FingerprintPart portion{.name = column, .bytes = static_cast<std::uint64_t>(tensor.numel()) * unit};
  if (tensor.numel() == 0 || tensor.is_meta() || tensor.layout() != at::kStrided) return portion;
  auto values = tensor;
  if (!values.is_contiguous()) {
    // Copies some rows, and not the whole tensor, to make them contiguous.
    std::vector<std::int64_t> rows;
    for_blocks(static_cast<std::uint64_t>(tensor.size(0)), 1, blocks, [&](std::uint64_t first, std::uint64_t count) {
      for (std::uint64_t row = first; row < first + count; ++row) rows.push_back(static_cast<std::int64_t>(row));
    });
    values = tensor.index_select(
        0, at::from_blob(rows.data(), {static_cast<std::int64_t>(rows.size())}, at::kLong).to(tensor.device()));
  }
  const auto flat = values.contiguous().view({-1});
  for_blocks(static_cast<std::uint64_t>(flat.numel()), std::max<std::uint64_t>(1, block_bytes / unit), blocks,
             [&](std::uint64_t first, std::uint64_t count) {
               const auto block =
                   flat.narrow(0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(count)).cpu();
               portion.checksum = checksum_of({static_cast<const std::byte*>(block.const_data_ptr()), block.nbytes()},
                                              portion.checksum);
             });
  return portion;
}

Json DatasetFingerprint::to_json() const {
  Json all = Json::array();
  for (const auto& portion : parts) all.push_back({portion.name, portion.bytes, portion.checksum});
  return {count, schema, all, order};
}

DatasetFingerprint DatasetFingerprint::from_json(const Json& json) {
  DatasetFingerprint print{.count = json[0], .schema = json[1], .order = json[3]};
  for (const auto& portion : json[2]) print.parts.push_back({portion[0], portion[1], portion[2]});
  return print;
}

std::optional<std::string> difference(const DatasetFingerprint& a, const std::string& here, const DatasetFingerprint& b,
                                      const std::string& there) {
  const auto say = [&](const std::string& what, const std::string& of_a, const std::string& of_b) {
    return what + of_a + " on " + here + " and " + of_b + " on " + there;
  };
  const auto number = [](auto value) { return std::to_string(value); };
  if (a.count != b.count) return say("it has ", number(a.count) + " samples", number(b.count));
  if (a.schema != b.schema) return say("its columns are ", a.schema, b.schema);
  const auto order = [](const DatasetFingerprint& print) { return print.order.empty() ? "in any order" : print.order; };
  if (a.order != b.order) return say("it is shuffled ", order(a), order(b));
  if (a.parts.size() != b.parts.size())
    return say("it is made of ", number(a.parts.size()) + " files", number(b.parts.size()));
  for (std::size_t p = 0; p < a.parts.size(); ++p) {
    const auto& mine = a.parts[p];
    const auto& theirs = b.parts[p];
    if (mine.bytes != theirs.bytes)
      return say(mine.name + " has ", number(mine.bytes) + " bytes", number(theirs.bytes));
    if (mine.checksum != theirs.checksum)
      return "the values of " + mine.name + " on " + here + " and of " + theirs.name + " on " + there + " differ";
  }
  return {};
}

}  // namespace muster::detail::data
