#include "predict/prediction_file.hpp"

#include "base/json.hpp"
#include "checkpoint/files/state_file.hpp"
#include "comm/on_ranks.hpp"
#include "muster/error.hpp"
#include "muster/json.hpp"
#include "storage/folder_tier.hpp"

#include <ATen/ops/empty.h>
#include <unistd.h>

#include <span>
#include <utility>

namespace muster::detail::predict {
namespace {

/// Returns a tensor with the shape and type of a whole column that only uses the memory of one element.
at::Tensor outline(const Column& column, std::int64_t rows) {
  auto shape = column.shape;
  shape.insert(shape.begin(), rows);
  return at::empty({1}, column.dtype).expand(shape);
}

}  // namespace

PredictionFile::PredictionFile(const Communicator& ranks, std::filesystem::path output, const Schema& columns,
                               std::int64_t rows)
    : ranks_(ranks), output_(std::move(output)) {
  const auto made = comm::run_on_root(ranks_, [&] {
    checkpoint::Tensors outlines;
    for (const auto& column : columns) {
      if (column.name.empty() || column.name.find('/') != std::string::npos)  // HDF5 would make a subgroup of it
        throw Error(ExitCode::usage, "writing " + output_.string(), "a column is called \"" + column.name + "\"",
                    "Give it a name without \"/\"");
      if (!is_utf8(column.name))
        throw Error(ExitCode::usage, "writing " + output_.string(), "the name of a column is not UTF-8",
                    "Give it another name");
      outlines[column.name] = outline(column, rows);
    }
    checkpoint::check_storable(outlines);
    const auto layout = checkpoint::make_layout(outlines);
    remove_unfinished(output_, /*none_writes=*/false);
    const auto path = temporary_beside(output_);
    temporary_.path = path;
    storage::create_file(path, layout.bytes);
    File file(path, File::Mode::write);
    for (const auto& part : layout.structure) file.write_at(std::as_bytes(std::span(part.bytes)), part.offset);
    file.sync();
    file.close();
    Json places = Json::object();
    for (const auto& column : layout.tensors) places[column.name] = column.offset;
    return Json{{"path", path.string()}, {"places", places}};
  });
  made.at("places").get_to(offsets_);
  file_.emplace(std::filesystem::path(made.at("path").get<std::string>()), File::Mode::write);
}

PredictionFile::TemporaryFile::~TemporaryFile() {
  if (!path.empty()) ::unlink(path.c_str());
}

void PredictionFile::write(const Batch& rows, std::int64_t first) {
  for (const auto& [name, tensor] : rows) {
    const auto values = tensor.resolve_conj().resolve_neg().contiguous();
    const auto row_bytes = values.nbytes() / static_cast<std::uint64_t>(values.size(0));
    file_->write_at({static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()},
                    offsets_.at(name) + static_cast<std::uint64_t>(first) * row_bytes);
  }
}

void PredictionFile::finish() {
  file_->sync();
  file_->close();
}

void PredictionFile::put_in_place() {
  comm::run_on_root(ranks_, [&] {
    replace_file(output_, temporary_.path);
    temporary_.path.clear();
  });
}

}  // namespace muster::detail::predict
