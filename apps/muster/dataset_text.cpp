#include "dataset_text.hpp"

#include "text.hpp"

namespace muster::tool {
namespace {

/// Returns the shape of a sample as text: "28 x 28"; "-" for a single value.
std::string sample_shape(const Json& shape) {
  std::string text;
  for (std::size_t i = 1; i < shape.size(); ++i) text += (text.empty() ? "" : " x ") + shape[i].dump();
  return text.empty() ? "-" : text;
}

/// Returns the number of samples in a chunk; if chunks do not hold whole samples, all sizes of a chunk; "-" if there
/// are no chunks.
std::string chunk_text(const Json& column) {
  const auto& chunk = column.at("chunk");
  if (chunk.is_null()) return "-";
  const auto& shape = column.at("shape");
  bool whole = true;
  std::string all = chunk.at(0).dump();
  for (std::size_t i = 1; i < chunk.size(); ++i) {
    whole = whole && chunk[i] == shape[i];
    all += " x " + chunk[i].dump();
  }
  return whole ? chunk.at(0).dump() : all;
}

/// Returns how training reads the column.
std::string reader_text(const Json& column) {
  const auto& reader = column.at("reader");
  return reader == "direct" ? "directly" : reader == "decoded" ? "decoded" : "by HDF5";
}

}  // namespace

std::string dataset_text(const Json& dataset) {
  std::string text = printable(dataset.at("path").get<std::string>()) + ": ";
  if (const auto& samples = dataset.at("samples"); !samples.is_null())
    text += samples.dump() + (samples == 1 ? " sample, " : " samples, ");
  text += bytes_text(dataset.at("bytes")) + "\n";
  const auto& columns = dataset.at("columns");
  if (columns.empty()) return text;
  Table table{
      {{"column"}, {"type"}, {"sample"}, {"size", true}, {"layout"}, {"chunk", true}, {"read"}, {"compression"}}, {}};
  for (const auto& column : columns)
    table.rows.push_back({column.at("name"), column.at("dtype"), sample_shape(column.at("shape")),
                          bytes_text(column.at("bytes")), column.at("layout"), chunk_text(column), reader_text(column),
                          column.at("compression")});
  return text + to_text(table);
}

}  // namespace muster::tool
