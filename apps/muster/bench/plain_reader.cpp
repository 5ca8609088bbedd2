#include "plain_reader.hpp"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <unistd.h>
#include <muster/convert.hpp>
#include <muster/error.hpp>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

namespace muster::bench {
namespace {

using Order = std::vector<std::int64_t>;

/// A file descriptor that closes itself.
class OpenFile {
 public:
  explicit OpenFile(std::string path)
      : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) fail(false);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() { ::close(descriptor_); }

  void read(char* into, std::int64_t bytes, std::int64_t offset) const {
    while (bytes > 0) {
      const auto got = ::pread(descriptor_, into, static_cast<std::size_t>(bytes), static_cast<off_t>(offset));
      if (got <= 0) fail(got == 0);
      into += got;
      offset += got;
      bytes -= got;
    }
  }

 private:
  [[noreturn]] void fail(bool ended) const {
    throw Error(ExitCode::retry, "reading " + path_, ended ? "it has become shorter" : std::strerror(errno),
                "Check that nothing else writes it, and the disk");
  }

  std::string path_;
  int descriptor_;
};

/// Reads one column of the batch into a new tensor, in the order of the file; adjacent rows are read at once. `rows`:
/// for each row, its index in the file and its position in the batch, sorted.
void read_column(const OpenFile& file, const Column& column, std::int64_t offset,
                 const std::vector<std::pair<std::int64_t, std::int64_t>>& rows) {
  std::vector<std::int64_t> shape{static_cast<std::int64_t>(rows.size())};
  shape.insert(shape.end(), column.shape.begin(), column.shape.end());
  const auto tensor = at::empty(shape, column.dtype);
  const auto bytes = bytes_of(column);
  auto* const base = static_cast<char*>(tensor.mutable_data_ptr());
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    const auto [row, place] = rows[begin];
    const auto follows = [&](std::size_t i) {
      const auto distance = static_cast<std::int64_t>(i - begin);
      return rows[i] == std::pair{row + distance, place + distance};
    };
    for (end = begin + 1; end < rows.size() && follows(end);) ++end;
    file.read(base + place * bytes, static_cast<std::int64_t>(end - begin) * bytes, offset + row * bytes);
  }
}

void read_batches(const OpenFile& file, const DatasetPlan& plan, const Order& order) {
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;
  for (std::int64_t begin = 0; begin < plan.samples; begin += plan.batch) {
    rows.clear();
    for (auto i = begin; i < std::min(begin + plan.batch, plan.samples); ++i)
      rows.emplace_back(order[static_cast<std::size_t>(i)], i - begin);
    std::ranges::sort(rows);
    for (std::size_t c = 0; c < plan.columns.size(); ++c) read_column(file, plan.columns[c], plan.offsets[c], rows);
  }
}

}  // namespace

std::int64_t bytes_of(const Column& column) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(column.dtype));
  for (const auto size : column.shape) bytes *= size;
  return bytes;
}

std::vector<std::string> DatasetPlan::names() const {
  std::vector<std::string> all;
  for (const auto& column : columns) all.push_back(column.name);
  return all;
}

DatasetPlan plan_of(const std::string& path, std::int64_t batch, std::int64_t most_bytes) {
  const Dataset dataset(path);
  DatasetPlan plan{.path = path, .columns = dataset.schema(), .count = dataset.count(), .batch = batch};
  for (const auto& column : plan.columns) plan.sample_bytes += bytes_of(column);
  const auto batches = most_bytes / std::max<std::int64_t>(1, plan.sample_bytes) / batch + 1;
  plan.samples = batches > plan.count / batch ? plan.count : batches * batch;
  const auto description = describe_dataset(path);
  for (const auto& column : plan.columns)
    for (const auto& described : description.at("columns"))
      if (described.at("name") == column.name && !described.at("offset").is_null())
        plan.offsets.push_back(described.at("offset"));
  if (plan.offsets.size() != plan.columns.size()) plan.offsets.clear();
  return plan;
}

PlainReader::PlainReader(const DatasetPlan& plan, bool shuffle) {
  if (plan.offsets.empty()) {
    read_ = plain_pass(plan.path, plan.names(), plan.samples);
    return;
  }
  const auto order = std::make_shared<Order>(static_cast<std::size_t>(plan.count));
  std::iota(order->begin(), order->end(), 0);
  if (shuffle) std::ranges::shuffle(*order, std::mt19937_64(1));
  const auto end_of_path = plan.path.rfind(":/");
  const auto file = std::make_shared<OpenFile>(plan.path.substr(0, end_of_path));
  read_ = [=] { read_batches(*file, plan, *order); };
}

std::string PlainReader::name(const DatasetPlan& plan) {
  return plan.offsets.empty() ? "read_and_decode" : "raw_pread";
}

std::string PlainReader::description(const DatasetPlan& plan) {
  return plan.offsets.empty() ? "read_and_decode reads the columns in the order of the file, decodes each chunk once, "
                                "and makes no batches, on one core, or of a Zarr store on as many threads as muster; "
                                "muster decodes on all cores of the rank"
                              : "raw_pread reads each batch's rows with pread into new tensors, without reading ahead";
}

}  // namespace muster::bench
